"""What only shared memory has: registered weights, slots per worker, and memory that processes share."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from backends import MIB, Multiprocess, SharedMemory, SharedMemoryPublished, no_file_beyond
from small_models import TwoWeights
from striking import struck_at
from tensordict import TensorDict
from torch import nn

import wsync
from wsync.sending.channel import SenderSideChannel
from wsync.testing import WorkerError, WorkerPool, commands
from wsync.testing.commands import WorkerState
from wsync.testing.models import Large, Small, fill
from wsync.testing.updates import TwoProducts, TwoReads
from wsync.weights.packing import Buffer


@pytest.fixture
def shared(pool: WorkerPool) -> SharedMemory:
    SharedMemory.pool = pool
    return SharedMemory()


@pytest.fixture
def published(pool: WorkerPool) -> SharedMemoryPublished:
    SharedMemoryPublished.pool = pool
    return SharedMemoryPublished()


class TiedWeights(TwoWeights):
    """The same names, for one tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.other = self.weight


# --- buffers and slots ---


def test_without_auto_register_buffers_have_to_be_registered(shared: SharedMemory) -> None:
    with (
        shared.connected(1, auto_register=False, init={}) as session,
        pytest.raises(wsync.NotConnected, match="register_shared_weights"),
    ):
        session.send(2)


@pytest.mark.parametrize("given", ["model", "weights", "params_map"])
def test_without_auto_register_a_model_that_is_not_registered_is_an_error_at_connect(
    shared: SharedMemory, given: str
) -> None:
    model = fill(Small(), 2)
    sources = {"model": model, "weights": model.state_dict(), "params_map": {0: model.state_dict()}}
    with shared.workers(1) as workers, shared.make_scheme(auto_register=False, timeout=20.0) as scheme:
        assert isinstance(scheme, wsync.SharedMemWeightSyncScheme)
        scheme.init_on_sender("policy", num_workers=1, **{given: sources[given]})
        workers[0].start(commands.join, scheme, Small, 0, "policy")
        with pytest.raises(wsync.NotConnected, match=r"register_shared_weights\('policy', weights\)"):
            scheme.connect()
        scheme.shutdown()
        with pytest.raises(WorkerError, match="NotConnected"):
            workers[0].result()
        scheme.register_shared_weights("policy", TensorDict(model.state_dict()))
        scheme.init_on_sender("policy", num_workers=1, **{given: sources[given]})
        workers[0].start(commands.join, scheme, Small, 0, "policy")
        scheme.connect()
        workers[0].result()
        assert workers[0].call(commands.output)[0] == 2


def test_an_init_that_fails_can_be_repeated(shared: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no descriptor is left")

    with shared.make_scheme() as scheme:
        assert isinstance(scheme, wsync.SharedMemWeightSyncScheme)
        scheme.register_shared_weights("policy", TensorDict({"weight": torch.ones(4)}))
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no descriptor"):
            patch.setattr(SenderSideChannel, "share_registered", fail)
            scheme.init_on_sender("policy", num_workers=1)
        scheme.init_on_sender("policy", num_workers=1)
        transport = scheme.shared_transport
        assert transport is not None
        with pytest.raises(RuntimeError, match="register_shared_weights"):
            transport.register_weights(Small())


def test_registered_buffers_are_read_and_written(shared: SharedMemory) -> None:
    buffers = TensorDict({"weight": torch.ones(4)})
    with shared.workers(1) as workers, shared.make_scheme(auto_register=False, timeout=30.0) as scheme:
        assert isinstance(scheme, wsync.SharedMemWeightSyncScheme)
        scheme.register_shared_weights("policy", buffers)
        scheme.init_on_sender("policy", num_workers=1)
        workers[0].start(commands.join, scheme, Small, 0, "policy")
        scheme.connect()
        workers[0].result()
        assert workers[0].call(commands.output)[0] == 1
        buffers["weight"].fill_(2)
        scheme.send()
        assert workers[0].call(commands.output)[0] == 2
        scheme.send(fill(Small(), 3))
        assert workers[0].call(commands.output)[0] == 3 and buffers["weight"][0] == 3


def test_buffers_of_an_init_that_failed_can_be_given_again() -> None:
    buffers = TensorDict({"weight": torch.ones(4)})
    with wsync.SharedMemWeightSyncScheme() as scheme:
        with pytest.raises(ValueError, match="at least 1"):
            scheme.init_on_sender("policy", cached_weights=buffers, num_workers=0)
        scheme.init_on_sender("policy", cached_weights=buffers, num_workers=1)
        with pytest.raises(RuntimeError, match="already initialised"):
            scheme.init_on_sender("policy", cached_weights=buffers, num_workers=1)


def test_the_weights_of_a_sender_without_a_model_are_those_it_has_published(shared: SharedMemory) -> None:
    with shared.connected(strategy="state_dict", init={}) as session:
        assert session.scheme.weights is None
        for value in (5.0, 6.0):
            session.send(value)
            assert session.scheme.weights["weight"].tolist() == [value] * 4
        session.scheme.send({0: fill(Small(), 7), 1: fill(Small(), 8)})
        assert session.scheme.weights is None


def test_slots_per_worker(shared: SharedMemory) -> None:
    with shared.connected(per_worker_weights=True) as session:
        for value in range(2, 8):
            session.scheme.send({0: fill(Small(), value), 1: fill(Small(), value * 10)})
            assert session.outputs() == [value, value * 10]
        session.send(3)
        assert session.outputs() == [3, 3]


def test_a_smaller_model_after_one_for_which_there_was_memory_in_part(shared: SharedMemory) -> None:
    def slot_bytes() -> int:
        files = (link for link in Path("/proc/self/fd").iterdir() if "memfd:wsync-" in str(link.resolve()))
        return sum(512 * file.stat().st_blocks for file in files)

    with shared.pool.group(1) as workers, shared.make_scheme() as scheme:
        scheme.init_on_sender("policy", num_workers=1)
        before = slot_bytes()
        with no_file_beyond(48 * MIB), pytest.raises(wsync.WeightSyncError, match="no shared memory left"):
            scheme.connect(weights=fill(Large(), 1))  # one slot of 32 MiB fits, and two are needed
        workers[0].start(commands.join, scheme, Small, 0, "policy")
        scheme.connect(weights=fill(Small(), 2))
        workers.results()
        assert workers.call(commands.output) == [[2.0] * 4]
        assert slot_bytes() - before < MIB
        workers.call(commands.shutdown)


def test_published_buffers_can_be_shared_by_the_trainer(shared: SharedMemory) -> None:
    with shared.connected(1) as session:
        for value in range(2, 8):
            transport = session.scheme.shared_transport
            assert isinstance(transport, wsync.SharedMemTransport)
            (buffers,) = transport.unique_weights
            assert buffers.share_memory_()["weight"][0] == value - 1
            made = session.scheme.create_transport()  # the same buffers: there is one transport
            assert isinstance(made, wsync.SharedMemTransport) and made.unique_weights[0]["weight"][0] == value - 1
            session.send(value)
            assert session.outputs() == [value]


@pytest.mark.parametrize("checksum", [True, False])
def test_a_byte_changed_in_shared_memory_is_noticed_with_a_checksum(shared: SharedMemory, checksum: bool) -> None:
    with shared.connected(1, checksum=checksum) as session:
        session.workers[0].stop()
        session.post(2)
        transport = session.scheme.shared_transport
        assert isinstance(transport, wsync.SharedMemTransport)
        transport.unique_weights[0]["weight"][1] = 77.0
        session.workers[0].resume()
        if checksum:
            with pytest.raises(wsync.WorkerFailed, match="corrupt"):
                session.scheme.wait_async()
        else:
            session.scheme.wait_async()
        assert session.workers[0].call(commands.output)[:2] == ([1.0, 1.0] if checksum else [2.0, 77.0])


# --- forwards and slots ---


def fork_while_acting(state: WorkerState) -> tuple[int, int]:
    """Run forwards while another thread forks; returns their number, and how many saw two versions."""
    over, matrix = threading.Event(), torch.ones(256, 256)

    def fork() -> None:
        for _ in range(60):
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
        over.set()

    forks = threading.Thread(target=fork)
    forks.start()
    forwards = torn = 0
    while not over.is_set():
        with wsync.gate():
            first = state.models["policy"].weight[0].item()
            for _ in range(4):
                torch.mm(matrix, matrix)
            torn += state.models["policy"].weight[-1].item() != first
        forwards += 1
    forks.join()
    return forwards, torn


def test_a_child_does_not_free_the_slot_that_its_parent_uses(published: SharedMemoryPublished) -> None:
    with published.connected(1) as session:
        session.workers[0].start(fork_while_acting)
        over = threading.Event()

        def send() -> None:
            for value in count(2):
                session.send(value)
                if over.is_set():
                    return

        trainer = threading.Thread(target=send)
        trainer.start()
        forwards, torn = session.workers[0].result()
        over.set()
        trainer.join()
        assert forwards > 0 and torn == 0


def convert_other(state: WorkerState) -> None:
    state.models["policy"].other.data = state.models["policy"].other.data.half()


def add_module(state: WorkerState) -> None:
    state.models["policy"].added = nn.Linear(2, 2)


def begin_forward(state: WorkerState) -> None:
    state.kept["gate"] = wsync.gate()
    state.kept["gate"].__enter__()


def end_forward(state: WorkerState) -> None:
    state.kept["gate"].__exit__(None, None, None)


def plain_weight(state: WorkerState) -> float:
    return state.models["policy"].weight[0].item()


@pytest.mark.parametrize("change", [convert_other, add_module])
def test_a_forward_that_refuses_an_update_keeps_its_weights(
    published: SharedMemoryPublished, change: Callable[[WorkerState], None]
) -> None:
    with published.connected(1, TwoWeights) as session:
        session.send(2)
        assert session.outputs() == [2]
        session.workers[0].call(change)
        session.send(3)
        session.workers[0].call(begin_forward)
        assert session.workers[0].call(plain_weight) == 2
        with pytest.raises(wsync.WorkerFailed):
            session.send(4)
        for value in range(5, 9):
            session.send(value)
        assert session.workers[0].call(plain_weight) == 2
        session.workers[0].call(end_forward)


def begin_forward_in_thread(state: WorkerState) -> None:
    """A thread reads the weights inside the gate, now and when it is told to end."""
    state.kept["end"], begun = threading.Event(), threading.Event()
    seen = state.kept["seen"] = []

    def forward() -> None:
        with wsync.gate():
            seen.append(state.models["policy"].weight.tolist())
            begun.set()
            state.kept["end"].wait()
            seen.append(state.models["policy"].weight.tolist())

    state.kept["thread"] = threading.Thread(target=forward, daemon=True)
    state.kept["thread"].start()
    begun.wait()


def end_forward_in_thread(state: WorkerState) -> list[list[float]]:
    state.kept["end"].set()
    state.kept["thread"].join()
    return state.kept["seen"]


def test_receive_ends_in_time_while_a_forward_runs(published: SharedMemoryPublished) -> None:
    with published.connected(1) as session:
        session.workers[0].call(begin_forward_in_thread)
        session.send(2)
        assert session.workers[0].call(commands.receive, 0.1) is None
        assert session.workers[0].call(end_forward_in_thread) == [[1.0] * 4] * 2
        assert session.workers[0].call(commands.receive, 20.0) is not None
        assert session.outputs() == [2]


def test_a_forward_after_a_refused_update_sees_one_version(published: SharedMemoryPublished) -> None:
    source = fill(TwoWeights(), 1)
    with published.workers(1) as workers, published.make_scheme(timeout=30.0) as scheme:
        scheme.init_on_sender("policy", model=source, num_workers=1)
        workers[0].start(commands.join, scheme, TiedWeights, 0, "policy")
        scheme.connect()
        workers[0].result()
        source.other.data.fill_(2)
        scheme.send()
        workers[0].call(begin_forward_in_thread)  # refuses it: the model ties the two parameters
        with suppress(wsync.WorkerFailed):
            scheme.send(fill(source, 3))
        for value in range(4, 8):
            scheme.send(fill(source, value))
        assert workers[0].call(end_forward_in_thread) == [[1.0] * 4] * 2
        assert workers[0].call(commands.output)[0] == 7


@pytest.mark.parametrize("action", ["shutdown", "receive", "connect"])
def test_a_call_that_would_wait_for_its_own_forward_is_an_error(shared: SharedMemory, action: str) -> None:
    with shared.connected(1) as session:
        assert f"{action}() outside any forward" in session.workers[0].call(call_inside_the_gate, action)
        session.send(2)
        assert session.outputs() == [2]


def call_inside_the_gate(state: WorkerState, action: str) -> str:
    scheme = state.schemes["policy"]
    with wsync.gate(), pytest.raises(RuntimeError) as raised:
        getattr(scheme, action)()
    return str(raised.value)


# --- several threads of a worker ---


def wait_in_two_threads(state: WorkerState) -> None:
    """One thread waits for long; another gives up."""
    scheme, received = state.schemes["policy"], list[object]()
    state.kept["received"] = received
    state.kept["waiting"] = threading.Thread(target=lambda: received.append(scheme.receive(50.0)))
    state.kept["waiting"].start()
    assert scheme.receive(0.5) is None


def has_received(state: WorkerState) -> bool:
    state.kept["waiting"].join(20.0)
    return len(state.kept["received"]) == 1 and state.kept["received"][0] is not None


def test_a_receive_that_times_out_leaves_another_waiting(published: SharedMemoryPublished) -> None:
    with published.connected(1) as session:
        session.workers[0].call(wait_in_two_threads)
        session.send(2)
        assert session.workers[0].call(has_received)


def interrupt_receive(state: WorkerState) -> int:
    """Raise at each point of ``receive`` in turn, and receive in another thread; returns the number of points."""
    receive = state.schemes["policy"].receive

    def receive_here() -> None:
        with suppress(RuntimeError):  # raised by threading.Condition if it is interrupted in releasing its lock
            receive(0.0)

    for point in count(1):
        finished = struck_at(point, receive_here)
        other = threading.Thread(target=receive, args=(0.0,), daemon=True)
        other.start()
        other.join(20.0)
        assert not other.is_alive(), f"interrupted at point {point}"
        if finished:
            return point
    raise AssertionError


def test_an_interrupted_receive_leaves_no_lock_held(shared: SharedMemory) -> None:
    with shared.connected(1) as session:
        assert session.workers[0].call(interrupt_receive) > 10
        session.send(2)
        assert session.outputs() == [2]


# --- registered weights that lie in shared memory already ---


class Scaled(Small):
    """One parameter, and a buffer of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))


def shared_weights(kind: str, folder: Path) -> tuple[Small, TensorDict]:
    """A model, and its weights in shared memory: the model's parameters are these tensors."""
    model = fill(Scaled(), 1)
    weights = TensorDict.from_module(model).data
    if kind == "memmap":
        weights = weights.memmap_(str(folder))
        model.weight.data = weights["weight"]
        return model, weights
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(kind)
    try:
        return model, weights.share_memory_()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


@pytest.mark.parametrize("kind", ["file_descriptor", "file_system", "memmap"])
@pytest.mark.parametrize("given", ["nothing", "model"])
@pytest.mark.parametrize("acknowledge", ["installed", "published"])
def test_registered_weights_that_are_trained_in_place_are_seen_by_bound_workers(
    shared: SharedMemory, kind: str, given: str, acknowledge: str, tmp_path: Path
) -> None:
    model, weights = shared_weights(kind, tmp_path)
    optimizer = torch.optim.SGD([model.weight], lr=1.0)
    with (
        shared.workers(2) as workers,
        shared.make_scheme(auto_register=False, acknowledge=acknowledge, timeout=30.0) as scheme,
    ):
        assert isinstance(scheme, wsync.SharedMemWeightSyncScheme)
        scheme.register_shared_weights("policy", weights)
        scheme.init_on_sender("policy", num_workers=2, **({"model": model} if given == "model" else {}))
        for index, worker in enumerate(workers):
            worker.start(commands.join, scheme, Scaled, index, "policy")
        scheme.connect()
        workers.results()

        def train() -> None:
            model().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        def outputs() -> list[list[float]]:
            return workers.call(commands.output)

        train()
        assert outputs() == [[0.0] * 4] * 2
        train()
        assert outputs() == [[-1.0] * 4] * 2 and workers.call(commands.version) == [1, 1]
        scheme.send()
        assert outputs() == [[-1.0] * 4] * 2 and workers.call(commands.version) == [2, 2]
        train()
        assert outputs() == [[-2.0] * 4] * 2
        scheme.send(fill(Scaled(), 5))  # other weights are written into the buffers as well
        assert outputs() == [[5.0] * 4] * 2 and model.weight.tolist() == [5.0] * 4
        train()
        assert outputs() == [[4.0] * 4] * 2
        scheme.send(fill(Scaled(), 7), worker_ids=1)  # only one has them: the buffers are left alone
        assert outputs() == [[4.0] * 4, [7.0] * 4] and model.weight.tolist() == [4.0] * 4
        train()
        assert outputs() == [[3.0] * 4, [7.0] * 4]
        scheme.send()
        train()
        assert outputs() == [[2.0] * 4] * 2
        assert workers.call(apply_own_weights, 9.0) == [9.0, 9.0]
        train()
        assert workers.call(commands.output) == [[9.0] * 4] * 2 and model.weight.tolist() == [1.0] * 4
        scheme.send()
        train()
        assert outputs() == [[0.0] * 4] * 2


def enter_autocast(state: WorkerState) -> None:
    state.kept["autocast"] = torch.autocast("cpu", torch.bfloat16)
    state.kept["autocast"].__enter__()


def leave_autocast(state: WorkerState) -> None:
    state.kept["autocast"].__exit__(None, None, None)


def test_registered_weights_that_are_trained_in_place_are_seen_in_one_autocast_context(shared: SharedMemory) -> None:
    model = fill(TwoProducts(), 1)
    weights = TensorDict.from_module(model).data.share_memory_()
    with shared.connected(1, TwoProducts, init={}, policy_weights={"policy": weights}, auto_register=False) as session:
        (worker,) = session.workers
        worker.call(enter_autocast)
        try:
            for value in (1.0, 2.0, 3.0):
                fill(model, value)
                assert worker.call(commands.output) == [value, value]
        finally:
            worker.call(leave_autocast)


def apply_own_weights(state: WorkerState, value: float) -> float:
    state.schemes["policy"].apply_weights(fill(Scaled(), value).state_dict())
    return commands.output(state)[0]


class Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 3))

    def forward(self) -> torch.Tensor:
        return self.weight.flatten()


@pytest.mark.parametrize("where", ["send_transform", "device_map_fn"])
def test_weights_that_are_changed_on_the_way_leave_the_buffers_as_they_are(shared: SharedMemory, where: str) -> None:
    """A square is transposed: the result has the buffer's address and shape."""
    values = torch.arange(9.0).reshape(3, 3)
    weights = TensorDict({"weight": values.clone()}).share_memory_()
    transposed = {"weight": weights["weight"].t()}
    options = {"send_transform": lambda _: transposed} if where == "send_transform" else {}
    init = {"device_map_fn": lambda *_: transposed} if where == "device_map_fn" else {}
    with shared.connected(1, Square, init=init, policy_weights={"policy": weights}, **options) as session:
        for _ in range(2):
            assert session.workers[0].call(commands.output) == values.t().flatten().tolist()
            assert weights["weight"].equal(values)
            values += 1
            weights["weight"].add_(1)
            session.scheme.send()


def test_no_forward_is_torn_by_sends_while_buffers_are_registered(published: SharedMemoryPublished) -> None:
    weights = TensorDict.from_module(fill(TwoReads(), 1)).data.share_memory_()
    with published.connected(1, TwoReads, init={}, policy_weights={"policy": weights}) as session:
        session.workers[0].start(count_torn, 100)
        done = threading.Event()

        def send() -> None:
            for value in count(2):
                session.send(value)
                if done.is_set():
                    return

        trainer = threading.Thread(target=send)
        trainer.start()
        torn = session.workers[0].result()
        done.set()
        trainer.join()
        assert torn == 0


def count_torn(state: WorkerState, versions: int) -> int:
    """Forward until so many versions have acted; return how many forwards were torn."""
    torn, seen = 0, set[float]()
    while len(seen) < versions:
        low, high = state.models["policy"]().tolist()
        torn += low != high
        seen.add(low)
    return torn


def test_an_older_workers_pipe_leads_to_the_registered_buffers_too() -> None:
    ours, theirs = multiprocessing.Pipe()
    source, model = fill(nn.Linear(4, 2), 1), nn.Linear(4, 2)
    weights = TensorDict.from_module(source).data.share_memory_()
    with wsync.SharedMemWeightSyncScheme(auto_register=False) as sender, wsync.SharedMemWeightSyncScheme() as worker:
        sender.register_shared_weights("policy", weights)
        sender.init_on_sender("policy", pipes=[ours])
        worker.init_on_worker("policy", pipe=theirs, model=model)
        sender.get_sender().send(weights)
        assert worker.get_receiver().receive(20.0)
        fill(source, 6)
        assert model(torch.ones(4)).tolist() == [30.0, 30.0]
    gc.collect()  # closes what earlier tests have left
    descriptors = len(os.listdir("/proc/self/fd"))
    with wsync.SharedMemWeightSyncScheme() as sender:
        sender.register_shared_weights("policy", weights)
        sender.init_on_sender("policy", num_workers=1)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    dropped = wsync.SharedMemWeightSyncScheme({"policy": weights})  # and never shut down
    dropped.init_on_sender("policy", num_workers=1)
    assert len(os.listdir("/proc/self/fd")) > descriptors
    del dropped
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors


# --- slots that the sender may write while a model is bound to them ---


class PausedRead(Small):
    """Reads its parameter, waits until something is written to a pipe, and reads the parameter again."""

    def __init__(self, pipe: Path) -> None:
        super().__init__()
        self.pipe = pipe

    def forward(self) -> torch.Tensor:
        first = self.weight.detach().clone()
        if self.pipe.exists():
            self.pipe.with_suffix(".entered").open("w").close()  # until it is opened for reading, too
            self.pipe.open().close()  # until it is opened for writing
        return torch.cat([first, self.weight.detach()])


def pipe_in(folder: Path, name: str) -> Path:
    pipe = folder / name
    os.mkfifo(pipe)
    os.mkfifo(pipe.with_suffix(".entered"))
    return pipe


def await_pause(pipe: Path) -> None:
    pipe.with_suffix(".entered").open().close()


def end_pause(pipe: Path) -> None:
    pipe.open("w").close()
    pipe.unlink()


def test_a_worker_that_was_disconnected_alive_does_not_harm_its_replacement(
    published: SharedMemoryPublished, tmp_path: Path
) -> None:
    pipes = [pipe_in(tmp_path, name) for name in ("old", "new")]
    model = fill(Small(), 1)
    with published.workers(2) as (old, new), published.make_scheme(timeout=30.0) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        old.start(commands.join, scheme, partial(PausedRead, pipes[0]), 0, "policy")
        scheme.connect()
        old.result()
        old.start(commands.output)
        await_pause(pipes[0])
        scheme.disconnect(0)
        new.start(commands.join, scheme, partial(PausedRead, pipes[1]), 0, "policy")
        scheme.readmit(0)
        new.result()
        new.start(commands.output)
        await_pause(pipes[1])
        end_pause(pipes[0])
        assert set(old.result()) == {1.0}
        for value in range(2, 8):
            scheme.send(fill(model, value))
        end_pause(pipes[1])
        assert set(new.result()) == {1.0}, "what the old process stores is not about the replacement's slot"
        assert set(new.call(commands.output)) == {7.0}
        assert set(old.call(commands.output)) == {1.0}, "it has memory of its own"


def test_a_forward_that_a_disconnected_worker_has_not_ended_in_time_raises(
    published: SharedMemoryPublished, tmp_path: Path
) -> None:
    pipe, model = pipe_in(tmp_path, "old"), fill(Small(), 1)
    with published.workers(2) as (old, other), published.make_scheme(timeout=30.0) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        old.start(commands.join, scheme, partial(PausedRead, pipe), 0, "policy")
        other.start(commands.join, scheme, Small, 1, "policy")
        scheme.connect()
        old.result(), other.result()
        old.start(commands.output)
        await_pause(pipe)
        scheme.disconnect(0)
        for value in range(2, 8):
            scheme.send(fill(model, value))
        end_pause(pipe)
        for _ in range(2):
            with pytest.raises(WorkerError, match=r"NotConnected.*two versions"):
                old.result()
            old.start(commands.output)
        with pytest.raises(WorkerError, match="NotConnected"):
            old.result()
        old.call(commands.shutdown)
        assert set(other.call(commands.output)) == {7.0}


def test_a_disconnected_worker_that_fetches_is_told_that_its_slot_was_written(shared: SharedMemory) -> None:
    model = fill(Small(), 1)
    with shared.workers(2) as (lost, other), shared.make_scheme(initiator="receiver", timeout=30.0) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        for index, worker in enumerate((lost, other)):
            worker.start(commands.join, scheme, Small, index, "policy")
        scheme.connect()
        lost.result(), other.result()

        def reconnect() -> None:
            with pytest.raises(WorkerError, match="NotConnected"):  # it has noticed
                lost.call(commands.receive)
            lost.start(commands.connect)
            scheme.readmit(0)
            assert lost.result() == scheme.version

        scheme.disconnect(0)
        assert set(lost.call(commands.output)) == {1.0}, "it has memory of its own"
        reconnect()
        scheme.disconnect(0)
        for value in range(2, 8):
            scheme.send(fill(model, value))
            other.call(pull)
        for _ in range(2):
            with pytest.raises(WorkerError, match=r"NotConnected.*two versions"):
                lost.call(commands.output)
        reconnect()
        assert set(lost.call(commands.output)) == {7.0}


def pull(state: WorkerState) -> int:
    return state.schemes["policy"].pull()


def test_a_replacement_does_not_get_weights_that_were_packed_in_part(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Multiprocess.pool = pool
    with Multiprocess().connected(1, make=TwoWeights) as session:
        session.send(2)
        session.send(3)

        def interrupted(buffer: Buffer, tensors: object) -> None:
            buffer.views[0].fill_(4)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Buffer, "pack", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.send(4, worker_ids=0)  # not on the fast path
        session.workers[0].kill()
        session.restart(0)
        assert session.workers[0].call(_weights) == [{3.0}, {3.0}]


def _weights(state: WorkerState) -> list[set[float]]:
    return [set(parameter.tolist()) for parameter in state.models["policy"].parameters()]


def _change_model(state: WorkerState) -> None:
    state.models["policy"].other = nn.Parameter(torch.zeros(5))


class CountsForwards(TwoWeights):
    """Its forwards have an effect beside their output."""

    forwards = 0

    def forward(self) -> torch.Tensor:
        self.forwards += 1
        return super().forward()


def _forwards(state: WorkerState) -> int:
    return state.models["policy"].forwards


@pytest.mark.parametrize("newest", [2, 6])
def test_a_model_that_refuses_an_update_has_one_version_or_raises(
    published: SharedMemoryPublished, newest: int
) -> None:
    """Nothing protects the slot of a model between forwards, unless it is known that it may refuse an update."""
    with published.connected(1, make=CountsForwards) as session:
        (worker,) = session.workers
        assert set(worker.call(commands.output)) == {1.0}
        worker.call(_change_model)
        worker.stop()  # else it may refuse version 2 before the next is sent
        for value in range(2, newest + 1):
            session.post(value)
        worker.resume()
        if newest == 2:
            assert set(worker.call(commands.output)) == {1.0}
        else:
            for _ in range(2):
                with pytest.raises(WorkerError, match=r"WeightSyncError.*two versions"):
                    worker.call(commands.output)
            assert worker.call(_forwards) == 1, "it raises before the forward"
        for value in range(newest + 1, newest + 5):
            with suppress(wsync.WorkerFailed):
                session.post(value)
        if newest == 2:
            assert set(worker.call(commands.output)) == {1.0}, "it has memory of its own"
