"""Arbitrary bytes from outside are understood or refused: no hang, no crash, nothing executed, nothing leaked.

A short run by default; ``--hypothesis-profile=long --timeout=0`` takes some minutes.
"""

from __future__ import annotations

import gc
import json
import math
import os
import pickle
import socket
import stat
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_control import HOSTS, accept, connected, open_socket
from torch import Tensor

import wsync
from learning import checkpoint
from wsync.control import Address, Connection, Kind, Listener, Message, connect
from wsync.control.settings import SenderSettings
from wsync.testing.models import Small, fill
from wsync.weights.layout import Layout, same_bits
from wsync.weights.packing import Buffer
from wsync.weights.snapshot import Snapshot

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
    given_ = draw(st.dictionaries(st.text(max_size=6), tensors(), min_size=1, max_size=5))
    ties = draw(st.dictionaries(st.text(min_size=7, max_size=9), st.sampled_from(sorted(given_)), max_size=3))
    extra = draw(st.none() | st.dictionaries(st.text(max_size=3), st.none(), max_size=2))
    return Snapshot({**given_, **{name: given_[other] for name, other in ties.items()}}, extra)


def mutated(draw: Any, data: bytes) -> bytes:
    """Truncated, or with some bytes changed, or with more behind."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(0, 4))):
        if changed:
            changed[draw(st.integers(0, len(changed) - 1))] = draw(st.integers(0, 255))
    return bytes(changed[: draw(st.integers(0, len(changed)))]) + draw(st.sampled_from([b"", b"\0", b"]" * 9]))


@st.composite
def packets(draw: Any) -> bytes:
    """Noise, messages, and messages that were changed."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=120))
    return mutated(draw, draw(messages).pack())


def replaced(draw: Any, value: Any) -> Any:
    """Plain data with one of its parts replaced by something else."""
    if isinstance(value, list) and value and draw(st.integers(0, 3)):
        index = draw(st.integers(0, len(value) - 1))
        return [*value[:index], replaced(draw, value[index]), *value[index + 1 :]]
    return draw(json_values | st.integers(0, 9).map(lambda power: 64 << 7 * power))


@pytest.fixture(autouse=True)
def close_what_earlier_tests_have_left() -> None:
    gc.collect()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- handshakes and addresses ---


@quick
@given(snapshots(), st.booleans(), st.data())
def test_a_layout_survives_its_dump_and_its_views_are_the_weights(weights: Snapshot, checksum: bool, data: Any) -> None:
    layout = Layout.of(weights)
    handshake = SenderSettings(layout, checksum, 3, 1)
    loaded = SenderSettings.load(handshake.dump())
    assert loaded == handshake and loaded.layout is not None
    flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
    Buffer.over(layout, flat).pack(layout.order(weights))
    for name, view in zip(loaded.layout.names, loaded.layout.views(flat), strict=True):
        assert view.shape == weights.tensors[name].shape and same_bits(view, weights.tensors[name])
    with suppress(ValueError):
        SenderSettings.load(mutated(data.draw, handshake.dump()))


@quick
@given(st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
@example(b'["", "", ""]')
def test_other_bytes_are_no_handshake_and_no_address(data: bytes) -> None:
    with pytest.raises(ValueError):
        SenderSettings.load(data)
    with pytest.raises(ValueError):
        Address.load(data)


@pytest.mark.parametrize(
    "data", [b"[" * 10**6, b"9" * 10**5, b"[null,false,1,1e400,null]", b"[null,false,true,0,null]"]
)
def test_deep_nesting_and_long_numbers_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        SenderSettings.load(data)
    with pytest.raises(ValueError):
        Address.load(data)


@quick
@given(snapshots(), st.data())
def test_no_layout_reaches_beyond_its_buffer(weights: Snapshot, data: Any) -> None:
    plain = json.loads(SenderSettings(Layout.of(weights), True).dump())
    for _ in range(data.draw(st.integers(1, 3))):
        plain[0] = replaced(data.draw, plain[0])
    try:
        layout = SenderSettings.load(json.dumps(plain).encode()).layout
    except ValueError:
        return
    if layout is None or layout.nbytes > 1 << 20:
        return
    memory = torch.full((layout.nbytes + 8192,), 7, dtype=torch.uint8)
    for view in layout.views(memory[4096:-4096]):
        view.zero_()
    assert memory[:4096].eq(7).all() and memory[-4096:].eq(7).all()


# --- connections ---


@HOSTS
def test_other_connections_do_not_keep_a_worker_from_connecting(host: str) -> None:
    before = descriptors()

    @quick
    @given(st.lists(packets(), max_size=6), st.lists(packets(), max_size=3))
    def send_noise(some: list[bytes], more: list[bytes]) -> None:
        with closing(Listener(host)) as listener:
            others = []
            for contents in ([], some, more):
                other = open_socket(listener.address)
                others.append(other)
                with suppress(ConnectionError):
                    for content in contents:
                        other.send(content)
            with closing(connect(listener.address, 0, None)):
                accept(listener)[0].close()
            for other in others:
                other.close()

    send_noise()
    assert descriptors() == before


@contextmanager
def raw_socket(connection: Connection) -> Iterator[socket.socket]:
    """The socket of an authenticated connection."""
    with socket.socket(fileno=os.dup(connection.fileno())) as raw:
        yield raw


@HOSTS
def test_a_connection_returns_messages_until_it_ends(host: str) -> None:
    @quick
    @given(st.lists(packets(), min_size=1, max_size=4), st.booleans())
    def receive(contents: list[bytes], attach: bool) -> None:
        before = descriptors()
        with connected(host) as (ours, worker), raw_socket(worker) as raw, open("/dev/zero") as attached:
            for content in contents:
                if attach and not host and content:
                    socket.send_fds(raw, [content], [attached.fileno()])
                else:
                    raw.send(content)
            raw.shutdown(socket.SHUT_WR)
            while (message := ours.receive()) is not None:
                assert isinstance(message, Message)
                for fd in message.fds:
                    os.close(fd)
        assert descriptors() == before

    receive()


@pytest.mark.parametrize("length", [2**64 - 1, 2**63 + 2**40, 2**63 - 1, 2**40, 2**30])
@HOSTS
def test_a_length_that_is_announced_allocates_nothing(host: str, length: int) -> None:
    with connected(host) as (ours, worker), raw_socket(worker) as raw:
        header = bytearray(Message(Kind.DATA, 0, 1).pack())
        header[16:24] = length.to_bytes(8, "little")  # see wsync/control/messages.py
        tracemalloc.start()
        try:
            raw.send(header)
            raw.shutdown(socket.SHUT_WR)
            assert ours.receive() is None
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()


# --- schemes ---


def pair(sender: wsync.WeightSyncScheme, model: Small) -> wsync.WeightSyncScheme:
    """A receiver in this process, connected to ``sender``."""
    receiver = pickle.loads(pickle.dumps(sender))
    receiver.init_on_receiver("policy", model=model, worker_idx=0)
    connecting = threading.Thread(target=sender.connect)
    connecting.start()
    receiver.connect()
    connecting.join()
    return receiver


def stream_sockets() -> set[int]:
    """The descriptors of this process that are connected stream sockets."""
    found = set[int]()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if stat.S_ISSOCK(os.stat(path).st_mode):
                with socket.socket(fileno=os.dup(int(path.name))) as opened:
                    opened.getpeername()
                    found.add(int(path.name))
    return found


@pytest.mark.parametrize("backend", ["shared_mem", "distributed"])
def test_bytes_on_an_authenticated_connection_harm_neither_end(backend: str) -> None:
    """They may come from either end: the sender loses the worker, the worker its sender; both can shut down."""
    before = descriptors()

    @settings(max_examples=10, deadline=None)
    @given(st.lists(packets().filter(len), min_size=1, max_size=3), st.integers(0, 1))
    def send_noise(contents: list[bytes], end: int) -> None:
        others, model = stream_sockets(), Small()
        with wsync.WeightSyncScheme.from_backend(backend, timeout=0.5) as scheme:
            scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
            with pair(scheme, model) as receiver:
                opened = sorted(stream_sockets() - others)
                with socket.socket(fileno=os.dup(opened[end % len(opened)])) as raw:
                    for content in contents:
                        with suppress(OSError):
                            raw.send(content)
                    with suppress(OSError):
                        raw.shutdown(socket.SHUT_WR)
                with suppress(wsync.WeightSyncError):
                    scheme.send(fill(Small(), 2))
                assert model().unique().tolist() in ([1.0], [2.0])
                with suppress(wsync.WeightSyncError):
                    while receiver.receive(0.2) is not None:
                        pass

    send_noise()
    gc.collect()
    assert descriptors() <= before + 2  # kept once by what the schemes share in a process


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
