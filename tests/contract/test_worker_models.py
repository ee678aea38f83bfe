"""What a worker does with its model beside acting: an update neither disturbs that nor is disturbed by it."""

from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import pytest
import torch
from backends import BuiltIn, Multiprocess
from small_models import TwoWeights
from tensordict import TensorDict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import wsync
from wsync.testing import WorkerPool, commands
from wsync.testing.commands import WorkerState
from wsync.testing.models import Small, WithExtraState, digest, fill, scramble


def train_in_place(state: WorkerState) -> None:
    """One step, by the worker alone."""
    with wsync.gate(), torch.no_grad():
        state.models["policy"].weight.sub_(1.0)


def test_workers_with_copies_may_train_them_in_place(pool: WorkerPool) -> None:
    Multiprocess.pool = pool
    with Multiprocess().connected() as session:
        for value in range(2, 6):
            session.send(value)
            session.workers[0].call(train_in_place)
            assert session.outputs() == [value - 1, value]


def model_given_by_torch(state: WorkerState, scheme: wsync.WeightSyncScheme, worker_idx: int, model: nn.Module) -> None:
    state.schemes["policy"], state.models["policy"] = scheme, model
    scheme.init_on_receiver("policy", model=model, worker_idx=worker_idx)
    scheme.connect()


def both_values(state: WorkerState) -> list[float]:
    with wsync.gate():
        return [tensor[0].item() for tensor in state.models["policy"].state_dict().values()]


def test_a_model_sent_by_torch_multiprocessing_is_not_shared_with_the_trainer(backend: BuiltIn) -> None:
    model = fill(TwoWeights(), 1).share_memory()
    with backend.workers(2) as workers, backend.make_scheme(timeout=30.0) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        for worker_idx, worker in enumerate(workers):
            worker.start(model_given_by_torch, scheme, worker_idx, model)
        scheme.connect()
        workers.results()
        fill(model, 2)
        assert workers.call(both_values) == [[1, 1], [1, 1]]
        scheme.send({0: fill(TwoWeights(), 3), 1: fill(TwoWeights(), 4)})
        assert workers.call(both_values) == [[3, 3], [4, 4]]
        assert model.weight[0] == 2


def gradient_through_functorch(state: WorkerState) -> float:
    model = state.models["policy"]
    return torch.func.grad(lambda x: (model() * x).sum())(torch.ones(4))[0].item()


def test_a_forward_inside_a_function_transform_uses_the_update(backend: BuiltIn) -> None:
    with backend.connected(1) as session:
        for value in range(2, 8):
            session.send(value)
            assert session.workers[0].call(gradient_through_functorch) == value


def convert_to_half(state: WorkerState) -> None:
    with wsync.gate():
        state.models["policy"].half()


def dtype_of_weight(state: WorkerState) -> str:
    return str(state.models["policy"].weight.dtype)


def test_a_model_that_a_worker_has_converted_refuses_updates_and_stays_converted(backend: BuiltIn) -> None:
    with backend.connected() as session:
        session.send(2)
        session.send(3)
        session.workers[1].call(convert_to_half)
        with pytest.raises(wsync.WorkerFailed, match=r"(?s)worker 1.*'weight'.*float16") as failed:
            session.update(4)
        assert set(failed.value.workers) == {1} and failed.value.version == 4 and "Cast" in str(failed.value)
        assert session.workers[1].call(dtype_of_weight) == "torch.float16"
        assert session.workers[0].call(commands.output)[0] == 4


def many_values() -> Small:
    """A model of 1 MiB."""
    return Small(1 << 18)


def values_of_copies(state: WorkerState, count: int) -> list[list[float]]:
    """The different values in each of ``count`` copies of the weights, made as they are received."""
    transport, copy = state.schemes["policy"].receiver_transport, many_values()
    values: list[list[float]] = []
    while len(values) < count:
        fill(copy, -1)
        assert transport is not None and transport.receive_weights(20.0, model=copy) is not None
        values.append(copy.weight.unique().tolist())
    return values


def test_received_weights_are_copied_from_one_version(pool: WorkerPool, backend: BuiltIn) -> None:
    models = cycle([fill(many_values(), value) for value in range(4)])
    with backend.connected(1, many_values) as session, ThreadPoolExecutor(1) as executor:
        copying = executor.submit(session.workers[0].call, values_of_copies, 30)
        while not copying.done():
            session.scheme.send(next(models))
        values = copying.result()
        assert len(values) == 30 and all(value in ([0.0], [1.0], [2.0], [3.0]) for value in values)


def test_an_update_without_extra_state_leaves_each_worker_its_own(backend: BuiltIn) -> None:
    models = [scramble(WithExtraState(), seed) for seed in (0, 1, 0)]
    with backend.connected(3, WithExtraState) as session:
        session.scheme.send(dict(enumerate(models)))
        for value in (2.0, 3.0):
            session.scheme.send(TensorDict({"weight": torch.full((3,), value)}))
            assert session.digests() == [digest(fill(model, value)) for model in models]
        wsync.synchronize({session.scheme: TensorDict({"weight": torch.full((3,), 4.0)})})
        assert session.digests() == [digest(fill(model, 4.0)) for model in models]
        report = session.scheme.send(fill(models[1], 5.0))
        assert report is not None and dict(report.workers) == dict.fromkeys(range(3), report.version)
        assert session.digests() == [digest(models[1])] * 3


@pytest.mark.usefixtures("group")
def test_sharded_weights_are_refused(backend: BuiltIn) -> None:
    """By name, before anything is sent, also after updates by the fast path."""
    with backend.connected(1, Small, init={}) as session:
        sharded = fill(Small(), 9)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        for value in (2, 3):
            session.send(value)
        for weights in (sharded, sharded.state_dict(), TensorDict.from_module(sharded)):
            with pytest.raises(wsync.LayoutMismatch, match=r"'weight' is a shard.*DTensor"):
                session.scheme.send(weights)
        assert session.outputs() == [3]
        session.send(4)
        assert session.outputs() == [4]
