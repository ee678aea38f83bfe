"""Whatever comes from outside is understood or refused: no hang, no crash, nothing executed, nothing leaked.

A short run by default; ``--hypothesis-profile=long --timeout=0`` takes some minutes.
"""

from __future__ import annotations

import gc
import json
import math
import os
import socket
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learning import checkpoint
from wsync.deadlines import deadline_in, wait_readable
from wsync.local.arena import Arena
from wsync.local.receiver import LocalReceiver
from wsync.local.rendezvous import Listener, LocalLine, knock
from wsync.network.ends import Seed
from wsync.network.group import GroupPair
from wsync.network.meeting import Meeting
from wsync.network.receiver import GroupReceiver
from wsync.network.same_host import Whereabouts
from wsync.network.tcp import NetLine, NetListener, dial
from wsync.types import Ack
from wsync.weights.layout import Layout, same_bits
from wsync.weights.packing import Buffer, Packer
from wsync.weights.snapshot import Snapshot
from wsync.wire.lines import Lines
from wsync.wire.plan import Plan
from wsync.wire.words import HEADER_SIZE, PROTOCOL, Door, Kind, Line, Message, unpack

quick = settings(deadline=None)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int16, torch.uint8, torch.bool]

messages = st.builds(
    Message,
    st.sampled_from(Kind),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(0, 2**64 - 1),
    st.binary(max_size=80),
    st.floats(),
    st.floats(),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@st.composite
def tensors(draw: Any) -> Tensor:
    """Any shape, dtype and strides: dense or not, expanded, empty."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    nbytes = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=nbytes, max_size=nbytes))
    if dtype is torch.bool:
        content = bytes(byte & 1 for byte in content)
    flat = torch.frombuffer(bytearray(content), dtype=dtype) if nbytes else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape).permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[..., ::2]
    return tensor.unsqueeze(0).expand(3, *tensor.shape) if draw(st.booleans()) else tensor


@st.composite
def snapshots(draw: Any) -> Snapshot:
    """A model's weights, some of them tied."""
    given = draw(st.dictionaries(st.text(max_size=6), tensors(), min_size=1, max_size=5))
    ties = draw(st.dictionaries(st.text(min_size=7, max_size=9), st.sampled_from(sorted(given)), max_size=3))
    extra = draw(st.none() | st.dictionaries(st.text(max_size=3), st.none(), max_size=2))
    return Snapshot({**given, **{name: given[other] for name, other in ties.items()}}, extra)


def mutated(draw: Any, data: bytes) -> bytes:
    """Truncated, or with some bytes changed, or with more behind."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(0, 4))):
        if changed:
            changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
    return bytes(changed[: draw(st.integers(0, len(changed)))]) + draw(st.sampled_from([b"", b"\0", b"]" * 9]))


@st.composite
def packets(draw: Any) -> bytes:
    """Noise, messages, and messages that were mutilated."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=120))
    return mutated(draw, draw(messages).pack())


def replaced(draw: Any, value: Any) -> Any:
    """Plain data with one of its parts replaced by something else."""
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        index = draw(st.integers(0, len(value) - 1))
        return [*value[:index], replaced(draw, value[index]), *value[index + 1 :]]
    return draw(json_values | st.integers(0, 9).map(lambda power: 64 << 7 * power))


# --- words, plans, seeds ---


@quick
@given(packets())
def test_words(data: bytes) -> None:
    with suppress(ValueError):
        message = unpack(data)
        assert unpack(message.pack()).payload == message.payload


@quick
@given(snapshots(), st.booleans(), st.data())
def test_a_layout_survives_the_journey_and_its_views_are_the_weights(
    weights: Snapshot, checksum: bool, data: Any
) -> None:
    layout = Layout.of(weights)
    plan = Plan(layout, checksum, 3, 1)
    there = Plan.load(plan.dump())
    assert there == plan and there.layout is not None
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    Packer(layout).pack(layout.order(weights), Buffer.over(layout, flat))
    for name, view in zip(there.layout.names, there.layout.views(flat), strict=True):
        assert view.shape == weights.tensors[name].shape and same_bits(view, weights.tensors[name])
    with suppress(ValueError):
        Plan.load(mutated(data.draw, plan.dump()))


@quick
@given(st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
def test_what_is_no_plan_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        Plan.load(data)


def test_deep_nesting_and_long_numbers_are_refused() -> None:
    for data in (b"[" * 10**6, b"9" * 10**5, b"[null,false,1,1e400]", b"[null,false,true,0]", b"[null,false,1,NaN]"):
        with pytest.raises(ValueError):
            Plan.load(data)
        with pytest.raises(ValueError):
            Seed.load(data.decode())


@quick
@given(snapshots(), st.data())
def test_no_plan_reaches_beyond_its_buffer(weights: Snapshot, data: Any) -> None:
    plain = json.loads(Plan(Layout.of(weights), True).dump())
    for _ in range(data.draw(st.integers(1, 3))):
        plain[0] = replaced(data.draw, plain[0])
    try:
        layout = Plan.load(json.dumps(plain).encode()).layout
    except ValueError:
        return
    if layout is None or layout.nbytes > 1 << 20:
        return
    memory = torch.full((layout.nbytes + 8192,), 7, dtype=torch.uint8)
    for view in layout.views(memory[4096:-4096]):
        view.zero_()
    assert memory[:4096].eq(7).all() and memory[-4096:].eq(7).all()


FAR = Meeting("10.0.0.1", 80, "gloo")
NEAR = Meeting("127.0.0.1", 80, "nccl", Whereabouts(1, 2, "wsync-00", 4096))


@quick
@given(st.text(max_size=40) | json_values.map(json.dumps), st.data())
def test_seeds(text: str, data: Any) -> None:
    with suppress(ValueError):
        Seed.load(text)
    with closing(NetListener("127.0.0.1")) as door:
        seeds = [Seed(door.endpoint, meeting, 1, 2) for meeting in (None, FAR, NEAR)]
    assert [Seed.load(seed.dump()) for seed in seeds] == seeds
    seed = data.draw(st.sampled_from(seeds))
    with suppress(ValueError):
        Seed.load(json.dumps(replaced(data.draw, json.loads(seed.dump()))))


# --- lines ---


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def met(door: Listener | NetListener) -> Iterator[tuple[Line, Line]]:
    """Both ends of a line: the sender's, and worker 0's."""
    with closing(door), closing(come(door)) as theirs, closing(admitted(door)) as ours:
        yield ours, theirs


def come(door: Listener | NetListener) -> Line:
    return knock(door.endpoint, 0, None) if isinstance(door, Listener) else dial(door.endpoint, 0, deadline_in(5.0))


def admitted(door: Door) -> Line:
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        assert wait_readable([door.fileno()], deadline)
        visitor = door.accept()
        if visitor is not None:
            assert visitor[1].kind is Kind.HELLO and visitor[1].version == PROTOCOL
            return visitor[0]
    raise AssertionError("the worker did not get in")


def raw(line: Line) -> socket.socket:
    assert isinstance(line, LocalLine | NetLine)
    return line._socket


def door_of(kind: str) -> Listener | NetListener:
    return Listener() if kind == "unix" else NetListener("127.0.0.1")


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_strangers_do_not_keep_a_worker_out(kind: str) -> None:
    before = descriptors()

    @quick
    @given(st.lists(packets(), max_size=6), st.lists(packets(), max_size=3))
    def visit(some: list[bytes], late: list[bytes]) -> None:
        door = door_of(kind)
        unix = isinstance(door, Listener)
        address: Any = door.endpoint.address if unix else (door.endpoint.host, door.endpoint.port)
        strangers = []
        for words in ([], some, late):
            stranger = socket.socket(*((socket.AF_UNIX, socket.SOCK_SEQPACKET) if unix else (socket.AF_INET,)))
            stranger.connect(address)
            strangers.append(stranger)
            with suppress(ConnectionError):
                for word in words:
                    stranger.send(word)
        try:
            began = time.monotonic()
            with met(door):
                assert time.monotonic() - began < 2.0
        finally:
            for stranger in strangers:
                stranger.close()

    visit()
    assert descriptors() == before


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_crowd_of_silent_strangers(kind: str) -> None:
    with closing(door_of(kind)) as door:
        unix = isinstance(door, Listener)
        address: Any = door.endpoint.address if unix else (door.endpoint.host, door.endpoint.port)
        crowd = [
            socket.socket(*((socket.AF_UNIX, socket.SOCK_SEQPACKET) if unix else (socket.AF_INET,))) for _ in range(100)
        ]
        began = time.monotonic()
        for stranger in crowd:
            stranger.connect(address)
        with closing(come(door)), closing(admitted(door)):
            assert time.monotonic() - began < 2.0
        for stranger in crowd:
            stranger.close()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_line_brings_messages_or_ends(kind: str) -> None:
    @quick
    @given(st.lists(packets(), min_size=1, max_size=4), st.booleans())
    def throw(words: list[bytes], attach: bool) -> None:
        before = descriptors()
        with met(door_of(kind)) as (ours, theirs):
            for word in words:
                if attach and kind == "unix" and word:
                    socket.send_fds(raw(theirs), [word], [os.open("/dev/zero", os.O_RDONLY)])
                else:
                    raw(theirs).send(word)
            raw(theirs).shutdown(socket.SHUT_WR)
            while (message := ours.receive()) is not None:
                assert isinstance(message, Message)
                for fd in message.fds:
                    os.close(fd)
        # What was opened above to be sent is this test's own.
        assert descriptors() - before == sum(1 for word in words if word) * (attach and kind == "unix")
        for fd in sorted(map(int, os.listdir("/proc/self/fd")))[3:]:
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}") == "/dev/zero":
                    os.close(fd)

    throw()


@pytest.mark.parametrize("length", [2**64 - 1, 2**63 + 2**40, 2**63 - 1, 2**40, 2**30])
@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_an_announced_length_allocates_nothing(kind: str, length: int) -> None:
    with met(door_of(kind)) as (ours, theirs):
        file = os.memfd_create("sparse")
        os.truncate(file, 1 << 42)
        word = Message(Kind.FAILED).header(length)
        tracemalloc.start()
        try:
            if kind == "unix":
                socket.send_fds(raw(theirs), [word], [file])
            else:
                raw(theirs).send(word)
            os.close(file)
            raw(theirs).shutdown(socket.SHUT_WR)
            assert ours.receive() is None
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()


class Quiet:
    """An owner of lines that says nothing, and hears everything."""

    def __init__(self) -> None:
        self.heard: list[Message] = []

    def joining(self, worker: int, again: bool) -> Message:
        return Message(Kind.WELCOME, worker)

    def joined(self, worker: int, deadline: float | None) -> None: ...

    def left(self, worker: int) -> None: ...

    def answered(self, worker: int, message: Message) -> None:
        self.heard.append(message)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_worker_that_talks_nonsense_is_lost_and_the_other_heard(kind: str) -> None:
    @quick
    @given(st.lists(packets(), max_size=4))
    def talk(words: list[bytes]) -> None:
        door = door_of(kind)
        lines = Lines(door, 2, Quiet())
        with closing(lines), closing(come(door)) as bad:
            lines.admit([0], {}, deadline_in(5.0))
            good = knock(door.endpoint, 1, None) if isinstance(door, Listener) else dial(door.endpoint, 1, None)
            with closing(good):
                lines.admit([1], {}, deadline_in(5.0))
                good.send(Message(Kind.ACK, 1, 5))
                for word in words:
                    raw(bad).send(word)
                raw(bad).shutdown(socket.SHUT_WR)
                acks = {ack.worker: ack for ack in lines.collect([0, 1], 2**64, deadline_in(0.0))}
                while 0 in lines.workers:
                    assert lines.read(deadline_in(5.0)), "neither heard nor lost"
                acks |= {ack.worker: ack for ack in lines.collect([1], 5, deadline_in(5.0))}
                assert acks[1] == Ack(1, 5)

    talk()


# --- a worker's ends ---


@st.composite
def told(draw: Any) -> tuple[Kind, bytes]:
    """Something that a sender might say, or not quite."""
    plan = Plan(Layout.of(draw(snapshots())), True).dump()
    return draw(st.sampled_from(Kind)), mutated(draw, draw(st.binary(max_size=40) | st.just(plan)))


def test_what_a_worker_is_told() -> None:
    layout = Layout.of(Snapshot({"a": torch.zeros(4)}))
    arena = Arena(layout, 1)
    welcome = Message(Kind.WELCOME, 0, 0, Plan(layout, True).dump(), fds=arena.fds)

    @quick
    @given(told())
    def tell(said: tuple[Kind, bytes]) -> None:
        with closing(Listener()) as door:
            end = LocalReceiver(door.endpoint, retains=True)
            with closing(knock_and_welcome(end, door, welcome)) as line:
                line.send(Message(said[0], 0, 1, said[1]))
                end.events()
                end.close()

    gc.collect()
    before = descriptors()
    tell()
    gc.collect()  # mappings have descriptors of their own
    assert descriptors() <= before
    arena.close()


def knock_and_welcome(end: LocalReceiver | GroupReceiver, door: Listener | NetListener, welcome: Message) -> Line:
    """Have a worker's end connect, in a thread of its own; the sender's end of its line."""
    thread = Thread(target=lambda: end.connect(0, deadline_in(5.0)))
    thread.start()
    line = admitted(door)
    line.send(welcome)
    thread.join()
    return line


@quick
@given(st.sampled_from([kind for kind in Kind if kind not in (Kind.NEWS, Kind.STAGE)]), st.binary(max_size=40))
def test_what_a_worker_is_told_over_a_network(kind: Kind, payload: bytes) -> None:
    with closing(NetListener("127.0.0.1")) as door:
        end = GroupReceiver(
            lambda worker, deadline: dial(door.endpoint, worker, deadline),
            lambda worker, generation, deadline: lambda: GroupPair(None, 0),
            retains=True,
            device=torch.device("cpu"),
            timeout=5.0,
            ahead=False,
        )
        with closing(knock_and_welcome(end, door, Message(Kind.WELCOME, 0, 0, Plan(None, True).dump()))) as line:
            line.send(Message(kind, 0, 1, payload))
            end.events()
            end.close()


# --- checkpoints ---


def test_checkpoints(tmp_path: Path) -> None:
    state = {"policy": {"w": torch.arange(100.0)}, "frames": 3, "name": "é", "window": [1.5, None, True]}
    path = checkpoint.save(tmp_path, state)
    whole = path.read_bytes()

    @quick
    @given(st.data())
    def load(data: Any) -> None:
        path.write_bytes(mutated(data.draw, whole) if data.draw(st.integers(0, 9)) else data.draw(st.binary()))
        with suppress(checkpoint.CheckpointError):
            checkpoint.load(tmp_path)

    load()


@pytest.mark.parametrize("size", [0, 1, HEADER_SIZE - 1])
def test_half_a_header(size: int) -> None:
    with pytest.raises(ValueError):
        unpack(bytes(size))


def test_a_seed_of_the_wrong_kind() -> None:
    """Found by a long run: a dictionary is unpacked as gladly as a list."""
    near = ["h", 80, "gloo"]
    for where in (
        {"a": 1, "b": 2, "c": 3, "d": None},
        [1, 2, "gloo", None],
        ["h", 80, [], None],
        ["h", True, "gloo", None],
        [*near, {"a": 1, "b": 2, "c": 3, "d": 4}],
        [*near, [1, 2, "name"]],
        [*near, [True, 2, "name", 4096]],
        [*near, [1, -2, "name", 4096]],
        [*near, [1, 2, "name", 0]],
    ):
        with pytest.raises(ValueError):
            Seed.load(json.dumps([["host", 80, "00"], where, 0, 0]))
