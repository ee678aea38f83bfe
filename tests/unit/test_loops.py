"""The inner loops of an update, compiled and in Python: one suite for both."""

from __future__ import annotations

import gc
import os
import resource
import socket
import subprocess
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from implementations import KINDS, PYTHON, choose, implementation, new_arena, worker_arena
from striking import struck_at
from torch import Tensor, nn
from workers_here import TIMEOUT, connect, make_worker

import wsync
from wsync import NotConnected, SyncReport, SyncTimeout, loops
from wsync.control.messages import HEADER, Kind, Message, unpack
from wsync.fast_path import FastUpdate
from wsync.loops.words import CONNECTION, HELD_SLOT, NONE, PUBLISHED, USED_SLOT, WANTS_FREED, WANTS_WAKEUPS, Block
from wsync.shm.arena import SenderArena
from wsync.weights.binding import Binding
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.weights.snapshot import ModuleIndex, snapshot


@pytest.fixture(params=KINDS, autouse=True)
def classes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The classes of one implementation, which the rest of the library uses as well during the test."""
    chosen = implementation(request.param)
    choose(chosen, monkeypatch.setattr)
    return chosen


@pytest.fixture
def fast_path(classes: Any) -> None:
    """For tests of the fast path: only the compiled classes have one."""
    if classes is PYTHON:
        pytest.skip("in Python all updates take the general path")


has_fast_path = pytest.mark.usefixtures("fast_path")


# --- PackPlan: what fits is copied, and nothing else ---


def plan_for(*tensors: Tensor, shared: bool = False) -> tuple[loops.PackPlan, list[Tensor]]:
    layout = Layout.of(snapshot({str(i): tensor for i, tensor in enumerate(tensors)}))
    buffer = Buffer.over(layout, torch.zeros(layout.nbytes, dtype=torch.uint8), shared=shared)
    return buffer.plan, list(buffer.views)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 4), max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]),
)
def test_what_fits_is_copied(shape: list[int], dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    plan, (view,) = plan_for(tensor)
    assert plan.fill([tensor]) and torch.equal(view, tensor)
    ones = torch.ones_like(tensor)
    assert plan.fill([nn.Parameter(ones, requires_grad=False)]) and torch.equal(view, ones)


def odd_bytes(count: int, shift: int) -> Tensor:
    """Random bytes that begin ``shift`` bytes behind where memory is aligned."""
    return torch.randint(0, 256, (count + shift,), dtype=torch.uint8)[shift:]


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 200), max_size=8), st.integers(1 << 17, 1 << 18), st.integers(0, 65))
def test_what_other_processes_will_read_is_copied_whole(small: list[int], large: int, shift: int) -> None:
    """Past the caches, whole lines are written; what comes before and behind them counts as much."""
    tensors = [odd_bytes(count, shift) for count in (*small, large, *small)]
    plan, views = plan_for(*tensors, shared=True)
    assert plan.fill(tensors) and all(map(torch.equal, views, tensors))


@pytest.mark.parametrize("threads", [1, 2, 5, 64])
def test_what_is_much_is_copied_by_several_threads(threads: int) -> None:
    sizes = [1, 40 << 20, 63, 50 << 20, 65, 0, 40 << 20]  # 130 MiB: for 8 threads at the most
    tensors = [torch.empty(size, dtype=torch.uint8).random_() for size in sizes]
    plan, views = plan_for(*tensors, shared=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert plan.fill(tensors)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, views, tensors))


def test_large_copies_are_whole_in_whichever_way() -> None:
    """The first large copies go by ordinary and by streaming stores in turn."""
    tensors = [odd_bytes(count, 3) for count in (9 << 20, 77, 1)]
    plan, views = plan_for(*tensors, shared=True)
    for value in range(8):
        for tensor in tensors:
            tensor.fill_(value)
        tensors[0][-1] = value + 1
        assert plan.fill(tensors) and all(map(torch.equal, views, tensors))


@has_fast_path
@pytest.mark.parametrize("mib", [1, 3, 9])  # as many as one does at once; others may run; past the caches
def test_a_model_that_copies_has_all_of_it(mib: int) -> None:
    model = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in (7, mib * 2**18, 1))
    with fast_worker(False, model=model) as (arena, writer, slot, receiver, _):
        arena.buffer(1).flat.random_(0, 64)
        written = [parameter._version for parameter in model]
        writer.publish(0, 1, 1, False, 1.0)
        slot.poll_update()
        assert slot.version == 1 and not receiver.calls
        assert all(map(torch.equal, model, arena.views(1)))
        assert all(parameter._version > before for parameter, before in zip(model, written, strict=True))


class Masked(Tensor):
    """Its numbers are not those that lie at its address."""


ODD: dict[str, Callable[[], Tensor]] = {
    "another shape": lambda: torch.ones(3, 2),
    "another dtype": lambda: torch.ones(2, 3, dtype=torch.float64),
    "another order": lambda: torch.ones(3, 2).t(),
    "one row, expanded": lambda: torch.ones(3).expand(2, 3),
    "negated lazily": lambda: torch._neg_view(torch.ones(2, 3)),
    "a subclass": lambda: torch.ones(2, 3).as_subclass(Masked),
    "nowhere": lambda: torch.ones(2, 3, device="meta"),
    "sparse": lambda: torch.ones(2, 3).to_sparse(),
    "complex": lambda: torch.ones(2, 3, dtype=torch.complex64),
    "zeros that take no memory": lambda: torch._efficientzerotensor((2, 3)),
}


@pytest.mark.parametrize("odd", list(ODD))
def test_what_does_not_fit_is_left_to_the_slow_path(odd: str) -> None:
    fits = torch.ones(2, 3)
    plan, views = plan_for(fits, fits.clone())
    assert plan.fill([fits, ODD[odd]()]) is False
    assert all(not view.any() for view in views), "nothing is copied, not even what fits"
    assert plan.fill([fits]) is False
    assert plan.fill((fits, fits)) is False  # type: ignore[arg-type]


def test_what_was_tied_and_is_no_more_is_left_to_the_slow_path() -> None:
    tied = torch.ones(2, 3)
    plan, (one, other) = plan_for(tied, tied)
    assert one.data_ptr() == other.data_ptr()
    assert plan.fill([tied, tied]) and bool(one.all())
    assert plan.fill([tied, tied.clone()]) is False


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.data())
def test_ties_are_found_in_whatever_order_the_memory_lies(order: list[int], data: st.DataObject) -> None:
    sizes = [0, 7, 0, 16, 1, 64, 0, 3, 128, 5]
    pool = [torch.randint(1, 256, (size,), dtype=torch.uint8) for size in sizes]
    views = torch.zeros(sum(sizes), dtype=torch.uint8).split(sizes)
    plan = loops.PackPlan([views[i] for i in order], False)
    assert plan.fill([pool[i] for i in order])
    assert all(torch.equal(views[i], pool[i]) for i in order)
    assert all(not views[i].any() for i in {*range(len(pool))}.difference(order)), "nothing else is written"
    at = data.draw(st.integers(0, len(order) - 1))
    tied = order.count(order[at]) > 1 and sizes[order[at]] > 0
    parted = [pool[i].clone() if place == at else pool[i] for place, i in enumerate(order)]
    assert plan.fill(parted) is not tied


# --- TensorTree: the tensors of a module that is as it was ---


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
        self.register_buffer("count", torch.zeros(1))


def rename(net: Net) -> None:
    net.head = net.body[1]


CHANGES: dict[str, Callable[[Net], object]] = {
    "a new child": lambda net: net.add_module("more", nn.Linear(1, 1)),
    "another child": lambda net: net.body.__setitem__(1, nn.Linear(3, 1, bias=False)),
    "a child less": lambda net: net.body.pop(1),
    "a new buffer": lambda net: net.register_buffer("more", torch.zeros(1)),
    "a bias where there was none": lambda net: setattr(net.body[1], "bias", nn.Parameter(torch.zeros(1))),
    "a parameter less": lambda net: delattr(net.body[0], "bias"),
    "None for a parameter": lambda net: setattr(net.body[0], "bias", None),
    "a child under two names": rename,
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_a_tree_that_has_changed_is_found_so(change: str) -> None:
    net = Net()
    index = ModuleIndex(net)
    names = list(index.places)
    tree = index.tree(names)
    found = tree.tensors()
    assert found is not None and [id(tensor) for tensor in found] == [id(index.tensors()[name]) for name in names]
    net.count = torch.ones(1)  # another tensor in the same place is found anew
    found = tree.tensors()
    assert found is not None and found[names.index("count")] is net.count
    CHANGES[change](net)
    assert tree.tensors() is None


def test_a_tree_keeps_no_circle_alive() -> None:
    net = Net()
    net.body.keep = ModuleIndex(net).tree(["count"])  # type: ignore[assignment]
    gone = weakref.ref(net.body)
    del net
    gc.collect()
    assert gone() is None


# --- Installer ---


def installer_of(model: nn.Module, *, bind: bool = True) -> tuple[Binding, tuple[Tensor, ...]]:
    layout = Layout.of(snapshot(model))
    binding = Binding(model, layout, bind=bind)
    return binding, layout.views(torch.full((layout.nbytes,), 1, dtype=torch.uint8))


def replace(net: Net) -> None:
    net.body[0].weight = nn.Parameter(torch.zeros(3, 2))


CHANGED: dict[str, Callable[[Net], object]] = {
    "another parameter": replace,
    "another dtype": lambda net: net.double(),
    "a new child": lambda net: net.add_module("more", nn.Linear(1, 1)),
}


@has_fast_path
@pytest.mark.parametrize("change", list(CHANGED))
def test_a_model_that_has_changed_is_not_installed_into(change: str) -> None:
    net = Net()
    with fast_worker(True, model=net) as (arena, writer, slot, receiver, _):
        writer.publish(0, 1, 1, False, 1.0)
        slot.poll_update()
        assert slot.version == 1 and not receiver.calls
        assert net.body[0].weight.data_ptr() in {view.data_ptr() for view in arena.views(1)}
        CHANGED[change](net)
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        writer.publish(0, 2, 2, False, 1.0)
        slot.poll_update()
        assert slot.version == 1 and receiver.calls == 1
        assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_too_few_views_are_refused() -> None:
    binding, views = installer_of(Net())
    with pytest.raises(ValueError, match="fewer views"):
        binding.installer.apply(views[:-1])


@pytest.mark.parametrize("bind", [True, False])
def test_an_install_clears_the_casts_of_autocast(bind: bool) -> None:
    """Inside one autocast context PyTorch keeps casts of the old parameters."""
    model, x = nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    binding, views = installer_of(model, bind=bind)
    views[0].fill_(1.0)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)
        binding.installer.apply(views)
        assert model(x).tolist() == [[4.0] * 4]


@has_fast_path
@pytest.mark.parametrize("bind", [True, False])
def test_an_install_on_the_fast_path_clears_the_casts_of_autocast(bind: bool) -> None:
    model, x = nn.Linear(4, 4, bias=False), torch.ones(1, 4)
    with (
        fast_worker(bind, model=model) as (_, writer, slot, receiver, _),
        torch.autocast("cpu", torch.bfloat16),
    ):
        model(x)
        writer.publish(0, 1, 1, False, 1.0)
        slot.poll_update()
        assert model(x).tolist() == [[4.0] * 4] and not receiver.calls


def spread_model() -> nn.Module:
    """Its tensors are not plain bytes, or have gaps between them."""
    model = nn.Module()
    model.register_buffer("spread", torch.zeros(2, 8)[:, ::2])
    model.register_buffer("wave", torch.zeros(3, dtype=torch.complex64))
    return model


@has_fast_path
def test_tensors_that_are_not_plain_bytes_are_left_to_the_receiver() -> None:
    with fast_worker(False, model=spread_model()) as (_, writer, slot, receiver, _):
        writer.publish(0, 1, 1, False, 1.0)
        slot.poll_update()
        assert not slot.version and receiver.calls == 1


def test_tensors_that_are_not_plain_bytes_are_copied_by_torch() -> None:
    model = spread_model()
    binding, _ = installer_of(model)
    values = (torch.ones(2, 4), torch.full((3,), 2j, dtype=torch.complex64))
    by_name = dict(zip(("spread", "wave"), values, strict=True))
    views = tuple(by_name[name] for name in binding._layout.names)
    binding.installer.apply(views)
    assert all(torch.equal(getattr(model, name), value) for name, value in by_name.items())


# --- ArenaWriter: free slots, and published words ---

word = st.integers(-1, 4)


def arena_of(workers: int, slots: int, tensor: Tensor | None = None) -> tuple[SenderArena, loops.ArenaWriter]:
    arena = new_arena(Layout.of(snapshot({"w": torch.rand(3) if tensor is None else tensor})), workers)
    for _ in range(slots):
        arena.grow()
    return arena, arena.writer


def block_of(arena: SenderArena, worker: int) -> Block:
    return Block(arena.words, worker)


@contextmanager
def connected(workers: int) -> Iterator[tuple[bytes, list[socket.socket]]]:
    """The descriptors for an update, and the workers' ends of the connections."""
    pairs = [socket.socketpair() for _ in range(workers)]
    read, write = os.pipe()  # instead of processes
    try:
        yield array("i", [one.fileno() for one, _ in pairs] + [read] * workers).tobytes(), [end for _, end in pairs]
    finally:
        for end in (end for pair in pairs for end in pair):
            end.close()
        os.close(read)
        os.close(write)


def fast_update(arena: SenderArena, descriptors: bytes, *, acknowledge: bool = False) -> FastUpdate:
    update = arena.writer.fast_update(arena.plans, arena.layout.nbytes, descriptors, acknowledge)
    assert update is not None
    return update


@has_fast_path
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), word, word), min_size=2, max_size=2),
)
def test_an_update_takes_the_first_slot_that_is_not_occupied(workers: list[tuple[int, int, int, int]]) -> None:
    tensor = torch.rand(3)
    arena, writer = arena_of(2, 3, tensor)
    for worker, (version, slot, used, held) in enumerate(workers):
        writer.accept(worker, 1)
        values = {PUBLISHED: version << 16 | slot << 1, USED_SLOT: used, HELD_SLOT: held, WANTS_FREED: 0}
        block = block_of(arena, worker)
        for offset, value in values.items():
            block[offset] = value
    named, in_use, kept = writer.occupied()
    busy = named | in_use | kept
    expected = next((slot for slot in range(3) if slot not in busy), None)
    with connected(2) as (descriptors, _):
        done = fast_update(arena, descriptors)([tensor], 7, 1.0, 0.0)
    if expected is None:
        assert done is None
        assert [writer.published(worker)[0] for worker in (0, 1)] == [version for version, *_ in workers]
    else:
        assert isinstance(done, SyncReport) and dict(done.workers) == {0: 7, 1: 7}
        assert sum(done.phases.values()) == pytest.approx(done.seconds) and done.bytes == arena.layout.nbytes
        assert [writer.published(worker) for worker in (0, 1)] == [(7, expected)] * 2
        assert torch.equal(arena.views(expected)[0], tensor)
    arena.close()


def test_an_update_without_all_workers_is_not_delivered() -> None:
    arena, writer = arena_of(2, 1)
    with connected(1) as (descriptors, _):
        for acknowledge in (True, False):
            assert writer.fast_update(arena.plans, 12, descriptors, acknowledge) is None
    arena.close()


def message_from(end: int | socket.socket) -> Message:
    """The message without payload that has arrived."""
    data = os.read(end, HEADER.size) if isinstance(end, int) else end.recv(HEADER.size, socket.MSG_WAITALL)
    return unpack(data, b"")


@has_fast_path
def test_an_update_waits_for_the_acknowledgements_of_its_version() -> None:
    arena, _ = arena_of(2, 2)
    with connected(2) as (descriptors, ends):
        for worker, end in enumerate(ends):
            end.send(Message(Kind.ACK, worker, 5, wait=0.25, apply=0.5 + worker).pack())
        done = fast_update(arena, descriptors, acknowledge=True)([torch.rand(3)], 5, 5.0, 0.0)
        assert isinstance(done, SyncReport) and done.version == 5
        for worker, end in enumerate(ends):
            assert message_from(end) == Message(Kind.UPDATE, worker, 5)
    arena.close()


@has_fast_path
@pytest.mark.parametrize("other", [Message(Kind.ACK, 1, 4), Message(Kind.SLOT_FREED, 1, 5)])
def test_another_message_ends_the_wait_and_stays_to_be_read(other: Message) -> None:
    arena, _ = arena_of(2, 2)
    with connected(2) as (descriptors, ends):
        ends[0].send(Message(Kind.ACK, 0, 5).pack())
        ends[1].send(other.pack())
        done = fast_update(arena, descriptors, acknowledge=True)([torch.rand(3)], 5, 5.0, 0.0)
        assert isinstance(done, tuple) and done[1:] in ((0, [], b"\1\0"), (0, [], b"\0\0"))
        (first,) = array("i", descriptors)[1:2]
        assert message_from(first) == other
    arena.close()


@has_fast_path
def test_a_worker_stopped_in_its_mutex_is_left_to_the_caller() -> None:
    arena, writer = arena_of(2, 2)
    block_of(arena, 1).mutex.lock()
    others: list[Any] = []

    def update() -> None:
        with connected(2) as (descriptors, _):
            others.append(fast_update(arena, descriptors)([torch.rand(3)], 5, 5.0, 0.0))
        with pytest.raises(SyncTimeout, match="is it stopped"):
            writer.publish(1, 5, 0, False, 0.01)

    thread = threading.Thread(target=update)  # the mutex may not be locked twice by one thread
    thread.start()
    thread.join()
    block_of(arena, 1).mutex.unlock()
    assert others[0][1:] == (0, [1], b"\0\0") and [writer.published(worker)[0] for worker in (0, 1)] == [5, 0]
    arena.close()


def test_a_forked_child_is_refused() -> None:
    arena, writer = arena_of(1, 2)
    entries: list[Callable[[], object]] = [
        partial(writer.publish, 0, 1, 0, False, 1.0),
        partial(writer.await_free, 0, 1.0),
        partial(writer.vacate, 0, 1.0),
    ]
    update = writer.fast_update(arena.plans, 12, bytes(8), True)
    if update is not None:
        entries.append(partial(update, [torch.rand(3)], 1, 1.0, 0.0))
    child = os.fork()
    if child == 0:
        refused = 0
        for entry in entries:
            try:
                entry()
            except NotConnected:
                refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(entries)
    assert writer.published(0) == (0, 0)
    arena.close()


def test_a_worker_that_does_not_exist_is_refused() -> None:
    arena, writer = arena_of(2, 1)
    for call in (partial(writer.published, 2), partial(writer.publish, -1, 1, 0, False, 1.0)):
        with pytest.raises(IndexError):
            call()
    with pytest.raises(ValueError, match="fewer words"):
        loops.ArenaWriter(arena.words, 10**6)
    arena.close()


@has_fast_path
def test_a_slot_has_no_version_while_it_is_written() -> None:
    arena, writer = arena_of(1, 2)
    other = worker_arena(arena)
    with connected(1) as (descriptors, _):
        update = fast_update(arena, descriptors)
        assert isinstance(update([torch.rand(3)], 1, 1.0, 0.0), SyncReport)
        assert isinstance(update([torch.rand(3)], 2, 1.0, 0.0), SyncReport)
        assert [other.slot_version(slot) for slot in (0, 1)] == [1, 2]
        assert update([torch.rand(4)], 3, 1.0, 0.0) is None  # does not fit
        assert [other.slot_version(slot) for slot in (0, 1)] == [0, 2]
    writer.set_slot_version(0, 4)
    assert other.slot_version(0) == 4
    other.close()
    arena.close()


def epolls() -> int:
    """How many descriptors of this process are epoll's."""
    links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return sum(link.endswith("[eventpoll]") for link in links)


@has_fast_path
def test_without_acknowledgements_messages_and_ends_are_noticed_and_nothing_is_left_behind() -> None:
    """Two workers may be one process."""
    (one, other), child = socket.socketpair(), subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    process = os.pidfd_open(child.pid)
    arena, writer = arena_of(2, 3)
    gc.collect()
    before, versions = epolls(), count(1)
    descriptors = array("i", [one.fileno(), one.fileno(), process, process]).tobytes()
    update = fast_update(arena, descriptors)

    def settled(update: FastUpdate) -> bool:
        return isinstance(update([torch.rand(3)], next(versions), 1.0, 0.0), SyncReport)

    assert settled(update)
    other.send(b"!")
    assert not settled(update) and not settled(update), "until it is read"
    one.recv(1)
    assert settled(update)
    child.communicate()
    assert not settled(update)
    closed = array("i", [one.fileno(), one.fileno(), process, 1 << 20]).tobytes()
    assert writer.fast_update(arena.plans, 12, closed, False) is None
    assert epolls() == before + 1
    del update
    assert epolls() == before
    other.close()
    one.close()
    os.close(process)
    arena.close()


def test_without_a_descriptor_for_it_there_is_no_fast_path() -> None:
    arena, writer = arena_of(1, 1)
    with connected(1) as (descriptors, _):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            assert writer.fast_update(arena.plans, 12, descriptors, False) is None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    arena.close()


# --- WorkerSlot: the worker's words ---


class Receiver:
    """Counts the calls that the fast path leaves to it. It uses ``slot``, if there is one, and installs nothing."""

    version = 0
    waiting: ClassVar[set[object]] = set()
    announced_at = 0.0
    calls = 0

    def __init__(self, slot: loops.WorkerSlot | None = None) -> None:
        self.slot = slot

    def poll_update(self) -> bool:
        self.calls += 1
        if self.slot is not None:
            self.slot.take()
        return False

    def leaving_gate(self) -> None:
        self.calls += 1
        if self.slot is not None:
            self.slot.release()

    def copy_to_own_memory(self, stay_unbound: bool = False) -> None: ...

    def on_readable(self) -> bool:
        self.calls += 1
        return False


def test_a_slot_is_in_use_while_a_forward_runs() -> None:
    arena, writer = arena_of(2, 3)
    slot, receiver, block = loops.WorkerSlot(), Receiver(), block_of(arena, 1)
    slot.set_updater(receiver, loops.GateState(threading.RLock()))
    slot.poll_update()
    assert receiver.calls == 1, "without words there is no fast path"
    slot.map_words(arena.words, 1, 1)
    slot.version, slot.bound_slot = 3, 2
    assert slot.take() is None and slot.busy and block[USED_SLOT] == 2
    assert writer.await_free(1, 1.0)
    assert slot.release() and not slot.busy and block[USED_SLOT] == NONE and not slot.release()
    writer.publish(1, 4, 0, False, 1.0)
    assert slot.poll_update() is False and receiver.calls == 2, "an update without a fast path"
    slot.leaving_gate()
    assert receiver.calls == 3
    assert slot.on_readable() is False and receiver.calls == 4
    slot.close()
    assert slot.poll_update() is False and slot.on_readable() is False and receiver.calls == 4
    with pytest.raises(RuntimeError, match="map_words"):
        slot.take()
    arena.close()


@has_fast_path
def test_the_receiver_is_not_called_for_a_forward_without_an_update() -> None:
    arena, _ = arena_of(1, 3)
    slot, receiver, block = loops.WorkerSlot(), Receiver(), block_of(arena, 0)
    slot.set_updater(receiver, loops.GateState(threading.RLock()))
    slot.map_words(arena.words, 0, 1)
    slot.version, slot.bound_slot = 3, 2
    assert slot.poll_update() is False and slot.busy and block[USED_SLOT] == 2 and not receiver.calls
    arena.close()


def test_a_refused_version_leaves_the_slot_before_it_held() -> None:
    arena, writer = arena_of(1, 3)
    slot, block = loops.WorkerSlot(), block_of(arena, 0)
    slot.map_words(arena.words, 0, 1)
    slot.hold = True
    writer.publish(0, 1, 1, True, 1.0)
    assert slot.take() == (1, 1, True) and slot.busy and (block[USED_SLOT], block[HELD_SLOT]) == (1, NONE)
    slot.version, slot.bound_slot = 1, 1
    slot.release()
    writer.publish(0, 2, 2, False, 1.0)
    assert slot.take() == (2, 2, False) and (block[USED_SLOT], block[HELD_SLOT]) == (2, 1)
    slot.failed_version = 2
    slot.release()
    assert (block[USED_SLOT], block[HELD_SLOT]) == (NONE, 1)
    assert slot.take() is None and block[USED_SLOT] == 1
    slot.set_wakeups(False)
    assert writer.publish(0, 3, 0, False, 1.0) is False
    slot.set_wakeups(True)
    assert writer.publish(0, 4, 0, False, 1.0) is True
    arena.close()


def words_of(block: Block) -> list[int]:
    return [block[word] for word in (PUBLISHED, USED_SLOT, HELD_SLOT, CONNECTION, WANTS_WAKEUPS, WANTS_FREED)]


USES: dict[str, Callable[[loops.WorkerSlot], object]] = {
    "take": lambda slot: slot.take(),
    "release": lambda slot: slot.release(),
    "set_wakeups": lambda slot: slot.set_wakeups(False),
    "poll_update": lambda slot: slot.poll_update(),
    "leaving_gate": lambda slot: slot.leaving_gate(),
    "close": lambda slot: slot.close(),
}


@pytest.mark.parametrize("bound", [True, False])
@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("newer", [True, False])
@pytest.mark.parametrize("use", list(USES))
def test_a_worker_that_was_disconnected_leaves_the_words_of_its_replacement(
    use: str, newer: bool, hold: bool, bound: bool
) -> None:
    """It may be alive: what it stores would unprotect the slot that the replacement's forward uses."""
    with fast_worker(bound) as (arena, writer, old, receiver, _):
        writer.publish(0, 1, 1, False, 1.0)
        install(old, bound)
        old.hold = hold
        assert old.version == 1
        writer.vacate(0, 1.0)
        writer.accept(0, 2)
        new, block = loops.WorkerSlot(), block_of(arena, 0)
        new.map_words(arena.words, 0, 2)
        new.hold = True
        assert new.take() == (1, 1, False)
        new.version, new.bound_slot = 1, 1
        assert writer.await_free(0, 1.0)
        if newer:
            writer.publish(0, 2, 2, True, 1.0)
            assert new.take() == (2, 2, True)
        before, old.busy = words_of(block), True
        USES[use](old)
        assert words_of(block) == before and not new.disconnected
        assert old.disconnected is (use != "close")
        assert receiver.calls == (use in ("poll_update", "leaving_gate")), "it must learn of that"
        assert old.version == 1


def test_a_worker_that_was_disconnected_while_it_copied_is_told_from_one_that_had_copied() -> None:
    with fast_worker(False) as (_, writer, slot, *_):
        writer.publish(0, 1, 1, False, 1.0)
        assert slot.take() == (1, 1, False) and slot.used == 1
        slot.release()
        assert slot.used == NONE
        slot.take()
        writer.vacate(0, 1.0)
        slot.release()
        assert slot.used == 1 and slot.disconnected


def test_what_a_disconnected_worker_stores_when_it_is_continued_keeps_no_slot_from_being_written() -> None:
    with fast_worker(False) as (arena, writer, *_):
        writer.publish(0, 1, 1, False, 1.0)
        writer.vacate(0, 1.0)
        block = block_of(arena, 0)
        block[USED_SLOT] = block[HELD_SLOT] = 2
        assert writer.occupied() == ({1}, set(), set())


def install(slot: loops.WorkerSlot, bound: bool) -> None:
    """Take the published version, as the receiver does."""
    taken = slot.take()
    assert taken is not None
    slot.version = taken[0]
    if bound:
        slot.bound_slot = taken[1]
    else:
        slot.release()


@contextmanager
def fast_worker(
    bound: bool, family: socket.AddressFamily = socket.AF_UNIX, *, model: nn.Module | None = None
) -> Iterator[tuple[SenderArena, loops.ArenaWriter, loops.WorkerSlot, Receiver, socket.socket]]:
    """A worker with a fast path, and the sender's end of its connection; each slot has its number in every element."""
    model = nn.Linear(3, 1, bias=False) if model is None else model
    layout = Layout.of(snapshot(model))
    arena = new_arena(layout, 1)
    writer = arena.writer
    for number in range(3):
        arena.grow()
        for view in arena.views(number):
            view.fill_(number)
    slot = loops.WorkerSlot()
    receiver = Receiver(slot)
    slot.map_words(arena.words, 0, 1)
    gate_state = loops.GateState(threading.RLock())
    gate_state.hooks = (slot,)
    slot.set_updater(receiver, gate_state)
    one, other = tcp_pair() if family == socket.AF_INET else socket.socketpair(family, socket.SOCK_SEQPACKET)
    installer = Binding(model, layout, bind=bound).installer
    slot.install_fast_path(installer, arena.plans, {}, other.fileno(), bound, arena.num_workers)
    with one, other:
        yield arena, writer, slot, receiver, one
    arena.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


@has_fast_path
@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
@pytest.mark.parametrize("bound", [True, False])
def test_a_usual_update_is_installed_and_acknowledged(bound: bool, family: socket.AddressFamily) -> None:
    model = nn.Linear(3, 1, bias=False)
    with fast_worker(bound, family, model=model) as (arena, writer, slot, receiver, sender):
        writer.publish(0, 1, 1, True, 1.0)
        sender.sendall(Message(Kind.UPDATE, 0, 1).pack())
        assert slot.on_readable() and receiver.calls == 0 and receiver.version == 1 and not receiver.announced_at
        answer = message_from(sender)
        assert (answer.kind, answer.version) == (Kind.ACK, 1) and answer.wait >= 0.0 and answer.apply > 0.0
        assert model.weight.tolist() == [[1.0] * 3]
        assert (model.weight.data_ptr() == arena.views(1)[0].data_ptr()) == bound
        assert writer.occupied() == ({1}, set(), set()) and not slot.busy
        writer.publish(0, 2, 2, False, 1.0)
        assert slot.poll_update() is False and model.weight.tolist() == [[2.0] * 3] and receiver.version == 2
        assert slot.busy is bound and block_of(arena, 0)[HELD_SLOT] == NONE
        assert writer.await_free(0, 1.0) is bound
        slot.leaving_gate()
        if bound:
            assert message_from(sender) == Message(Kind.SLOT_FREED, 0)
        sender.setblocking(False)
        with pytest.raises(BlockingIOError):
            sender.recv(1)


@has_fast_path
def test_workers_with_waiting_threads_or_prepared_updates_take_the_general_path() -> None:
    model = nn.Linear(3, 1, bias=False)
    with fast_worker(True, model=model) as (_, writer, slot, receiver, _):
        receiver.waiting = {"a thread"}
        writer.publish(0, 1, 1, True, 1.0)
        slot.poll_update()
        assert receiver.calls == 1
        receiver.waiting, slot.hold = set(), True
        slot.poll_update()
        assert receiver.calls == 2 and not slot.version
        slot.hold = False
        slot.poll_update()
        assert receiver.calls == 2 and slot.version == 1 and model.weight.tolist() == [[1.0] * 3]


def test_updates_with_extra_state_and_torn_models_are_left_to_the_receiver() -> None:
    with fast_worker(True) as (arena, writer, slot, receiver, _):
        arena.write_extra(1, b"extra")
        writer.publish(0, 1, 1, True, 1.0)
        slot.poll_update()
        assert receiver.calls == 1 and not slot.version
        slot.torn = True
        slot.poll_update()  # although nothing is new
        assert receiver.calls == 2


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
@pytest.mark.parametrize("data", [Message(Kind.CHECK_LAYOUT, 0, 1).pack(), Message(Kind.UPDATE, 0, 1, b"12345").pack()])
def test_another_message_is_left_to_the_receiver(family: socket.AddressFamily, data: bytes) -> None:
    with fast_worker(True, family) as (_, _, slot, receiver, sender):
        sender.sendall(data)
        assert slot.on_readable() is False and receiver.calls == 1


@has_fast_path
def test_half_a_message_of_a_stream_is_left_where_it_is() -> None:
    with fast_worker(True, socket.AF_INET) as (_, writer, slot, receiver, sender):
        data = Message(Kind.UPDATE, 0, 1).pack()
        writer.publish(0, 1, 1, True, 1.0)
        sender.sendall(data[:7])
        assert slot.on_readable() is False and receiver.calls == 1 and not slot.version
        sender.sendall(data[7:])
        while slot.version < 1:
            slot.on_readable()
        assert message_from(sender)[:3] == (Kind.ACK, 0, 1)


@has_fast_path
def test_a_stream_with_space_for_a_part_of_a_message_is_shut_down() -> None:
    with fast_worker(True, socket.AF_INET) as (arena, _, slot, _, sender):
        update = fast_update(arena, array("i", [sender.fileno(), sender.fileno()]).tobytes(), acknowledge=True)
        sender.setblocking(False)
        sent = 0
        with suppress(BlockingIOError):
            while True:
                sent += sender.send(b"x" * 1000)
        update([torch.rand(1, 3)], 1, 0.0, 0.0)  # all of its message was dropped, or a part
        assert slot.on_readable() is False
        slot.close()


class Counting(nn.Linear):
    """Has extra state, so its worker holds its slot."""

    def get_extra_state(self) -> int:
        return 7

    def set_extra_state(self, state: int) -> None: ...


def test_bind_may_be_any_true_value() -> None:
    source = Counting(2, 1)
    with wsync.SharedMemWeightSyncScheme(bind=1, timeout=TIMEOUT) as sender:  # pyright: ignore[reportArgumentType]
        sender.init_on_sender("policy", model=source, num_workers=1)
        with make_worker(sender, 0, model=Counting(2, 1)) as worker:
            connect(sender.connect, worker)
            assert torch.equal(worker.model.weight, source.weight)


# --- signals ---


@pytest.mark.parametrize("step", ["publish", "await_free", "vacate", "take", "release", "set_wakeups", "poll_update"])
def test_a_signal_leaves_no_mutex_locked(step: str) -> None:
    arena, writer = arena_of(1, 2)
    slot = loops.WorkerSlot()
    slot.map_words(arena.words, 0, 1)
    slot.set_updater(Receiver(), loops.GateState(threading.RLock()))
    steps: dict[str, Callable[[], object]] = {
        "publish": partial(writer.publish, 0, 1, 0, False, 1.0),
        "await_free": partial(writer.await_free, 0, 1.0),
        "vacate": partial(writer.vacate, 0, 1.0),
        "take": slot.take,
        "release": slot.release,
        "set_wakeups": partial(slot.set_wakeups, True),
        "poll_update": slot.poll_update,
    }
    published = list[int]()

    def publish_elsewhere() -> None:
        writer.publish(0, 1, 0, False, 0.0)
        published.append(point)

    for point in count(1):
        slot.busy = True
        finished = struck_at(point, steps[step])
        other = threading.Thread(target=publish_elsewhere)
        other.start()
        other.join()
        assert published[-1:] == [point], f"struck at point {point}, it is still locked"
        if finished:
            break
    arena.close()
