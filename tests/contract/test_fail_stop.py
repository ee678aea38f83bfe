"""What happens at the edges, once for all: one test for each row of the table that heads ``docs/reliability.md``."""

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import ProcessError

import pytest
import torch
from backends import BuiltIn, DistributedGloo, SharedMemory, SharedMemoryPublished
from small_models import TwoWeights
from tensordict import TensorDict
from torch import nn
from workers_here import in_process

import wsync
from wsync.testing import WorkerPool, commands
from wsync.testing.commands import WorkerState
from wsync.testing.models import Small, fill


class Interrupted(Exception):
    """Raised by a signal handler."""


@contextmanager
def interrupted_after(seconds: float) -> Iterator[None]:
    """A signal whose handler raises ``Interrupted`` arrives so many seconds later; the block waits for it."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(Interrupted):
            yield
            threading.Event().wait(60.0)
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_an_interrupted_send_ends_and_its_update_goes_on(backend: BuiltIn) -> None:
    with backend.connected() as session:
        for value in (2, 4):
            session.workers[1].stop()
            with interrupted_after(0.2):
                session.update(value)
            session.workers[1].resume()
            session.update(value + 1)
            assert session.outputs() == [value + 1] * 2


def test_the_next_call_reports_what_became_of_an_interrupted_send(backend: BuiltIn) -> None:
    with backend.connected() as session:
        session.workers[1].stop()
        with interrupted_after(0.2):
            session.update(2)
        session.workers[1].kill()
        with pytest.raises(wsync.WorkerDied, match="worker 1"):
            for value in count(3):  # published: a send may end before the death is noticed
                session.send(value)
        session.send(-1)
        assert session.outputs() == [-1]


def receive_interrupted(state: WorkerState) -> list[str]:
    """What interrupted calls of ``receive`` raise."""
    raised = list[str]()

    def interrupt(*_: object) -> None:
        raise Interrupted

    signal.signal(signal.SIGUSR2, interrupt)
    for _ in range(20):
        timer = threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGUSR2))
        try:
            timer.start()
            state.schemes["policy"].receive(60.0)
        except Exception as error:  # noqa: BLE001  what it is, is the answer
            raised.append(type(error).__name__)
        timer.join()
    return raised


def test_an_interrupted_receive_ends_with_the_exception_of_the_handler(backend: BuiltIn) -> None:
    with backend.connected(1) as session:
        assert session.workers[0].call(receive_interrupted) == ["Interrupted"] * 20
        session.send(2)
        assert session.workers[0].call(commands.receive, 20.0) is not None and session.outputs() == [2]


def in_child(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    """What each call raises in a forked child; "returned" if it raises nothing, and no entry if it hangs."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            for name, call in calls.items():
                outcome = "returned"
                try:
                    call()
                except Exception as error:  # noqa: BLE001  any error is the outcome
                    outcome = str(error)
                os.write(writing, f"{json.dumps([name, outcome])}\n".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        found = dict(json.loads(line) for line in lines)
    os.waitpid(child, 0)
    return found


def refused(calls: dict[str, Callable[[], object]]) -> bool:
    outcomes = in_child(calls)
    assert {name: outcomes.get(name) for name in calls if "fork" not in outcomes.get(name, "hangs")} == {}
    return True


def calls_of_worker(state: WorkerState) -> bool:
    scheme = state.schemes["policy"]
    return refused(
        {"receive": lambda: scheme.receive(1.0), "pull": lambda: scheme.pull(1.0), "connect": scheme.connect}
    )


def test_every_end_of_the_parent_raises_in_a_child(backend: BuiltIn) -> None:
    other = fill(Small(), 77)
    with backend.connected() as session:
        scheme = session.scheme
        session.send(2)
        assert refused(
            {
                "send": lambda: scheme.send(other),
                "send_async": lambda: scheme.send_async(other),
                "wait_async": scheme.wait_async,
                "connect": scheme.connect,
                "readmit": lambda: scheme.readmit(0, timeout=0.5),
                "synchronize": lambda: wsync.synchronize({scheme: other}),
            }
        )
        assert session.workers.call(calls_of_worker) == [True, True]
        assert session.outputs() == [2, 2]
        session.send(3)
        assert session.outputs() == [3, 3]


def test_a_worker_that_was_disconnected_alive_harms_no_other_and_is_not_torn(backend: BuiltIn) -> None:
    with backend.connected(2, make=TwoWeights) as session:
        session.send(2)
        session.workers[1].stop()
        session.scheme.disconnect(1)
        for value in range(3, 9):  # more than there are slots
            session.send(value)
        session.workers[1].resume()
        (old,) = {*session.workers[1].call(commands.output)}
        assert old in (1.0, 2.0), "the slot that it may read is pinned"
        with pytest.raises(ProcessError, match="NotConnected"):
            for _ in range(2):  # the first call may return what had arrived
                session.workers[1].call(commands.receive, 20.0)
        session.workers[1].start(commands.connect)
        session.scheme.readmit(1)
        session.workers[1].result()
        session.send(9)
        assert session.outputs() == [9, 9]


def change_structure(state: WorkerState, size: int) -> None:
    state.models["policy"].other = nn.Parameter(torch.zeros(size))


def test_a_worker_whose_model_changed_its_structure_fails_at_each_forward_until_a_version_fits(
    backend: BuiltIn,
) -> None:
    with backend.connected(2, make=TwoWeights) as session:
        session.send(2)
        session.workers[1].call(change_structure, 5)
        with pytest.raises(wsync.WorkerFailed, match=r"(?s)worker 1.*'other'"):
            session.update(3)
        for value in (4, 5):
            with pytest.raises(ProcessError, match=r"LayoutMismatch.*'other'"):
                session.workers[1].call(commands.output)
            with suppress(wsync.WorkerFailed):
                session.update(value)
            assert session.workers[0].call(commands.output)[0] == value
        session.workers[1].call(change_structure, 4)
        session.update(6)
        assert session.outputs() == [6, 6]


def cut_group(state: WorkerState) -> None:
    """End the TCP connections of this worker, which are gloo's: its session has a Unix socket."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family == socket.AF_INET and connection.getpeername():  # not the one that listens
                connection.shutdown(socket.SHUT_RDWR)


def test_a_receive_that_failed_half_way_ends_the_session_and_the_worker_connects_again(pool: WorkerPool) -> None:
    DistributedGloo.pool = pool
    with DistributedGloo().connected(timeout=20.0) as session:
        session.update(2)
        session.workers[1].call(cut_group)
        with pytest.raises(wsync.WorkerDied, match="worker 1"):
            session.update(3)
        assert session.workers[0].call(commands.output)[0] == 3
        with pytest.raises(ProcessError, match="NotConnected"):
            for _ in range(2):  # the first call may return what had arrived
                session.workers[1].call(commands.receive, 20.0)
        assert session.workers[1].call(commands.output)[0] == 2
        session.workers[1].start(commands.connect)
        session.scheme.readmit(1)
        session.workers[1].result()
        assert session.outputs() == [3, 3]
        session.update(4)
        assert session.outputs() == [4, 4]


def test_registered_weights_are_the_source_of_every_send_and_lie_in_the_published_buffers(pool: WorkerPool) -> None:
    SharedMemory.pool = pool
    weights = TensorDict({"weight": torch.ones(4)})
    options = {"policy_weights": {"policy": weights}, "auto_register": False}
    with SharedMemory().connected(1, init={}, **options) as session:
        assert session.outputs() == [1]
        for value in (2.0, 3.0):
            weights["weight"].fill_(value)
            session.scheme.send()
            assert session.outputs() == [value]
        session.send(4)
        assert session.outputs() == [4] and weights["weight"].tolist() == [4.0] * 4


def test_a_gate_that_a_task_enters_a_second_time_is_refused() -> None:
    async def act(entered: asyncio.Event, leave: asyncio.Event) -> None:
        with wsync.gate():
            entered.set()
            await leave.wait()

    async def both() -> None:
        entered, leave = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(act(entered, leave))
        await entered.wait()
        with pytest.raises(RuntimeError, match="await"), wsync.gate():
            pass
        leave.set()
        await first

    model = nn.Linear(2, 2)
    with in_process(model) as scheme:
        asyncio.run(both())
        scheme.send(fill(nn.Linear(2, 2), 3.0))
        assert model.weight.unique().tolist() == [3.0]


def test_no_library_thread_waits_for_a_forward(pool: WorkerPool) -> None:
    """The control thread only tries the gate: a receive, and a shutdown, end in time while a forward runs."""
    SharedMemoryPublished.pool = pool
    with SharedMemoryPublished().connected(1) as session:
        session.workers[0].call(hold_gate_in_thread)
        session.send(2)
        assert session.workers[0].call(commands.receive, 0.1) is None
        session.workers[0].call(end_forward)
        assert session.workers[0].call(commands.receive, 20.0) is not None and session.outputs() == [2]


def hold_gate_in_thread(state: WorkerState) -> None:
    held, state.kept["leave"] = threading.Event(), threading.Event()

    def hold() -> None:
        with wsync.gate():
            held.set()
            state.kept["leave"].wait()

    state.kept["thread"] = threading.Thread(target=hold, daemon=True)
    state.kept["thread"].start()
    held.wait()


def end_forward(state: WorkerState) -> None:
    state.kept["leave"].set()
    state.kept["thread"].join()
