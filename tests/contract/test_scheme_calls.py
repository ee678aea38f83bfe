"""What the calls of every scheme take and refuse: the library's part, whatever the backend."""

import pickle
import threading
from functools import partial
from multiprocessing import ProcessError
from typing import Any

import numpy as np
import pytest
import torch
from backends import BuiltIn
from small_models import linear, make_engine, make_trained
from tensordict import TensorDict
from torch import nn

import wsync
from wsync import WeightStrategy
from wsync.testing import commands
from wsync.testing.commands import WorkerState
from wsync.testing.hooks import TIMEOUT
from wsync.testing.models import Small, WithExtraState, digest, fill
from wsync.transforms import Fuse

LONGER, DOUBLE = partial(Small, 7), partial(Small, 4, torch.float64)


class OtherName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(4))


@pytest.mark.parametrize(("make", "problem"), [(LONGER, r"\[7\]"), (DOUBLE, "float64"), (OtherName, "weight")])
def test_a_worker_with_a_model_that_does_not_fit_is_named(backend: BuiltIn, make: Any, problem: str) -> None:
    with backend.workers(2) as workers, backend.make_scheme(timeout=60.0) as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=2)
        workers[0].start(commands.join, scheme, Small, 0, "policy")
        workers[1].start(commands.join, scheme, make, 1, "policy")
        with pytest.raises(wsync.WorkerFailed, match=rf"(?s)worker 1.*LayoutMismatch.*{problem}") as failed:
            scheme.connect()
        assert set(failed.value.workers) == {1}
        workers[0].result()
        assert workers[0].call(commands.output)[0] == 1
        with pytest.raises(ProcessError, match=problem):
            workers[1].result()


def test_a_transform_that_does_not_fit_is_an_error_at_connect(backend: BuiltIn) -> None:
    with backend.workers(1) as workers, backend.make_scheme(timeout=60.0) as scheme:
        scheme.receive_transform = Fuse({"qkv.weight": ["q.weight", "o.weight"]})
        scheme.init_on_sender("policy", model=make_trained(), num_workers=1)
        workers[0].start(commands.join, scheme, make_engine, 0, "policy")
        with pytest.raises(wsync.WeightSyncError, match=r"receive_transform Fuse.*o\.weight"):
            scheme.connect()
        with pytest.raises(ProcessError, match=r"receive_transform Fuse.*o\.weight"):
            workers[0].result()


def connect_again(state: WorkerState, worker_idx: int) -> None:
    state.schemes["policy"].connect(worker_idx=worker_idx)


def test_a_worker_index_that_does_not_exist_or_is_taken_is_refused(backend: BuiltIn) -> None:
    with backend.workers(3) as workers, backend.make_scheme(timeout=60.0) as scheme:
        scheme.init_on_sender("policy", model=Small(), num_workers=2)
        workers[2].start(commands.join, scheme, Small, 5, "policy")
        workers[0].start(commands.join, scheme, Small, 0, "policy")
        connecting = threading.Thread(target=scheme.connect)
        connecting.start()
        with pytest.raises(ProcessError, match=r"5.*out of range"):
            workers[2].result()
        workers[0].result()
        workers[2].start(commands.join, scheme, Small, 0, "policy")
        with pytest.raises(ProcessError, match=r"0.*taken"):
            workers[2].result()
        workers[1].call(commands.join, scheme, Small, 1, "policy")
        connecting.join()
        for worker_idx in (0, 1):
            with pytest.raises(ProcessError, match="already"):
                workers[0].call(connect_again, worker_idx)


def test_live_weights_are_read_at_each_send_and_others_may_be_given_to_connect(backend: BuiltIn) -> None:
    live = TensorDict({"weight": torch.ones(4)})
    with backend.workers(1) as workers, backend.make_scheme(timeout=60.0) as scheme:
        scheme.init_on_sender("policy", weights=live, num_workers=1)
        workers[0].start(commands.join, scheme, Small, 0, "policy")
        scheme.connect(weights=fill(Small(), 7))
        workers[0].result()
        assert workers[0].call(commands.output)[0] == 7
        live.fill_("weight", 3)
        scheme.send()
        assert workers[0].call(commands.output)[0] == 3


def plus_worker_idx(worker_idx: int, weights: Any) -> Any:
    return {name: value + worker_idx for name, value in weights.items()}


def test_device_map_fn_maps_the_weights_of_each_worker(backend: BuiltIn) -> None:
    model = fill(Small(), 10)
    init = {"model": model, "device_map_fn": plus_worker_idx}
    with backend.connected(init=init, strategy="state_dict") as session:
        assert session.outputs() == [10, 11]
        fill(model, 20)
        session.scheme.send()
        assert session.outputs() == [20, 21] and model.weight[0] == 20


def test_worker_ids_and_weights_per_worker_have_to_name_workers(backend: BuiltIn) -> None:
    with backend.connected() as session:
        session.send(4, worker_ids=torch.tensor([1]))
        assert session.outputs() == [1, 4]
        for wrong in (2, -1, [0, 7], 1.0, [[0]], [True, False], []):
            with pytest.raises(ValueError, match="worker_ids"):
                session.scheme.send(worker_ids=wrong)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="per worker"):
            session.scheme.send({0: Small()})
        with pytest.raises(ValueError, match="all workers"):
            session.scheme.send({"weight": torch.zeros(4)}, worker_ids=0, partial=True)


def test_calls_in_the_wrong_state_are_errors(backend: BuiltIn) -> None:
    with backend.make_scheme(timeout=60.0) as scheme:
        for call in (scheme.send, scheme.send_async, scheme.wait_async, scheme.connect, scheme.receive):
            with pytest.raises(wsync.NotConnected):
                call()
        with pytest.raises(RuntimeError):
            scheme.init_on_receiver("policy", model=Small())
        with pytest.raises(ValueError, match="model, weights"):
            scheme.init_on_sender("policy", model=Small(), weights=Small())
        with pytest.raises(ValueError, match="workers"):
            scheme.init_on_sender("policy", model=Small(), devices=["cpu"], num_workers=2)
        scheme.init_on_sender("policy", model=nn.Linear(512, 512), num_workers=1)
        with pytest.raises(RuntimeError, match="already"):
            scheme.init_on_sender("policy", model=Small(), num_workers=1)
        with pytest.raises(wsync.NotConnected, match="connect"):
            scheme.send()
        assert len(pickle.dumps(scheme)) < 2**16  # without weights


@pytest.mark.parametrize(
    ("model_id", "initiator", "error"),
    [("policy", "sender", ValueError), ("critic", "receiver", wsync.WeightSyncError)],
)
def test_models_that_cannot_be_switched_together(backend: BuiltIn, model_id: str, initiator: str, error: Any) -> None:
    """Two of one name, and a model of workers that fetch."""
    with backend.connected(1) as first, backend.make_scheme(initiator=initiator) as second:
        second.init_on_sender(model_id, model=Small(), num_workers=1)
        with pytest.raises(error, match=r"model_id|one by one"):
            wsync.synchronize({first.scheme: fill(Small(), 2), second: fill(Small(), 3)})
        assert first.outputs() == [1]


class TwoProducts(nn.Module):
    """Multiplies by a parameter, which ``torch.autocast`` casts to bfloat16 and keeps cast until its context ends."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(32, 32))

    def forward(self) -> torch.Tensor:
        return torch.mm(torch.eye(32), self.weight)[0]


def output_in_autocast(state: WorkerState, last: bool) -> float:
    """The output of a forward in one ``torch.autocast`` context, which is left after the last one."""
    if "autocast" not in state.kept:
        state.kept["autocast"] = torch.autocast("cpu", torch.bfloat16)
        state.kept["autocast"].__enter__()
    output = state.models["policy"]()
    assert output.dtype is torch.bfloat16
    if last:
        state.kept.pop("autocast").__exit__(None, None, None)
    return output[0].item()


def test_forwards_in_one_autocast_context_use_the_new_version(backend: BuiltIn) -> None:
    with backend.connected(1, make=TwoProducts) as session:
        for value in range(2, 20):
            session.send(value)
            assert session.workers.call(output_in_autocast, value == 19) == [value]


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_receive_returns_the_format_of_the_strategy(backend: BuiltIn, strategy: str) -> None:
    with backend.connected(1, strategy=strategy) as session:
        worker = session.workers[0]
        assert worker.call(commands.receive, 0.0) is None  # the first weights count as seen
        worker.start(commands.receive, 20.0)
        session.scheme.send()
        assert worker.result() == ("dict" if strategy == "state_dict" else "TensorDict", ["weight"])
        assert worker.call(commands.receive, 0.0) is None


def test_a_report_accounts_for_every_worker_and_for_all_of_the_time(backend: BuiltIn) -> None:
    with backend.connected() as session, backend.join(session.workers, model_id="critic") as critic:
        reports: list[Any] = [session.send(2), session.send(3, worker_ids=1), session.update(4)]
        assert [dict(report.workers) for report in reports] == [{0: 2, 1: 2}, {1: 3}, {0: 4, 1: 4}]
        for report in [*reports, *wsync.synchronize({session.scheme: None, critic.scheme: None}).values()]:
            assert report.bytes >= 16 and report.seconds > 0
            assert sum(report.phases.values()) == pytest.approx(report.seconds, rel=0.0, abs=1e-9), report


def test_a_successor_gets_the_weights_of_its_predecessor(backend: BuiltIn) -> None:
    """Not those that another worker was sent since."""
    with backend.connected(init={"params_map": {0: fill(Small(), 1), 1: fill(Small(), 2)}}) as session:
        session.scheme.send({0: fill(Small(), 3), 1: fill(Small(), 4)})
        session.outputs()
        session.send(5, worker_ids=1)
        session.workers[0].kill()
        session.restart(0)
        assert session.outputs() == [3, 5]


def test_without_a_model_the_first_weights_sent_define_the_layout(backend: BuiltIn) -> None:
    with backend.connected(init={}) as session:
        assert session.versions() == [0, 0]
        for worker in session.workers:
            worker.start(commands.receive, 20.0)
        session.send(5)
        assert all(session.workers.results())
        assert session.outputs() == [5, 5]
        with pytest.raises(wsync.LayoutMismatch, match=r"weight.*7"):
            session.scheme.send(Small(7))
        session.scheme.send(fill(Small(), 6).state_dict())
        assert session.outputs() == [6, 6]


# --- prepare_weights: the weights that a send would deliver, without sending them ---


def test_prepared_weights_have_the_format_of_the_strategy() -> None:
    with wsync.SharedMemWeightSyncScheme() as scheme:
        with pytest.raises(wsync.NotConnected):
            scheme.prepare_weights(None, "policy")
        scheme.init_on_sender("policy", model=linear(1), num_workers=2)
        assert scheme.prepare_weights(None, "policy")["bias"].tolist() == [1, 1]
        prepared = scheme.prepare_weights(linear(2), "policy", WeightStrategy("state_dict"))
        assert isinstance(prepared, dict) and prepared["bias"].tolist() == [2, 2]
        nested = nn.Sequential(linear(4))
        prepared = scheme.prepare_weights(nested, "policy")
        assert isinstance(prepared, TensorDict) and prepared["0", "bias"].tolist() == [4, 4]
        prepared = scheme.prepare_weights(nested, "policy", WeightStrategy("state_dict"))
        assert isinstance(prepared, dict) and prepared["0.bias"].tolist() == [4, 4]
        context = nn.ModuleDict({"policy": linear(3)})
        assert scheme.prepare_weights(None, "policy", context=context)["bias"].tolist() == [3, 3]
        assert scheme.version == 0 and torch.equal(scheme.weights["bias"], torch.ones(2))


def biases(by_worker: dict[int, Any]) -> dict[int, list[float]]:
    return {worker: weights["bias"].tolist() for worker, weights in by_worker.items()}


def test_prepared_weights_per_worker() -> None:
    with wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", params_map={np.int64(0): linear(1), np.int64(1): linear(2)})
        prepared = scheme.prepare_weights(None, "policy")
        assert biases(prepared) == biases(scheme.weights) == {0: [1, 1], 1: [2, 2]}
        prepared = scheme.prepare_weights({0: linear(3).state_dict(), 1: linear(4).state_dict()}, "policy")
        assert biases(prepared) == {0: [3, 3], 1: [4, 4]}


# --- send_async, wait_async and pull: every acknowledgement is waited for once, and none is lost ---


def test_an_error_is_raised_by_a_later_wait(backend: BuiltIn) -> None:
    with backend.connected(make=WithExtraState) as session:
        session.model.state = "refuse 0"
        session.scheme.send_async(worker_ids=0)
        session.model.state = "accepted"
        session.scheme.send(worker_ids=1)  # says nothing about worker 0
        with pytest.raises(wsync.WorkerFailed, match=r"(?s)worker 0.*ArithmeticError"):
            session.scheme.wait_async()
        session.model.state = "refuse 0"
        session.scheme.send_async(worker_ids=0)
        session.model.state = "accepted"
        with pytest.raises(wsync.WorkerFailed, match=r"(?s)worker 0.*ArithmeticError"):
            session.scheme.send_async(worker_ids=1)
            session.scheme.wait_async()
        report = session.scheme.wait_async()  # of version 5, if the error came so soon that `send_async` has raised it
        assert report is None or report.version == 5
        assert session.workers[1].call(commands.version) == 5


def test_a_worker_that_a_newer_send_leaves_out_is_waited_for(backend: BuiltIn) -> None:
    with backend.connected() as session:
        session.scheme.timeout = 0.5
        session.workers[1].stop()
        session.post(2)
        session.send(3, worker_ids=0)
        with pytest.raises(wsync.SyncTimeout, match=r"(?s)worker 1.*A silent worker stays connected.*readmit"):
            session.scheme.wait_async()
        session.scheme.timeout = 60.0
        session.workers[1].resume()
        assert session.scheme.wait_async() is None
        assert session.workers[0].call(commands.output)[0] == 3


def test_replacements_may_connect_in_any_order_and_before_they_are_readmitted(backend: BuiltIn) -> None:
    with backend.connected(timeout=20.0) as session:
        for worker in session.workers:
            worker.kill()
        successors = [session.workers.replace(index) for index in range(2)]
        for index in (1, 0):
            session.begin_join(successors[index], index)
        for index, successor in enumerate(successors):
            session.scheme.readmit(index)
            successor.result()
        session.send(3)
        assert session.outputs() == [3, 3]


def test_a_large_message_to_a_stopped_worker_does_not_delay_the_others(backend: BuiltIn) -> None:
    with backend.connected(make=WithExtraState) as session:
        session.workers[0].stop()
        session.model.state = bytes(16 << 20)  # more than a socket buffers
        session.post(2)
        assert session.workers[1].call(commands.receive, 20.0) is not None
        assert session.workers[1].call(commands.output)[0] == 2
        session.workers[0].resume()
        session.scheme.wait_async()
        session.model.state = "small"
        session.send(3)
        assert session.digests() == [digest(session.model)] * 2


def test_a_worker_installs_the_newest_version_when_it_pulls(backend: BuiltIn) -> None:
    """``send`` waits for no worker; a version that was not pulled is skipped; a replacement pulls, too."""
    with backend.connected(initiator="receiver", max_staleness=3) as session:  # of which none is further behind
        for value in (2, 3, 4):
            report = session.send(value)
            assert report is not None and report.version == value
            assert session.outputs() == [1, 1]
        assert session.workers[0].call(commands.pull) == 4
        assert session.outputs() == [4, 1]
        session.send(5)
        for _ in range(2):  # the second time there is no newer one
            assert session.workers.call(commands.pull) == [5, 5]
        session.workers[1].kill()
        assert session.workers[0].call(commands.pull) == 5  # the sender has read all messages, the death's too
        with pytest.raises(wsync.WorkerDied, match="worker 1"):
            session.send(6)
        version = session.scheme.version
        assert session.restart(1) == version
        session.send(7)
        assert session.outputs() == [5, 6]
        assert session.workers.call(commands.pull) == [version + 1] * 2


def test_a_worker_of_a_connect_that_failed_takes_the_first_weights(backend: BuiltIn) -> None:
    """There was no layout yet when it connected."""
    with backend.workers(2) as workers, backend.make_scheme(timeout=TIMEOUT) as scheme:
        scheme.init_on_sender("policy", num_workers=2)
        workers[0].start(commands.join, scheme, Small, 0, "policy")
        scheme.timeout, missing = 1.0, ""
        while "worker(s) 1 did not connect" not in missing:  # worker 0 may take longer
            with pytest.raises(wsync.SyncTimeout, match=r"did not connect") as raised:
                scheme.connect()
            missing = str(raised.value)
        scheme.timeout = TIMEOUT
        workers[1].start(commands.join, scheme, Small, 1, "policy")
        scheme.connect(weights=fill(Small(), 4))
        for worker in workers:
            worker.result()
            assert worker.call(commands.output)[0] == 4
