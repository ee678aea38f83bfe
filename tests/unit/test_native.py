"""The fast path: it does what the slow path does, or nothing at all."""

from __future__ import annotations

import gc
import os
import resource
import shlex
import socket
import subprocess
import sys
import sysconfig
import threading
import weakref
from array import array
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from wsync import native
from wsync.local.arena import Arena
from wsync.local.switch import AWAITED, HELD, NONE, SWITCH, TAKEN, USED
from wsync.weights.binding import Binding
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.weights.snapshot import Listing, ModuleIndex, snapshot

needs_it = pytest.mark.skipif(not native.available, reason="the compiled fast path was not built here")


def test_it_was_built_where_that_is_possible() -> None:
    if os.environ.get("WSYNC_NATIVE") == "0":
        pytest.skip("the fast path is switched off")
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    program = "#include <Python.h>\n#include <poll.h>\n#include <pthread.h>\n"
    include = sysconfig.get_paths()["include"]
    try:
        compiles = subprocess.run(
            [*compiler, "-fsyntax-only", "-xc", "-I", include, "-"], input=program, text=True, check=False, timeout=60
        )
    except FileNotFoundError:
        pytest.skip("there is no C compiler here")
    if compiles.returncode:
        pytest.skip("Python's headers are not here")
    assert native.available, "pip install -e . builds wsync/csrc"


def test_it_can_be_switched_off() -> None:
    code = "import wsync.native as n; assert not n.available and n.seat() is None and n.room([], shared=True) is None"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "WSYNC_NATIVE": "0"}, check=True, timeout=60)


def test_a_stale_build_is_told_and_not_used() -> None:
    code = """
import sys, types, warnings
sys.modules["wsync._native"] = types.SimpleNamespace(REVISION=-1)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import wsync.native
assert not wsync.native.available and any("builds it anew" in str(one.message) for one in told), told
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- Room: what fits is copied, and nothing else ---


def room_for(*tensors: Tensor, shared: bool = False) -> tuple[native.Room, list[Tensor]]:
    layout = Layout.of(snapshot({str(i): tensor for i, tensor in enumerate(tensors)}))
    buffer = Buffer.over(layout, torch.zeros(layout.nbytes, dtype=torch.uint8), shared=shared)
    assert buffer.room is not None
    return buffer.room, list(buffer.views)


@needs_it
@settings(deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]),
)
def test_what_fits_is_copied(shape: list[int], dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    room, (view,) = room_for(tensor)
    assert room.fill([tensor]) and torch.equal(view, tensor)
    ones = torch.ones_like(tensor)
    assert room.fill([nn.Parameter(ones, requires_grad=False)]) and torch.equal(view, ones)


def odd_bytes(count: int, shift: int) -> Tensor:
    """Random bytes that begin ``shift`` bytes behind where memory is aligned."""
    return torch.randint(0, 256, (count + shift,), dtype=torch.uint8)[shift:]


@needs_it
@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 200), max_size=8), st.integers(1 << 17, 1 << 18), st.integers(0, 65))
def test_what_other_processes_will_read_is_copied_whole(small: list[int], large: int, shift: int) -> None:
    """Past the caches, whole lines are written; what comes before and behind them counts as much."""
    tensors = [odd_bytes(count, shift) for count in (*small, large, *small)]
    room, views = room_for(*tensors, shared=True)
    assert room.fill(tensors) and all(map(torch.equal, views, tensors))


@needs_it
@pytest.mark.parametrize("threads", [1, 2, 5, 64])
def test_what_is_much_is_copied_by_several_threads(threads: int) -> None:
    sizes = [1, 40 << 20, 63, 50 << 20, 65, 0, 40 << 20]  # 130 MiB: for 8 threads at the most
    tensors = [torch.empty(size, dtype=torch.uint8).random_() for size in sizes]
    room, views = room_for(*tensors, shared=True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert room.fill(tensors)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, views, tensors))


@needs_it
@pytest.mark.parametrize("mib", [1, 3, 9])  # as many as one does at once; others may run; past the caches
def test_a_model_that_copies_has_all_of_it(mib: int) -> None:
    model = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in (7, mib * 2**18, 1))
    layout = Layout.of(snapshot(model))
    binding = Binding(model, layout, bind=False)
    installer = binding.installer()
    views = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8).random_(0, 64))
    written = [parameter._version for parameter in model]
    assert installer is not None and installer.install(views)
    assert all(map(torch.equal, model, views))
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


@needs_it
@pytest.mark.parametrize("odd", list(ODD))
def test_what_does_not_fit_is_left_to_the_slow_path(odd: str) -> None:
    fits = torch.ones(2, 3)
    room, views = room_for(fits, fits.clone())
    assert room.fill([fits, ODD[odd]()]) is False
    assert all(not view.any() for view in views), "nothing is copied, not even what fits"
    assert room.fill([fits]) is False
    assert room.fill((fits, fits)) is False  # type: ignore[arg-type]


@needs_it
def test_what_was_tied_and_is_no_more_is_left_to_the_slow_path() -> None:
    tied = torch.ones(2, 3)
    room, (one, other) = room_for(tied, tied)
    assert one.data_ptr() == other.data_ptr()
    assert room.fill([tied, tied]) and bool(one.all())
    assert room.fill([tied, tied.clone()]) is False


@needs_it
@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.data())
def test_ties_are_found_in_whatever_order_the_memory_lies(order: list[int], data: st.DataObject) -> None:
    sizes = [0, 7, 0, 16, 1, 64, 0, 3, 128, 5]
    pool = [torch.randint(1, 256, (size,), dtype=torch.uint8) for size in sizes]
    views = torch.zeros(sum(sizes), dtype=torch.uint8).split(sizes)
    room = native.room([views[i] for i in order], shared=False)
    assert room is not None and room.fill([pool[i] for i in order])
    assert all(torch.equal(views[i], pool[i]) for i in order)
    assert all(not views[i].any() for i in {*range(len(pool))}.difference(order)), "nothing else is written"
    at = data.draw(st.integers(0, len(order) - 1))
    tied = order.count(order[at]) > 1 and sizes[order[at]] > 0
    parted = [pool[i].clone() if place == at else pool[i] for place, i in enumerate(order)]
    assert room.fill(parted) is not tied


# --- Tree: the tensors of a module that is as it was ---


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


@needs_it
@pytest.mark.parametrize("change", list(CHANGES))
def test_a_tree_that_has_changed_is_found_so(change: str) -> None:
    net = Net()
    index = ModuleIndex(net)
    names = list(index.places)
    tree = index.tree(names)
    assert tree is not None
    found = tree.tensors()
    assert found is not None and [id(tensor) for tensor in found] == [id(index.tensors()[name]) for name in names]
    net.count = torch.ones(1)  # another tensor in the same place is found anew
    found = tree.tensors()
    assert found is not None and found[names.index("count")] is net.count
    CHANGES[change](net)
    assert tree.tensors() is None


@needs_it
def test_a_tree_keeps_no_circle_alive() -> None:
    net = Net()
    net.body.keep = ModuleIndex(net).tree(["count"])  # type: ignore[assignment]
    gone = weakref.ref(net.body)
    del net
    gc.collect()
    assert gone() is None


def test_a_listing_finds_what_lists_the_same_keys() -> None:
    net = Net()
    names = ["count", "body.0.weight", "body.0.bias", "body.1.weight"]
    state = dict(net.state_dict())
    listing = Listing.of(state, names)
    assert listing is not None
    found = listing.tensors(dict(state))
    assert found is not None and [id(tensor) for tensor in found] == [id(state[name]) for name in names]
    assert listing.tensors({**state, "more": torch.ones(1)}) is None
    assert listing.tensors({name: state[name] for name in reversed(state)}) is None
    assert listing.tensors(net) is None and listing.tensors(None) is None
    assert Listing.of(state, names[1:]) is None and Listing.of({0: state}, names) is None


# --- Board: the same free slots as the slow path finds, and the same switches ---

word = st.integers(-1, 4)


@needs_it
@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), word, word, st.integers(0, 3)), min_size=2, max_size=2),
    st.booleans(),
)
def test_the_fast_path_takes_the_slot_that_the_slow_path_would(
    workers: list[tuple[int, int, int, int, int]], retains: bool
) -> None:
    tensor = torch.rand(3)
    layout = Layout.of(snapshot({"w": tensor}))
    arena = Arena(layout, 2)
    for _ in range(3):
        arena.grow()
    for block, (version, slot, used, held, taken) in zip((s.place[1] for s in arena.switches), workers, strict=True):
        values = {SWITCH: version << 16 | slot << 1, USED: used, HELD: held, TAKEN: taken, AWAITED: 0}
        for offset, value in values.items():
            arena._words[block + offset] = value
    named, in_use, kept = arena.occupied(range(2) if retains else ())
    expected = arena.free_slot(named | in_use | kept)

    pipes = [os.pipe() for _ in range(4)]
    descriptors = b"".join(read.to_bytes(4, sys.byteorder) for read, _ in pipes)
    update = arena.update(descriptors, retains, False)
    assert update is not None
    done = update([tensor], 7, 1.0, 0.0)
    for ends in pipes:
        for descriptor in ends:
            os.close(descriptor)
    if expected is None:
        assert done is None
        assert [switch.published()[0] for switch in arena.switches] == [version for version, *_ in workers]
    else:
        assert done is not None
        assert [switch.published() for switch in arena.switches] == [(7, expected)] * 2
        assert torch.equal(arena.views(expected)[0], tensor)
    arena.close()


@needs_it
def test_a_board_sees_who_is_missing() -> None:
    tensor = torch.rand(3)
    arena = Arena(Layout.of(snapshot({"w": tensor})), 2)
    arena.grow()
    update = arena.update(b"", True, True)
    assert update is not None and update([tensor], 1, None, 0.0) is None
    assert [switch.published() for switch in arena.switches] == [(0, 0)] * 2


def watches() -> int:
    """How many descriptors of this process are epoll's."""
    links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return sum(link.endswith("[eventpoll]") for link in links)


@needs_it
def test_a_watch_sees_whoever_speaks_or_ends_and_leaves_nothing_behind() -> None:
    (one, other), child = socket.socketpair(), subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    process = os.pidfd_open(child.pid)
    gc.collect()
    before = watches()
    watch = native.watch(array("i", [one.fileno(), process, process]).tobytes())  # two workers may be one process
    assert watch is not None and not watch.sees()
    other.send(b"!")
    assert watch.sees() and watch.sees(), "until it is read"
    one.recv(1)
    assert not watch.sees()
    child.communicate()
    assert watch.sees()
    with pytest.raises(OSError, match="descriptor"):
        native.watch(array("i", [one.fileno(), 1 << 20]).tobytes())
    assert watches() == before + 1
    del watch
    assert watches() == before
    other.close()
    one.close()
    os.close(process)


@needs_it
def test_without_a_descriptor_for_a_watch_there_is_no_fast_path() -> None:
    arena = Arena(Layout.of(snapshot({"w": torch.rand(3)})), 1)
    one, other = os.pipe()
    descriptors = array("i", [one, other]).tobytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        updates = [arena.update(descriptors, True, acknowledge) for acknowledge in (False, True)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert updates[0] is None and updates[1] is not None
    for descriptor in (one, other):
        os.close(descriptor)
    arena.close()


# --- Seat: what the worker's words say ---


@needs_it
def test_a_seat_uses_its_slot_while_a_forward_runs() -> None:
    arena = Arena(Layout.of(snapshot({"w": torch.rand(3)})), 2)
    seat, switch = native.seat(), arena.switches[1]
    assert seat is not None

    class Long:
        asked = 0

        def enter(self) -> bool:
            self.asked += 1
            return False

        def leave(self) -> None:
            self.asked += 1

        def on_readable(self) -> bool:
            self.asked += 1
            return False

    way = Long()
    seat.follow(way, native.turnstile(threading.RLock()))
    seat.enter()
    assert way.asked == 1, "without words it knows nothing"
    seat.take(*switch.place)
    seat.version, seat.slot = 3, 2
    words, at = switch.place
    assert seat.enter() is False and seat.busy and words[at + USED] == 2 and way.asked == 1
    switch.publish(4, 0, False, 1.0)
    assert seat.enter() is False and way.asked == 2, "news that it was not armed for"
    seat.leave()
    assert way.asked == 3
    assert seat.on_readable() is False and way.asked == 4, "a line that it does not know"
    seat.quit()
    assert seat.enter() is False and seat.on_readable() is False and way.asked == 4
    assert words[at + HELD] == NONE
    arena.close()
