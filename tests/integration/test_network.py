"""Schemes across a network: torchrun, a group and a store of the user's, other addresses, another host."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from listening import LOOPBACK, listening
from torch import nn

import wsync
from wsync.deadlines import deadline_in, wait_readable
from wsync.network.credentials import CLAIM, PROOF, holds, new_claim, proof_for
from wsync.network.group import GroupPair
from wsync.network.listening import listen_on
from wsync.network.same_host import HostOutgoing
from wsync.network.tcp import NetLine, NetListener
from wsync.wire import lobby
from wsync.wire.words import HEADER_SIZE, PROTOCOL, Kind, Message

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(90)


def test_torchrun() -> None:
    """Meet in torchrun's store, in that of an initialised default group, and send within a group of the user's."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"),
        str(Path(__file__).parent / "torchrun_sync.py"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=80)
    assert done.returncode == 0, done.stdout + done.stderr
    for where in ("in the agent's store", "in the default group's", "in a group of its own"):
        assert done.stdout.count(where) == 3


def serve(scheme: wsync.WeightSyncScheme, line: Any) -> None:
    model = nn.Linear(3, 2)
    with scheme:
        scheme.init_on_receiver("policy", model=model, worker_idx=0)
        scheme.connect()
        line.send(float(model.bias.sum()))
        while line.recv() is not None:
            line.send(float(model.bias.detach().sum()))


@contextmanager
def worker(scheme: wsync.WeightSyncScheme) -> Iterator[Any]:
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe()
    process = context.Process(target=serve, args=(scheme, theirs))
    process.start()
    try:
        yield mine
        mine.send(None)
    finally:
        process.join(10)
        process.kill()
        process.join()


def exchange(scheme: wsync.WeightSyncScheme) -> None:
    model = nn.Linear(3, 2)
    scheme.init_on_sender("policy", model=model, num_workers=1)
    with scheme, worker(scheme) as line:
        scheme.connect()
        assert line.poll(30)
        assert line.recv() == pytest.approx(float(model.bias.detach().sum()))
        for value in range(5):
            nn.init.constant_(model.bias, value)
            scheme.send()
            line.send("look")
            assert line.recv() == 2.0 * value


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.7", "localhost", "::1"])
def test_other_addresses(host: str) -> None:
    try:
        listen_on(host).close()
    except wsync.NotConnected as error:
        pytest.skip(f"this machine has no {host}: {error}")
    exchange(wsync.DistributedWeightSyncScheme(host=host, timeout=30.0, shared_memory=False))


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("192.0.2.77", r"host=192\.0\.2\.77"),
        ("", "host is empty"),
        ("0.0.0.0", r"host=0\.0\.0\.0 is every interface"),
        ("0", "host=0 is every interface"),
        ("::", "host=:: is every interface"),
    ],
)
def test_an_address_that_there_is_not(host: str, said: str) -> None:
    scheme = wsync.DistributedWeightSyncScheme(host=host)
    with pytest.raises(wsync.NotConnected, match=said):
        scheme.init_on_sender("policy", model=nn.Linear(1, 1))


def test_loopback_unless_said_otherwise() -> None:
    before = listening()
    scheme = wsync.DistributedWeightSyncScheme()
    scheme.init_on_sender("policy", model=nn.Linear(1, 1))
    with scheme:
        assert listening() - before <= {LOOPBACK}
        assert LOOPBACK in listening()


def test_wrong_backends() -> None:
    with pytest.raises(ValueError, match="choose one of gloo, nccl"):
        wsync.DistributedWeightSyncScheme(backend="mpi").init_on_sender("policy", model=nn.Linear(1, 1))
    if not torch.distributed.is_nccl_available():
        with pytest.raises(ValueError, match="no nccl"):
            wsync.DistributedWeightSyncScheme(backend="nccl").init_on_sender("policy", model=nn.Linear(1, 1))


def test_a_sender_that_never_comes() -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    scheme = wsync.DistributedWeightSyncScheme(timeout=0.5, store=store)
    scheme.init_on_receiver("policy", model=nn.Linear(1, 1), worker_idx=3)
    before = time.monotonic()
    with pytest.raises(wsync.SyncTimeout, match=r"worker 3: no sender has announced itself"):
        scheme.connect()
    assert time.monotonic() - before < 5.0


def test_a_stranger_is_not_let_in() -> None:
    door = NetListener("127.0.0.1")
    strange = [b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + b"\xff" * 64]
    strange += [Message(Kind.HELLO, 0, PROTOCOL, shown).pack() for shown in (b"", bytes(16), bytes(CLAIM), bytes(99))]
    elsewhere = new_claim(door.endpoint.token, replace(door.endpoint, port=1).where)  # as an impostor hears it
    strange.append(Message(Kind.HELLO, 0, PROTOCOL, elsewhere).pack())
    for said in strange:
        with socket.create_connection(("127.0.0.1", door.endpoint.port)) as stranger:
            stranger.send(said)
            deadline = deadline_in(2.0)
            while ready := wait_readable([door.fileno(), stranger.fileno()], deadline):
                if stranger.fileno() in ready:
                    break
                assert door.accept() is None
            assert ready, "it was not turned away"
    door.close()


@pytest.mark.parametrize("shows", ["nothing", "noise", "an echo", "a proof for another"])
def test_a_worker_does_not_listen_to_an_impostor(shows: str) -> None:
    """Who listens where the trainer was could make the worker unpickle what it likes."""
    with wsync.DistributedWeightSyncScheme(timeout=20.0) as scheme, listen_on("127.0.0.1") as door:
        scheme.init_on_sender("policy", model=nn.Linear(1, 1), num_workers=1)
        endpoint = replace(scheme._seed.endpoint, port=door.getsockname()[1])
        worker = cloudpickle.loads(cloudpickle.dumps(scheme))
        worker._seed = replace(worker._seed, endpoint=endpoint)
        worker.init_on_receiver("policy", model=nn.Linear(1, 1), worker_idx=0)
        joining = ThreadPoolExecutor(1).submit(worker.connect)
        impostor, _ = door.accept()
        with impostor:
            heard = impostor.recv(4096)
            assert endpoint.token not in heard
            claim = heard[HEADER_SIZE : HEADER_SIZE + CLAIM]
            another = new_claim(endpoint.token, endpoint.where)
            first = {
                "nothing": b"",
                "noise": bytes(PROOF),
                "an echo": claim[-PROOF:],
                "a proof for another": proof_for(another, endpoint.token, endpoint.where),
            }
            impostor.sendall(first[shows] + Message(Kind.WELCOME, 0, 0).pack() + bytes(PROOF))
            with pytest.raises(wsync.NotConnected, match="does not know the token"):
                joining.result(10.0)
        worker.shutdown()


def test_credentials_hold_for_one_token_and_one_address() -> None:
    token, where = b"t" * 16, b"127.0.0.1 4000"
    claim = new_claim(token, where)
    assert holds(claim, token, where) and claim != new_claim(token, where)
    for bit in range(8 * CLAIM):
        other = bytearray(claim)
        other[bit // 8] ^= 1 << bit % 8
        assert not holds(bytes(other), token, where)
    assert not holds(claim, b"u" * 16, where) and not holds(claim, token, b"127.0.0.1 4001")
    proof = proof_for(claim, token, where)
    assert len(proof) == PROOF and proof not in (claim[:PROOF], claim[-PROOF:])
    assert proof != proof_for(new_claim(token, where), token, where)


def let_in(door: NetListener, visitor: socket.socket) -> bool:
    """Whether a visitor who has greeted is let in, rather than hung up on."""
    while True:
        ready = wait_readable([door.fileno(), visitor.fileno()], deadline_in(5.0))
        assert ready, "it was neither let in nor turned away"
        if visitor.fileno() in ready:
            return False
        if (admitted := door.accept()) is not None:
            admitted[0].close()
            return True


def greeting_for(door: NetListener) -> bytes:
    claim = new_claim(door.endpoint.token, door.endpoint.where)
    return Message(Kind.HELLO, 0, PROTOCOL, claim + b"\0\0").pack()


def test_a_greeting_that_was_overheard_opens_no_door() -> None:
    door = NetListener("127.0.0.1")
    greeting = greeting_for(door)
    for honest in (True, False):
        with socket.create_connection(("127.0.0.1", door.endpoint.port)) as visitor:
            visitor.sendall(greeting)
            assert let_in(door, visitor) == honest
    door.close()


@pytest.mark.parametrize("number", ["the same number", "another number"])
def test_who_comes_while_a_full_lobby_speaks_is_let_in(number: str) -> None:
    """Its descriptor may have the number that was that of who made room for it."""
    door, spare = NetListener("127.0.0.1"), os.open(os.devnull, os.O_RDONLY)
    with ExitStack() as stack:

        def visit() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", door.endpoint.port)))

        visitors = [visit() for _ in range(lobby._ROOM)]
        for _ in visitors:
            assert door.accept() is None
        honest = visit()
        visitors[0].send(b"\x10")
        if number == "another number":
            os.close(spare)  # the lowest that is free is taken
        assert door.accept() is None
        honest.sendall(greeting_for(door))
        assert let_in(door, honest)
        if number == "the same number":
            os.close(spare)
    door.close()


def test_messages_come_whole() -> None:
    with listen_on("127.0.0.1") as door:
        near = NetLine(socket.create_connection(door.getsockname()))
        far = NetLine(door.accept()[0])
    payloads = [b"", b"x", b"y" * 3_000_000, b"z" * 70_000]
    talking = threading.Thread(
        target=lambda: [near.send(Message(Kind.ACK, i, i, payload, 0.5)) for i, payload in enumerate(payloads)]
    )
    talking.start()
    for i, payload in enumerate(payloads):
        assert far.receive() == Message(Kind.ACK, i, i, payload, 0.5)
    talking.join()
    near.close()
    assert far.receive() is None
    far.close()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=12), st.integers(1, 200))
def test_messages_that_come_at_once_are_told_one_by_one(payloads: list[bytes], piece: int) -> None:
    """What one read brings beside a message is never the next one, whole: a poll would not tell of it."""
    sent = [Message(Kind.NEWS, i, 2**40 + i, payload) for i, payload in enumerate(payloads)]
    said = b"".join(message.pack() for message in sent)
    with listen_on("127.0.0.1") as door, socket.create_connection(door.getsockname()) as near:
        far = NetLine(door.accept()[0])
        near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        talking = threading.Thread(
            target=lambda: [near.sendall(said[at : at + piece]) for at in range(0, len(said), piece)]
        )
        talking.start()
        for message in sent:
            assert wait_readable([far.fileno()], deadline_in(5.0))
            assert far.receive() == message
        talking.join()
        assert not wait_readable([far.fileno()], deadline_in(0.0))
        far.close()


def test_a_long_message_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The patience is for a stretch of a message, not for all of it: a slow network is not a silent one."""
    monkeypatch.setattr("wsync.network.tcp._FRAME_TIMEOUT", 2.0)  # the pauses below are 2.5 s in all
    with listen_on("127.0.0.1") as door:
        near = NetLine(socket.create_connection(door.getsockname()))
        far, _ = door.accept()
    patience = threading.Event()

    def read() -> None:
        while far.recv(1 << 19):
            patience.wait(0.02)

    reading = threading.Thread(target=read)
    reading.start()
    near.send(Message(Kind.NEWS, payload=bytes(64 << 20)))
    near.close()
    reading.join()
    far.close()


def test_half_a_message_ends_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said next would be taken for the rest of it."""
    monkeypatch.setattr("wsync.network.tcp._FRAME_TIMEOUT", 0.5)
    with listen_on("127.0.0.1") as door:
        near = NetLine(socket.create_connection(door.getsockname()))
        far = NetLine(door.accept()[0])
    near.send(Message(Kind.NEWS, payload=bytes(64 << 20)))
    near.send(Message(Kind.ASK))  # waits behind it
    assert wait_readable([near.fileno()], deadline_in(20.0))
    near._outbox.close()
    with pytest.raises(ConnectionError, match="does not read"):
        near.send(Message(Kind.ASK))
    assert near.receive() is None
    assert far.receive() is None
    near.close()
    far.close()


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture
def namespace() -> Iterator[str]:
    """Another host, as far as the network goes: a namespace of its own, with a cable to this one."""
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2's `ip`")
    name = "wsync-test"
    try:
        run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine lets nobody make a network namespace: {error.stderr.decode().strip()}")
    try:
        run("ip", "link", "add", "wsync-a", "type", "veth", "peer", "name", "wsync-b", "netns", name)
        run("ip", "addr", "add", "10.211.7.1/24", "dev", "wsync-a")
        run("ip", "link", "set", "wsync-a", "up")
        for arguments in (("addr", "add", "10.211.7.2/24", "dev", "wsync-b"), ("link", "set", "wsync-b", "up")):
            run("ip", "netns", "exec", name, "ip", *arguments)
        run("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")
        yield name
    finally:
        run("ip", "netns", "delete", name)


REMOTE = """
import pickle, sys
from torch import nn
scheme = pickle.loads(bytes.fromhex(sys.argv[1]))
model = nn.Linear(3, 2)
scheme.init_on_receiver("policy", model=model, worker_idx=0)
scheme.connect()
while scheme.version < 5:
    scheme.receive(timeout=30.0)
print("bias", model.bias.tolist())
scheme.shutdown()
"""


ELSEWHERE = ("unshare", "--pid", "--fork", "--mount-proc")  # where no process of here can be seen


@pytest.mark.parametrize(("apart", "line"), [(ELSEWHERE, GroupPair), ((), HostOutgoing)], ids=["group", "memory"])
def test_between_two_hosts(namespace: str, apart: tuple[str, ...], line: type) -> None:
    """A worker that does not see the trainer's process is in a group with it; one that does shares its memory."""
    import pickle

    model = nn.Linear(3, 2)
    scheme = wsync.DistributedWeightSyncScheme(host="10.211.7.1", timeout=30.0)
    scheme.init_on_sender("policy", model=model, num_workers=1)
    with scheme:
        travelled = pickle.dumps(scheme).hex()
        command = ["ip", "netns", "exec", namespace, *apart, sys.executable, "-c", REMOTE, travelled]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as remote:
            scheme.connect()
            end: Any = scheme.sender._end
            assert isinstance(end._lanes[0].pair, line)
            for value in range(4):
                nn.init.constant_(model.bias, value)
                scheme.send()
            assert remote.stdout is not None
            assert remote.stdout.read().strip() == "bias [3.0, 3.0]"
