"""A forked child refuses every call of an end that its parent has initialised, and disturbs nothing of its parent's."""

from __future__ import annotations

import json
import mmap
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from backends import BuiltIn, SharedMemoryPublished
from file_backend import FileScheme, FileTransport
from forking import ForkingTransform, fork_idle_child
from implementations import PYTHON, choose, implementation
from rpc_workers import Rpc, RpcWorkerPool
from torch import nn
from torch.distributed import (
    FileStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

import wsync
from wsync.backends.cuda import CudaTransport
from wsync.testing import WorkerPool, commands
from wsync.testing.commands import WorkerState
from wsync.testing.hooks import BackendHooks
from wsync.testing.models import Small, fill

REASON = "forked child"
LIMIT = 20.0
"""Seconds for all calls of a child."""

Calls = Mapping[str, Callable[[], object]]


def outcomes_in_child(calls: Calls) -> dict[str, str]:
    """What each call raises in a forked child: the type and the message; ``"returned"`` if it raises nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(int(LIMIT))  # a call that hangs: its outcome, and those after it, are missing
        try:
            for name, call in calls.items():
                outcome = "returned"
                try:
                    call()
                except Exception as error:  # noqa: BLE001  any error is the outcome
                    outcome = f"{type(error).__name__}: {error}"
                os.write(writing, f"{json.dumps([name, outcome])}\n".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        found = dict(json.loads(line) for line in lines)
    os.waitpid(child, 0)
    return found


def require(condition: bool) -> None:
    assert condition


def calls_of_sender(scheme: wsync.WeightSyncScheme, model: nn.Module) -> Calls:
    other = fill(Small(), 77)
    return {
        "send": scheme.send,
        "send model": lambda: scheme.send(other),
        "send to one": lambda: scheme.send(other, worker_ids=0),
        "send_async": lambda: scheme.send_async(other),
        "wait_async": scheme.wait_async,
        "connect": scheme.connect,
        "synchronize_weights": scheme.synchronize_weights,
        "disconnect": lambda: scheme.disconnect(0),
        "readmit": lambda: scheme.readmit(0, timeout=0.5),
        "apply_weights": lambda: scheme.apply_weights(other.state_dict()),
        "prepare_weights": lambda: scheme.prepare_weights(None, "policy"),
        "synchronize": lambda: wsync.synchronize({scheme: other}),
        "sender_transports": lambda: scheme.sender_transports[0].send_weights(other),
        "shared_transport": lambda: scheme.shared_transport.send_weights(other),  # pyright: ignore
        "get_sender": lambda: scheme.get_sender().send(other),
        "init_on_sender": lambda: scheme.init_on_sender("policy", model=model),
    }


def require_refused(outcomes: Mapping[str, str], calls: Calls) -> None:
    assert outcomes.keys() == calls.keys(), "a call did not return"
    assert not {name: outcome for name, outcome in outcomes.items() if "forked" not in outcome}


@pytest.fixture(params=["compiled", "Python"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which inner loops the sender has."""
    if request.param == "Python":
        choose(PYTHON, monkeypatch.setattr)
    return request.param


def test_a_child_of_the_trainer_can_send_nothing(backend: BuiltIn, loops: str) -> None:
    with backend.connected() as session:
        for round_ in (0, 3):  # the fast path is enabled by the first send, at the latest
            for value in range(2, 2 + round_):
                session.send(value)
            before = session.outputs()
            calls = calls_of_sender(session.scheme, session.model)
            require_refused(outcomes_in_child(calls), calls)
            assert session.outputs() == before
            report = session.scheme.send(fill(session.model, 20.0 + round_))
            assert report is not None and session.outputs() == [20.0 + round_] * 2
        assert session.model.weight[0] == 23.0


def test_a_child_of_a_trainer_that_is_not_connected_can_do_nothing(backend: BuiltIn) -> None:
    with backend.workers(1) as workers, backend.make_scheme(timeout=30.0) as scheme:
        model = fill(Small(), 1)
        scheme.init_on_sender("policy", model=model, num_workers=1)
        calls = calls_of_sender(scheme, model)
        require_refused(outcomes_in_child(calls), calls)
        workers[0].start(commands.join, scheme, Small, 0, "policy")
        scheme.connect()
        workers[0].result()
        assert workers[0].call(commands.output)[0] == 1


def test_a_child_that_is_forked_during_a_send_can_send_nothing(backend: BuiltIn) -> None:
    with backend.connected(1) as session:
        done, sent = threading.Event(), []

        def train() -> None:
            while not done.is_set():
                sent.append(session.send(5))

        trainer = threading.Thread(target=train)
        trainer.start()
        try:
            calls: Calls = {"send": lambda: session.scheme.send(fill(Small(), 77)), "wait": session.scheme.wait_async}
            for _ in range(10):
                require_refused(outcomes_in_child(calls), calls)
        finally:
            done.set()
            trainer.join()
        assert sent and session.outputs() == [5.0]


def test_a_child_that_a_transform_forks_can_not_continue_the_send(backend: BuiltIn) -> None:
    transform = ForkingTransform()
    with backend.connected(1, send_transform=transform) as session:
        for value in (2, 3, 4):
            assert REASON in transform.outcome_in_child(lambda value=value: session.send(value))
            assert session.outputs() == [value]
            session.send(value + 10)
            assert session.outputs() == [value + 10]


def test_a_child_is_no_sender(backend: BuiltIn) -> None:
    with backend.connected(1) as session:
        assert session.scheme.is_sender
        assert outcomes_in_child({"no sender": lambda: require(not session.scheme.is_sender)}) == {
            "no sender": "returned"
        }
        assert session.workers[0].call(is_sender) is False


def is_sender(state: WorkerState) -> bool:
    return state.schemes["policy"].is_sender


def test_a_childs_shutdown_closes_its_own_copies(backend: BuiltIn) -> None:
    with backend.connected(1) as session:
        outcomes = outcomes_in_child({"shutdown": session.scheme.shutdown, "again": session.scheme.shutdown})
        assert outcomes == {"shutdown": "returned", "again": "returned"}
        session.send(2)
        assert session.outputs() == [2]


def test_a_child_that_is_forked_while_a_thread_waits_for_an_answer_can_shut_down(backend: BuiltIn) -> None:
    """The locks that the thread holds stay locked in the child, which has no such thread."""
    with backend.connected(1) as session:
        session.workers[0].stop()
        session.scheme.send_async(fill(Small(), 2))
        waiting = threading.Thread(target=session.scheme.wait_async)
        waiting.start()
        try:
            outcomes = outcomes_in_child({"shutdown": session.scheme.shutdown, "again": session.scheme.shutdown})
        finally:
            session.workers[0].resume()
            waiting.join()
        assert outcomes == {"shutdown": "returned", "again": "returned"}
        assert session.outputs() == [2]


class ClosesForBothProcesses(FileTransport):
    """As a socket does that is shut down: also in the parent of the process that calls ``close``."""

    def close(self) -> None:
        self.path.with_suffix(".closed").touch()


class ClosingScheme(FileScheme):
    def create_transport(self, worker_idx: int | None = None) -> FileTransport:
        return ClosesForBothProcesses(self.folder / f"{worker_idx}.pt")


def test_a_childs_shutdown_closes_no_transport(pool: WorkerPool, tmp_path: Path) -> None:
    class Backend(BackendHooks):
        def make_scheme(self, **options: Any) -> wsync.WeightSyncScheme:
            return ClosingScheme(str(tmp_path), **options)

    Backend.pool = pool
    with Backend().connected(1) as session:
        assert outcomes_in_child({"shutdown": session.scheme.shutdown}) == {"shutdown": "returned"}
        assert not list(tmp_path.glob("*.closed"))
        session.send(2)
        assert session.outputs() == [2]


def send_by_own_scheme() -> None:
    """Make both ends anew, and send."""
    model = Small()
    with wsync.SharedMemWeightSyncScheme(timeout=10.0) as scheme:
        scheme.init_in_process("policy", model, fill(Small(), 3))
        scheme.send(fill(Small(), 4))
        assert model.weight[0] == 4


def test_a_child_can_make_a_scheme_of_its_own(backend: BuiltIn) -> None:
    with backend.connected(1) as session:
        assert outcomes_in_child({"own": send_by_own_scheme}) == {"own": "returned"}
        session.send(2)
        assert session.outputs() == [2]


def test_a_child_announces_no_address_in_a_store() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with wsync.DistributedWeightSyncScheme(store=store, timeout=5.0) as scheme:
        scheme.init_on_sender("policy", model=Small(), num_workers=1)
        calls: Calls = {"connect": scheme.connect}
        require_refused(outcomes_in_child(calls), calls)
        assert not store.check(["wsync/policy/1"])


# --- children of a worker ---


def child_of_worker(state: WorkerState) -> tuple[dict[str, str], list[str]]:
    """The outcome of each call in a forked child of the worker, and the names of all calls."""
    scheme, weights = state.schemes["policy"], fill(Small(), 77).state_dict()
    transport = scheme.receiver_transport
    assert transport is not None
    calls: Calls = {
        "receive": lambda: scheme.receive(None),
        "receive in time": lambda: scheme.receive(0.1),
        "connect": scheme.connect,
        "synchronize_weights": scheme.synchronize_weights,
        "apply_weights": lambda: scheme.apply_weights(weights),
        "get_receiver": lambda: scheme.get_receiver().receive(None),
        "transport": lambda: transport.receive_weights(None),
        "transport's set-up": lambda: transport.setup_connection_and_weights_on_receiver(worker_idx=0),
        "init_on_receiver": lambda: scheme.init_on_receiver("policy", model=Small()),
    }
    return outcomes_in_child(calls), list(calls)


def child_shuts_down(state: WorkerState) -> dict[str, str]:
    return outcomes_in_child({"shutdown": state.schemes["policy"].shutdown})


def test_a_child_of_a_worker_can_receive_nothing(backend: BuiltIn) -> None:
    with backend.connected(1) as session:
        for value in (2, 3):
            outcomes, calls = session.workers[0].call(child_of_worker)
            require_refused(outcomes, dict.fromkeys(calls, time.time))
            session.send(value)
            assert session.outputs() == [value]
        assert session.workers[0].call(child_shuts_down) == {"shutdown": "returned"}
        session.send(4)
        assert session.outputs() == [4]


def init_only(state: WorkerState, scheme: wsync.WeightSyncScheme) -> tuple[dict[str, str], list[str]]:
    commands.init(state, scheme, Small, 0, "policy")
    return child_of_worker(state)


def begin_connect(state: WorkerState, scheme: wsync.WeightSyncScheme) -> tuple[dict[str, str], list[str]]:
    """The older API's beginning: the receiver thread connects."""
    state.models["policy"], state.schemes["policy"] = Small(), scheme
    scheme.init_on_worker("policy", model=state.models["policy"], worker_idx=0)
    return child_of_worker(state)


@pytest.mark.parametrize("begin", [init_only, begin_connect])
def test_a_child_of_a_worker_that_is_not_connected_can_do_nothing(backend: BuiltIn, begin: Any) -> None:
    with backend.workers(1) as workers, backend.make_scheme(timeout=30.0) as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
        outcomes, calls = workers[0].call(begin, scheme)
        require_refused(outcomes, dict.fromkeys(calls, time.time))
        if begin is init_only:
            workers[0].start(commands.connect)
        scheme.connect()
        if begin is init_only:
            workers[0].result()
        scheme.send(fill(Small(), 2))
        assert workers[0].call(commands.output)[0] == 2


class Large(nn.Linear):
    """A model of 64 MiB: more than malloc keeps for itself."""

    def __init__(self) -> None:
        super().__init__(4096, 4096, bias=False)


def child_without_memory(state: WorkerState) -> dict[str, str]:
    """The outcome of a forward in a child that is forked when the worker has no memory for a copy of the model."""
    model, before = state.models["policy"], resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * mmap.PAGESIZE + (4 << 20), before[1]))

    def forward() -> None:
        resource.setrlimit(resource.RLIMIT_AS, before)
        model(torch.zeros(4096))

    try:
        return outcomes_in_child({"forward": forward})
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_child_with_a_model_that_could_not_be_copied_refuses_forwards(pool: WorkerPool) -> None:
    SharedMemoryPublished.pool = pool
    backend = SharedMemoryPublished()
    with backend.workers(1) as workers, backend.make_scheme() as scheme:
        scheme.init_on_sender("policy", model=Large(), num_workers=1)
        workers[0].start(commands.join, scheme, Large, 0, "policy")
        scheme.connect()
        workers[0].result()
        scheme.send()
        assert "could not be copied" in workers[0].call(child_without_memory)["forward"]


# --- both ends in one process ---


def test_a_child_of_a_process_with_both_ends_updates_nothing() -> None:
    model = Small()
    with wsync.MultiProcessWeightSyncScheme(timeout=5.0) as scheme:
        scheme.init_in_process("policy", model, fill(Small(), 1))
        scheme.send(fill(Small(), 2))
        calls = calls_of_sender(scheme, model)
        require_refused(outcomes_in_child(calls), calls)
        unchanged = {"model": lambda: require(model.weight[0].item() == 2)}
        assert outcomes_in_child(unchanged) == {"model": "returned"}
        scheme.send(fill(Small(), 3))
        assert torch.equal(model.weight, torch.full((4,), 3.0))


def test_the_fast_path_is_enabled_when_the_child_is_forked(pool: WorkerPool) -> None:
    """What the tests above mean by their second round, with the compiled loops."""
    implementation("compiled")  # skips the test where there are none
    SharedMemoryPublished.pool = pool
    with SharedMemoryPublished().connected() as session:
        session.send(2)
        assert session.scheme.sender._fast is not None


# --- by RPC ---


def test_a_child_of_a_process_in_an_rpc_group_can_do_nothing() -> None:
    Rpc.pool = RpcWorkerPool()
    try:
        with Rpc().connected(1) as session:
            for value in (2, 3):
                calls = calls_of_sender(session.scheme, session.model)
                require_refused(outcomes_in_child(calls), calls)
                outcomes, names = session.workers[0].call(child_of_worker)
                require_refused(outcomes, dict.fromkeys(names, time.time))
                session.send(value)
                assert session.outputs() == [value]
            assert outcomes_in_child({"shutdown": session.scheme.shutdown}) == {"shutdown": "returned"}
            assert session.workers[0].call(child_shuts_down) == {"shutdown": "returned"}
            session.send(4)
            assert session.outputs() == [4]
    finally:
        Rpc.pool.close()


def test_a_forked_child_has_no_copy_of_the_socket_of_cuda(tmp_path: Path) -> None:
    """So the end of the sender's process is the end of its socket. Nothing of this needs a GPU."""
    receiver = CudaTransport(torch.device("cpu"))
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            sender = CudaTransport(torch.device("cpu"))
            sender.connect(FileStore(str(tmp_path / "store"), 2), 0, 1, "", time.monotonic() + LIMIT)
            os.write(writing, str(fork_idle_child()).encode())
            signal.pause()
        finally:
            os._exit(1)
    receiver.connect(FileStore(str(tmp_path / "store"), 2), 1, 1, "", time.monotonic() + LIMIT)
    child = int(os.read(reading, 100))
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    try:
        with pytest.raises(RuntimeError, match="the sender has closed its socket"):
            receiver.copy_next(torch.zeros(1), timedelta(seconds=2))
    finally:
        os.kill(child, signal.SIGKILL)
        receiver.close()
        os.close(reading)
        os.close(writing)
