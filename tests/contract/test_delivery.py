"""What is sent arrives: whole, to whom it was sent, and only then."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import threading
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from contract_models import Apart, Hard, Noted, Other, Small, big, digest, double, fill, longer, scramble, strides, ties
from crew import Host, RemoteError, crew, establish
from tensordict import TensorDict
from torch import nn

import wsync


def remote_shape(host: Host) -> tuple[dict[str, tuple[int, ...]], bool]:
    model = host.models["policy"]
    return strides(model), ties(model)


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
def test_hard_model_bit_for_bit(make_scheme: Any, strategy: str) -> None:
    model = scramble(Hard(), 1)
    with crew(2) as workers, make_scheme(strategy=strategy) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        assert workers.follow(scheme, Hard) == [1, 1]
        assert workers.all("digest") == [digest(model)] * 2
        assert workers.all("run", remote_shape) == [(strides(model), True)] * 2

        scramble(model, 2)
        scheme.send()
        assert workers.all("digest") == [digest(model)] * 2

        other = scramble(Hard(), 3)
        scheme.send(other)
        assert workers.all("digest") == [digest(other)] * 2

        scramble(other, 4)
        scheme.send(other.state_dict())  # lacks what is not persistent: that is the model's own
        expected = digest(other) | {"scratch": digest(model)["scratch"]}
        assert workers.all("digest") == [expected] * 2

        scramble(other, 5)
        note = expected["tail._extra_state"]
        scheme.send(TensorDict.from_module(other).data.clone())  # cannot say the extra state: it stays
        assert workers.all("digest") == [digest(other) | {"tail._extra_state": note}] * 2

        scheme.send(scheme.strategy.extract_weights(other))
        assert workers.all("digest") == [digest(other)] * 2
        assert workers.all("run", remote_shape) == [(strides(model), True)] * 2


def test_receive_hands_out_the_strategys_format(make_scheme: Any) -> None:
    for strategy, kind, keys in (("tensordict", "TensorDict", ["weight"]), ("state_dict", "dict", ["weight"])):
        with crew(1) as workers, make_scheme(strategy=strategy) as scheme:
            scheme.init_on_sender("policy", model=Small(), num_workers=1)
            workers.follow(scheme, Small)
            assert workers[0].call("receive", 0.0) is None  # the first weights count as seen
            assert workers[0].call("receive", 0.05) is None
            workers[0].start("receive", 20.0)  # woken by the send, or finds it done
            scheme.send()
            assert workers[0].result() == (kind, keys)
            assert workers[0].call("receive", 0.0) is None


def test_worker_ids(make_scheme: Any) -> None:
    model = fill(Small(), 1)
    with crew(3) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=3)
        workers.follow(scheme, Small)
        scheme.send(fill(model, 2), worker_ids=np.int64(1))
        assert [seen[0] for seen in workers.all("forward")] == [1, 2, 1]
        scheme.send(fill(model, 3), worker_ids=[0, 2])
        assert [seen[0] for seen in workers.all("forward")] == [3, 2, 3]
        assert workers.all("version") == [3, 2, 3]
        scheme.send(fill(model, 4), worker_ids=torch.tensor([2, 1]))
        assert [seen[0] for seen in workers.all("forward")] == [3, 4, 4]
        for wrong in (3, -1, [0, 7], 1.0, [0, 1.0], [[0]], [True, False], torch.tensor([True, False, True])):
            with pytest.raises(ValueError, match=r"unknown worker_ids .*0 to 2"):
                scheme.send(worker_ids=wrong)
        with pytest.raises(ValueError, match="empty"):
            scheme.send(worker_ids=[])
        assert workers.all("version") == [3, 4, 4]
        report = scheme.send(fill(model, 5))
        assert report is not None and dict(report.workers) == {0: 5, 1: 5, 2: 5}
        assert report.bytes >= 16 and report.seconds > 0
        assert [seen[0] for seen in workers.all("forward")] == [5, 5, 5]


def test_weights_per_worker(make_scheme: Any) -> None:
    with crew(2) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", params_map={np.int64(0): fill(Small(), 1), torch.tensor(1): fill(Small(), 2)})
        workers.follow(scheme, Small)
        assert [seen[0] for seen in workers.all("forward")] == [1, 2]
        for first, second in ((0, 1), (np.int64(0), np.int32(1)), (torch.tensor(0), torch.tensor(1))):
            scheme.send({first: fill(Small(), -1), second: fill(Small(), -2)})
            assert [seen[0] for seen in workers.all("forward")] == [-1, -2]
        for round_ in range(3, 9):
            scheme.send({0: fill(Small(), round_), 1: fill(Small(), -round_).state_dict()})
            assert [seen[0] for seen in workers.all("forward")] == [round_, -round_]
        with pytest.raises(ValueError, match="per worker"):
            scheme.send({0: Small()})
        with pytest.raises(ValueError, match="have worker 0 twice"):
            scheme.send({torch.tensor(0): Small(), torch.tensor(0): Small()})
        scheme.send(fill(Small(), 9))
        assert [seen[0] for seen in workers.all("forward")] == [9, 9]


def plus_worker(worker: int, weights: Any) -> Any:
    return {name: value + worker for name, value in weights.items()}


def test_phases_add_up_to_the_latency(make_scheme: Any) -> None:
    schemes = {"policy": make_scheme(), "critic": make_scheme()}
    with crew(2) as workers, schemes["policy"] as scheme, schemes["critic"] as critic:
        for name, one in schemes.items():
            one.init_on_sender(name, model=Small(), num_workers=2)
            assert workers.follow(one, Small, name) == [1, 1]
        scheme.send_async()
        reports = [scheme.send(), scheme.send(), scheme.send(Small()), scheme.send(worker_ids=1)]
        scheme.send_async()
        reports += [scheme.wait_async(), *wsync.synchronize({scheme: None, critic: None}).values()]
    for report in reports:
        assert sum(report.phases.values()) == pytest.approx(report.seconds, rel=0.0, abs=1e-9), report


def test_device_map_fn(make_scheme: Any) -> None:
    model = fill(Small(), 10)
    with crew(2) as workers, make_scheme(strategy="state_dict") as scheme:
        scheme.init_on_sender("policy", model=model, device_map_fn=plus_worker, num_workers=2)
        workers.follow(scheme, Small)
        assert [seen[0] for seen in workers.all("forward")] == [10, 11]
        fill(model, 20)
        scheme.send()
        assert [seen[0] for seen in workers.all("forward")] == [20, 21]
        assert model.weight[0] == 20


def test_send_async_and_wait(make_scheme: Any) -> None:
    model = fill(Small(), 1)
    with crew(2) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Small)
        assert scheme.wait_async() is None  # nothing is underway
        for value in range(2, 30):
            assert scheme.send_async(fill(model, value)) is None
        fill(model, -1)  # what was sent is what it was then
        report = scheme.wait_async()
        assert report is not None and report.version == 29
        assert [seen[0] for seen in workers.all("forward")] == [29, 29]
        scheme.send_async(fill(model, 30), worker_ids=0)
        scheme.send_async(fill(model, 31), worker_ids=1)
        scheme.wait_async()
        assert [seen[0] for seen in workers.all("forward")] == [30, 31]


def test_sync_false(make_scheme: Any) -> None:
    model = fill(Small(), 1)
    with crew(1) as workers, make_scheme(sync=False) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers.follow(scheme, Small)
        assert scheme.send(fill(model, 2)) is None
        scheme.wait_async()
        assert workers[0].call("forward")[0] == 2


def test_lazy(make_scheme: Any) -> None:
    with crew(2) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", num_workers=2)
        with pytest.raises(wsync.NotConnected):
            scheme.send(Small())
        assert workers.follow(scheme, Small) == [0, 0]
        with pytest.raises(wsync.NotConnected, match="nothing to send"):
            scheme.send()
        for worker in workers.workers:
            worker.start("receive", 20.0)
        scheme.send(fill(Small(), 5))
        assert all(workers.results())
        assert [seen[0] for seen in workers.all("forward")] == [5, 5]
        with pytest.raises(wsync.LayoutMismatch, match=r"weight.*7"):
            scheme.send(longer())
        scheme.send(fill(Small(), 6).state_dict())
        assert [seen[0] for seen in workers.all("forward")] == [6, 6]


@pytest.mark.above_the_ends
def test_lazy_and_nobody_listens(make_scheme: Any) -> None:
    """The first send is not finished before a worker can know of the memory that it has to be bound to."""
    with crew(1) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", num_workers=1)
        workers.follow(scheme, Small)
        workers[0].stop()
        scheme.timeout = 0.3
        with pytest.raises(wsync.SyncTimeout, match="worker 0"):
            scheme.send(fill(Small(), 5))
        workers[0].resume()
        scheme.timeout = 30.0
        scheme.send(fill(Small(), 6), worker_ids=0)
        assert workers[0].call("forward")[0] == 6


@pytest.mark.above_the_ends
def test_a_transport_alone_does_it_all(make_scheme: Any) -> None:
    with crew(2) as workers, make_scheme(timeout=float("inf")) as scheme:
        model = fill(Small(), 1)
        scheme.init_on_sender("policy", model=model, num_workers=2)
        for index, worker in enumerate(workers):
            worker.start("join", scheme, Small, index, "policy")
        everyone = scheme.create_transport()
        everyone.setup_connection_and_weights_on_sender()
        workers.results()
        everyone.send_weights(fill(model, 2))
        scheme.sender_transports[1].send_weights(fill(Small(), 3))
        assert [seen[0] for seen in workers.all("forward")] == [2, 3]
        fill(model, 4)
        everyone.send_weights(None)
        assert [seen[0] for seen in workers.all("forward")] == [4, 4]


def test_first_weights_of_connect(make_scheme: Any) -> None:
    with crew(1) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", num_workers=1)
        workers[0].start("join", scheme, Small, 0, "policy")
        scheme.connect(weights=fill(Small(), 7))
        assert workers[0].result() == 1
        assert workers[0].call("forward")[0] == 7


def test_each_worker_s_own_live_weights_go_to_whoever_is_named(make_scheme: Any) -> None:
    live = {0: fill(Small(), 1), 1: fill(Small(), 2)}
    with crew(2) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", params_map=live)
        workers.follow(scheme, Small)
        scheme.send()
        fill(live[0], 3), fill(live[1], 4)
        scheme.send(worker_ids=1)
        assert [seen[0] for seen in workers.all("forward")] == [1, 4]
        scheme.sender_transports[0].send_weights()
        assert [seen[0] for seen in workers.all("forward")] == [3, 4]
        with pytest.raises(ValueError, match=r"worker\(s\) \[1\] differ"):
            scheme.send(live, worker_ids=0)


def test_live_weights_are_read_anew(make_scheme: Any) -> None:
    live = TensorDict({"weight": torch.ones(4)})
    with crew(1) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", weights=live, num_workers=1)
        workers.follow(scheme, Small)
        live["weight"].fill_(3)
        assert workers[0].call("forward")[0] == 1
        scheme.send()
        assert workers[0].call("forward")[0] == 3


def test_registered_buffers() -> None:
    scheme = wsync.SharedMemWeightSyncScheme(auto_register=False, timeout=30.0)
    with crew(1) as workers, scheme:
        scheme.init_on_sender("policy", model=Small(), num_workers=1)
        workers.follow(scheme, Small)
        with pytest.raises(wsync.NotConnected, match="register_shared_weights"):
            scheme.send()
    buffers = TensorDict({"weight": torch.ones(4)})
    scheme = wsync.SharedMemWeightSyncScheme(auto_register=False, timeout=30.0)
    scheme.register_shared_weights("policy", buffers)
    with crew(1) as workers, scheme:
        scheme.init_on_sender("policy", num_workers=1)
        workers.follow(scheme, Small)
        assert workers[0].call("forward")[0] == 1
        buffers["weight"].fill_(2)
        scheme.send()
        assert workers[0].call("forward")[0] == 2
        scheme.send(fill(Small(), 3))
        assert workers[0].call("forward")[0] == 3 and buffers["weight"][0] == 3


def test_a_sender_that_was_given_no_weights_has_those_that_it_has_published() -> None:
    scheme = wsync.SharedMemWeightSyncScheme(strategy="state_dict", timeout=30.0)
    with crew(2) as workers, scheme:
        scheme.init_on_sender("policy", num_workers=2)
        workers.follow(scheme, Small)
        assert scheme.weights is None
        for value in (5.0, 6.0):
            scheme.send(fill(Small(), value))
            assert scheme.weights["weight"].tolist() == [value] * 4
        scheme.send({0: fill(Small(), 7), 1: fill(Small(), 8)})
        assert scheme.weights is None


def test_per_worker_slots() -> None:
    scheme = wsync.SharedMemWeightSyncScheme(per_worker_weights=True, timeout=30.0)
    with crew(2) as workers, scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=2)
        workers.follow(scheme, Small)
        for value in range(2, 8):
            scheme.send({0: fill(Small(), value), 1: fill(Small(), value * 10)})
            assert [seen[0] for seen in workers.all("forward")] == [value, value * 10]
        scheme.send(fill(Small(), 3))
        assert [seen[0] for seen in workers.all("forward")] == [3, 3]


def test_training_reaches_nobody_without_send(make_scheme: Any) -> None:
    model = fill(Small(), 1)
    with crew(2) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Small)
        before = workers.all("digest")
        assert not model.weight.is_shared()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(3):
            model().sum().backward()
            optimizer.step()
        assert workers.all("digest") == before
        scheme.send()
        assert workers.all("digest") == [digest(model)] * 2
        assert not model.weight.is_shared()


def test_versions_grow_and_send_means_every_forward(make_scheme: Any) -> None:
    model = fill(Small(), 1)
    with crew(2) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Small)
        before = scheme.metrics.updates
        for version in range(2, 60):
            report = scheme.send(fill(model, version))
            assert report.version == scheme.version == version
            assert [seen[0] for seen in workers.all("forward")] == [version] * 2
        assert workers.all("version") == [59, 59]
        assert scheme.metrics.updates == before + 58


def test_installed_is_seen_by_a_plain_read(make_scheme: Any) -> None:
    with crew(1) as workers, make_scheme() as scheme:
        if getattr(scheme, "acknowledge", "installed") == "published":
            pytest.skip("published promises forwards, not plain reads")
        model = fill(Small(), 1)
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers.follow(scheme, Small)
        for value in range(2, 20):
            scheme.send(fill(model, value))
            assert workers[0].call("raw_digest") == digest(model)


def replace_and_apply(host: Host, value: float) -> None:
    host.models["policy"].other = nn.Parameter(torch.zeros(4))
    host.schemes["policy"].apply_weights(fill(Apart(), value).state_dict())


def test_what_a_worker_applies_is_its_own(make_scheme: Any) -> None:
    model = fill(Apart(), 1)
    with crew(2) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Apart)
        workers[0].call("run", replace_and_apply, 9.0)
        assert [seen[0] for seen in workers.all("forward")] == [9, 1]
        scheme.send(fill(model, 2))
        assert [seen[0] for seen in workers.all("forward")] == [2, 2]


def fork_child(host: Any) -> None:
    """A child that will say what its model says."""
    host.line, line = multiprocessing.Pipe()
    host.child = os.fork()
    if host.child == 0:
        line.recv()
        line.send(host.forward())
        os._exit(0)


def ask_child(host: Any) -> list[float]:
    host.line.send("now")
    said = host.line.recv()
    os.waitpid(host.child, 0)
    return said


@pytest.mark.parametrize("acknowledge", ["installed", "published"])
def test_a_worker_s_forked_child_has_the_weights_of_then(acknowledge: Any) -> None:
    model = fill(Small(), 1)
    with crew(1) as workers, wsync.SharedMemWeightSyncScheme(acknowledge=acknowledge) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers.follow(scheme, Small)
        workers[0].call("run", fork_child)
        for value in range(2, 8):
            scheme.send(fill(model, value))
            assert workers[0].call("forward")[0] == value
        assert workers[0].call("run", ask_child) == [1.0] * 4


def follow(pipe: Any, scheme: wsync.WeightSyncScheme, worker: int, model: nn.Module) -> None:
    """A worker whose model was handed over by ``torch.multiprocessing``, which shares it."""
    with scheme:
        scheme.init_on_receiver("policy", model=model, worker_idx=worker)
        scheme.connect()
        while pipe.recv() == "look":
            with wsync.gate():
                pipe.send([tensor[0].item() for tensor in model.state_dict().values()])


@pytest.mark.parametrize("backend", ["shared_mem", "multiprocess"])
def test_a_model_that_torch_has_handed_over_is_the_workers_own(backend: str) -> None:
    model, context = Noted(1), torch.multiprocessing.get_context("forkserver")
    pipes = [context.Pipe() for _ in range(2)]
    with wsync.WeightSyncScheme.from_backend(backend, timeout=30.0) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers = [context.Process(target=follow, args=(pipes[i][1], scheme, i, model)) for i in range(2)]
        for worker in workers:
            worker.start()
        scheme.connect()

        def seen(word: str = "look") -> list[list[float]]:
            for pipe, _ in pipes:
                pipe.send(word)
            return [pipe.recv() for pipe, _ in pipes] if word == "look" else []

        model.fill(2)
        assert seen() == [[1, 1], [1, 1]], "what was not sent"
        scheme.send({0: Noted(3), 1: Noted(4)})
        assert seen() == [[3, 3], [4, 4]]
        assert model.weight[0] == model.note[0] == 2, "what others were sent"
        seen("bye")
        for worker in workers:
            worker.join()


def share_model(host: Host) -> None:
    """As ``torch.multiprocessing`` does with what is handed to a process: the storage moves."""
    host.models["policy"].share_memory()


def first_output(host: Host) -> float:
    return host.models["policy"]()[0].item()


@pytest.mark.parametrize("make", [Small, big])  # the memory of a large one is unmapped when it moves
def test_a_worker_that_shares_its_model_is_updated_as_before(make_scheme: Any, make: Any) -> None:
    model = fill(make(), 1)
    with crew(1) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers.follow(scheme, make)
        for value in range(2, 10):
            workers[0].call("run", share_model)
            scheme.send(fill(model, value))
            assert workers[0].call("run", first_output) == value


def slope(host: Host) -> float:
    """What a forward inside a transform of ``torch.func`` makes of the model."""
    return torch.func.grad(lambda x: (host.models["policy"]() * x).sum())(torch.ones(4))[0].item()


def test_a_forward_inside_a_transform_takes_an_update_as_any_other(make_scheme: Any) -> None:
    model = fill(Small(), 1)
    with crew(1) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers.follow(scheme, Small)
        for value in range(2, 8):
            scheme.send(fill(model, value))
            assert workers[0].call("run", slope) == value


def lend(host: Host, value: float) -> tuple[float, float]:
    """What the model says with other weights, and what these are afterwards."""
    lent = {"weight": torch.full((4,), value)}
    said = torch.func.functional_call(host.models["policy"], lent, ())[0].item()
    return said, lent["weight"][0].item()


def test_an_update_leaves_tensors_alone_that_a_model_was_lent(make_scheme: Any) -> None:
    model = fill(Small(), 1)
    with crew(1) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers.follow(scheme, Small)
        for value in range(2, 6):
            scheme.send(fill(model, value))
            assert workers[0].call("run", lend, 9.0) == (9, 9)
            assert workers[0].call("forward")[0] == value


def test_a_trainer_that_shares_what_is_published_is_heard_as_before() -> None:
    model = fill(Small(), 1)
    with crew(1) as workers, wsync.SharedMemWeightSyncScheme(timeout=30.0) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers.follow(scheme, Small)
        for value in range(2, 8):
            (published,) = scheme.shared_transport.unique_weights  # pyright: ignore[reportOptionalMemberAccess]
            assert published.share_memory_()["weight"][0] == value - 1
            scheme.send(fill(model, value))
            assert workers[0].call("forward")[0] == value


def test_pickle_holds_no_weights(make_scheme: Any) -> None:
    with make_scheme() as scheme:
        model = big()
        scheme.init_on_sender("policy", model=model, num_workers=1)
        travelled = pickle.dumps(scheme)
        assert len(travelled) < 4096
        assert pickle.loads(travelled).model is None
        assert copy.deepcopy(model).weight.shape == model.weight.shape


@pytest.mark.parametrize(("make", "problem"), [(longer, r"float32\[7\]"), (double, "float64"), (Other, "weight")])
def test_worker_with_another_model(make_scheme: Any, make: Any, problem: str) -> None:
    with crew(2) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=2)
        workers[0].start("join", scheme, Small, 0, "policy")
        workers[1].start("join", scheme, make, 1, "policy")
        with pytest.raises(wsync.WorkerFailed, match=rf"(?s)worker 1.*LayoutMismatch.*{problem}") as failed:
            establish(scheme)
        assert set(failed.value.workers) == {1}
        workers[0].result()
        assert workers[0].call("version") == 1
        with pytest.raises(RemoteError, match=problem) as remote:
            workers[1].result()
        assert "LayoutMismatch" in remote.value.kinds


def wide() -> Small:
    return Small(1 << 18)


def handed_on(host: Host, times: int) -> list[int]:
    """How many values there are in each of ``times`` copies of the weights, made as they are received."""
    port, copy = host.schemes["policy"].receiver_transport, wide()
    counts = []
    while len(counts) < times:
        assert port is not None and port.receive_weights(20.0, model=copy) is not None
        counts.append(copy.weight.unique().numel())
    return counts


def test_what_is_handed_on_is_of_one_version() -> None:
    with crew(1) as workers, wsync.SharedMemWeightSyncScheme(acknowledge="published") as scheme:
        scheme.init_on_sender("policy", model=wide(), num_workers=1)
        workers.follow(scheme, wide)
        workers[0].start("run", handed_on, 100)
        enough = threading.Event()

        def send() -> None:
            models = [fill(wide(), value) for value in range(4)]
            while not enough.is_set():
                for model in models:
                    scheme.send(model)

        trainer = threading.Thread(target=send)
        trainer.start()
        try:
            assert workers[0].result() == [1] * 100
        finally:
            enough.set()
            trainer.join()


def halve(host: Host) -> None:
    with wsync.gate():
        host.models["policy"].half()


def dtype_of(host: Host) -> str:
    return str(host.models["policy"].weight.dtype)


@pytest.mark.above_the_ends
def test_a_worker_whose_model_was_converted_says_so(make_scheme: Any) -> None:
    """It is not made what it was, behind its owner's back."""
    model = fill(Small(), 1)
    with crew(2) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Small)
        for value in (2, 3):  # the second may take a faster path
            scheme.send(fill(model, value))
        workers[1].call("run", halve)
        missing = r"(?s)version 4 is missing on 1 .* have it: \[0\].*worker 1.*'weight'.*float16"
        with pytest.raises(wsync.WorkerFailed, match=missing) as failed:
            scheme.send(fill(model, 4))
            workers.all("forward")  # where nobody answers a send, the next one says it
            scheme.send(fill(model, 5))
        assert set(failed.value.workers) == {1} and failed.value.version == 4
        assert workers[1].call("run", dtype_of) == "torch.float16"
        assert workers[1].call("forward") == [3.0] * 4


@pytest.mark.parametrize("kind", [wsync.SharedMemWeightSyncScheme, wsync.DistributedWeightSyncScheme])
def test_two_schemes_of_one_model_keep_it_gated_until_both_have_gone(kind: Any) -> None:
    model = Small()
    with ExitStack() as senders:
        receivers = []
        for name in ("one", "other"):
            sender = senders.enter_context(kind())
            sender.init_on_sender(name, model=fill(Small(), 1), num_workers=1)
            receiver = pickle.loads(pickle.dumps(sender))
            receiver.init_on_receiver(name, model=model, worker_idx=0)
            connecting = threading.Thread(target=sender.connect)
            connecting.start()
            receiver.connect()
            connecting.join()
            receivers.append(receiver)
        for receiver in receivers:
            assert type(model) is not Small
            receiver.shutdown()
        assert type(model) is Small
        assert model().tolist() == [1.0] * 4


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        (Other(), "missing 'weight'; unknown 'bias'"),
        (longer(), r"'weight' is float32\[7\], not float32\[4\]"),
        (double(), r"'weight' is float64\[4\], not float32\[4\]"),
        ({}, "missing 'weight'"),
    ],
)
def test_weights_that_do_not_fit(make_scheme: Any, weights: Any, problem: str) -> None:
    model = fill(Small(), 1)
    with crew(1) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers.follow(scheme, Small)
        with pytest.raises(wsync.LayoutMismatch, match=problem):
            scheme.send(weights)
        with pytest.raises(TypeError):
            scheme.send(3.0)
        assert workers[0].call("forward")[0] == 1
        scheme.send(fill(model, 2))
        assert workers[0].call("forward")[0] == 2


def test_first_weights_that_workers_refuse_decide_nothing(make_scheme: Any) -> None:
    """Where only the workers have the model, the sender learns from them what weights look like."""
    with crew(2) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", num_workers=2)
        workers.follow(scheme, Small)
        for weights, problem in ((Other(), "no 'bias'"), (longer(), "'weight'")):
            refused = rf"(?s)given to nobody, for 2 worker.*worker 0.*{problem}.*worker 1.*{problem}"
            with pytest.raises(wsync.WorkerFailed, match=refused) as failed:
                scheme.send(weights)
            assert failed.value.version is None and set(failed.value.refused) == {0, 1}
        for value in (2, 3):
            scheme.send(fill(Small(), value))
            assert [list(seen) for seen in workers.all("forward")] == [[value] * 4] * 2
        with pytest.raises(wsync.LayoutMismatch, match="unknown 'bias'"):
            scheme.send(Other())


@pytest.mark.above_the_ends
def test_a_late_answer_about_first_weights_is_not_taken_for_one_about_others(make_scheme: Any) -> None:
    with crew(2) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", num_workers=2)
        workers.follow(scheme, Small)
        workers[1].stop()
        scheme.timeout = 1.0
        with pytest.raises(wsync.SyncTimeout, match=r"given to nobody(?s:.*)worker 1: did not answer"):
            scheme.send(fill(Small(), 1))
        workers[1].resume()
        scheme.timeout = 60.0
        with pytest.raises(wsync.WorkerFailed, match=r"given to nobody, for 2 worker"):
            scheme.send(Other())
        scheme.send(fill(Small(), 2))
        assert [list(seen) for seen in workers.all("forward")] == [[2] * 4] * 2


def test_fork(make_scheme: Any) -> None:
    model = scramble(Hard(), 1)
    scheme = make_scheme()
    with scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        with crew(2, "fork") as workers:
            workers.follow(scheme, Hard)
            assert workers.all("digest") == [digest(model)] * 2
            scramble(model, 2)
            scheme.send()
            assert workers.all("digest") == [digest(model)] * 2
            assert workers.all("shutdown") == [[], []]


@pytest.mark.parametrize("kind", [wsync.SharedMemWeightSyncScheme, wsync.MultiProcessWeightSyncScheme])
def test_a_forked_child_leaves_the_other_workers_slots_alone(kind: Any) -> None:
    with crew(1) as workers, kind(timeout=30.0) as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
        workers.follow(scheme, Small)
        switch = scheme._role.end.arena.switches[0]
        _, slot, _ = switch.enter(0, -1, False)  # as the worker does whose forward runs
        child = os.fork()
        if child == 0:
            scheme.init_on_receiver("policy", model=Small(), worker_idx=0)
            os._exit(0)
        os.waitpid(child, 0)
        assert slot in scheme._role.end.arena.occupied(())[1]
        switch.leave()


def use_inherited(host: Host) -> list[float]:
    """The scheme as the fork left it, not pickled."""
    model = Small()
    _inherited.init_on_receiver("policy", model=model, worker_idx=0)
    _inherited.connect()
    host.models["policy"], host.schemes["policy"] = model, _inherited
    return model().tolist()


_inherited: Any = None


def test_fork_inherits_a_scheme(make_scheme: Any) -> None:
    global _inherited
    with make_scheme() as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 3), num_workers=1)
        _inherited = scheme
        try:
            with crew(1, "fork") as workers:
                workers[0].start("run", use_inherited)
                establish(scheme)
                assert workers[0].result()[0] == 3
                scheme.send(fill(Small(), 4))
                assert workers[0].call("forward")[0] == 4
        finally:
            _inherited = None
