"""Connections of ``wsync.control``: authentication, whole messages, many pending attempts, ends of either side."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import select
import signal
import socket
import struct
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import descriptors_left
from stopping import wait_until_asleep

import wsync
from wsync import listen_on
from wsync.control import Address, Connection, Kind, Listener, Message, WorkerConnections, connect

HOSTS = pytest.mark.parametrize("host", [None, "127.0.0.1"], ids=["unix", "tcp"])
SECONDS = 10.0
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000


def open_socket(address: Address) -> socket.socket:
    """Connect to a listener without any greeting."""
    if address.host:
        return socket.create_connection((address.host, int(address.port)))
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    opened.connect(f"\0{address.port}")
    return opened


def accept(listener: Listener) -> tuple[Connection, Message]:
    """Wait for an authenticated connection."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        select.select([listener], [], [], SECONDS)
        accepted = listener.accept()
        if accepted is not None:
            return accepted
    raise AssertionError("the connection was not accepted")


@contextmanager
def connected(host: str | None) -> Iterator[tuple[Connection, Connection]]:
    """Both ends of a connection: the listener's, and worker 3's. The listener's has sent one message."""
    with closing(Listener(host)) as listener:
        worker = connect(listener.address, 3, time.monotonic() + SECONDS)
        ours, hello = accept(listener)
        assert (hello.kind, hello.worker) == (Kind.HELLO, 3)
        with closing(ours), closing(worker):
            ours.send(Message(Kind.DATA, payload=b"first"))
            first = worker.receive()
            assert first is not None and first.payload == b"first"
            yield ours, worker


@HOSTS
def test_a_listener_and_connections_that_are_only_dropped_close_their_descriptors(host: str | None) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    listener = Listener(host)
    dropped = [connect(listener.address, 0, time.monotonic() + SECONDS), *accept(listener), listener]
    assert len(os.listdir("/proc/self/fd")) > before
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        dropped.clear()
        del listener
        gc.collect()
    assert not [str(warning.message) for warning in warned]
    assert len(os.listdir("/proc/self/fd")) <= before


def is_closed_by(listener: Listener, other: socket.socket) -> bool:
    """Whether the listener closes a connection instead of accepting it."""
    while True:
        ready, _, _ = select.select([listener, other], [], [], SECONDS)
        assert ready, "the listener neither accepts nor closes the connection"
        if other in ready:
            return True
        if (accepted := listener.accept()) is not None:
            accepted[0].close()
            return False


def greeting_for(address: Address) -> bytes:
    """What ``connect`` sends to a TCP address, at which nothing may listen yet."""
    with listen_on(address.host, int(address.port)) as other:
        worker = connect(address, 0, time.monotonic() + SECONDS)
        received, _ = other.accept()
        with closing(worker), received:
            return received.recv(4096)


def free_port() -> int:
    with listen_on("127.0.0.1") as listening:
        return listening.getsockname()[1]


# --- authentication ---


@HOSTS
def test_the_payload_of_connect_arrives_with_the_greeting(host: str | None) -> None:
    with closing(Listener(host)) as listener:
        with closing(connect(listener.address, 5, None, b"payload")):
            connection, hello = accept(listener)
            connection.close()
        assert (hello.worker, hello.payload) == (5, b"payload")


def test_a_worker_that_is_queued_is_accepted_at_once() -> None:
    """So ``readmit(timeout=0)`` finds a replacement that waits already."""
    with closing(Listener()) as listener, closing(connect(listener.address, 5, None)):
        accepted = listener.accept()
        assert accepted is not None
        accepted[0].close()


def test_a_connection_without_the_token_is_closed() -> None:
    with closing(Listener("127.0.0.1")) as listener:
        address = listener.address
        elsewhere = greeting_for(Address("127.0.0.1", free_port(), address.token))
        wrong_token = greeting_for(Address("127.0.0.1", free_port(), b"t" * len(address.token)))
        http = b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + b"\xff" * 64
        for content in (elsewhere, wrong_token, http, Message(Kind.HELLO, 0, 10, bytes(48)).pack()):
            with open_socket(address) as other:
                other.send(content)
                assert is_closed_by(listener, other)


def test_a_greeting_is_accepted_once() -> None:
    address = Address("127.0.0.1", free_port(), os.urandom(16))
    greeting = greeting_for(address)
    with closing(Listener(address.host, int(address.port), address.token)) as listener:
        for replayed in (False, True):
            with open_socket(address) as other:
                other.sendall(greeting)
                assert is_closed_by(listener, other) == replayed


@pytest.mark.parametrize("answer", ["nothing", "noise", "echo"])
def test_a_worker_reads_nothing_from_a_listener_without_the_token(answer: str) -> None:
    with listen_on("127.0.0.1") as impostor:
        worker = connect(Address("127.0.0.1", impostor.getsockname()[1], os.urandom(16)), 0, None)
        received, _ = impostor.accept()
        with closing(worker), received:
            greeting = received.recv(4096)
            proof = {"nothing": b"", "noise": bytes(32), "echo": greeting[-32:]}[answer]
            received.sendall(proof + Message(Kind.DATA, payload=b"untrusted").pack() + bytes(64))
            with pytest.raises(wsync.NotConnected, match="token"):
                worker.receive()


def test_an_address_survives_its_dump() -> None:
    for address in (Address("127.0.0.1", 80, b"1" * 16), Address("", "name", b"2" * 16)):
        assert Address.load(address.dump()) == address


# --- other connections ---


@HOSTS
def test_a_worker_is_accepted_beside_many_silent_connections(host: str | None) -> None:
    with closing(Listener(host)) as listener, ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(open_socket(listener.address))
        with closing(connect(listener.address, 0, None)):
            accept(listener)[0].close()


def test_a_worker_is_accepted_when_it_takes_the_place_of_a_silent_connection() -> None:
    """Its descriptor may have the number of the connection that was closed to make room."""
    with closing(Listener("127.0.0.1")) as listener, ExitStack() as stack:
        others = [stack.enter_context(open_socket(listener.address)) for _ in range(64)]
        for _ in others:
            assert listener.accept() is None
        with closing(connect(listener.address, 0, None)):
            others[0].send(b"\x10")
            accept(listener)[0].close()


def test_a_full_listener_queue_is_an_error_at_the_deadline() -> None:
    with closing(Listener()) as listener, ExitStack() as stack, pytest.raises(wsync.SyncTimeout, match="worker 7"):
        while True:
            stack.enter_context(closing(connect(listener.address, 7, time.monotonic() + 0.05)))


def test_a_worker_that_has_sent_its_greeting_waits_as_long_as_the_listener_is_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer sets up other workers meanwhile, which takes longer than an attempt has for its greeting."""
    monkeypatch.setattr("wsync.control.listener._AUTH_TIMEOUT", 0.2)
    address = Address("127.0.0.1", free_port(), os.urandom(16))
    greeting = greeting_for(address)
    with closing(Listener(address.host, int(address.port), address.token)) as listener, open_socket(address) as worker:
        select.select([listener], [], [], SECONDS)
        assert listener.accept() is None  # it has only been registered
        worker.send(greeting)
        threading.Event().wait(0.4)
        accepted = listener.accept()
        assert accepted is not None
        accepted[0].close()


def test_two_hundred_workers_can_connect_before_the_first_is_accepted() -> None:
    with closing(Listener()) as listener, ExitStack() as stack:
        for worker in range(200):
            stack.enter_context(closing(connect(listener.address, worker, time.monotonic() + SECONDS)))
        found = set[int]()
        while len(found) < 200:
            connection, hello = accept(listener)
            found.add(hello.worker)
            connection.close()


# --- messages ---


@HOSTS
def test_long_and_short_messages_arrive_whole_and_in_order(host: str | None) -> None:
    payloads = [b"", b"x", b"y" * 3_000_000, b"z" * 70_000]
    with connected(host) as (ours, worker):
        for index, payload in enumerate(payloads):
            worker.send(Message(Kind.DATA, index, index, payload, 0.5))
        for index, payload in enumerate(payloads):
            assert ours.receive() == Message(Kind.DATA, index, index, payload, 0.5)
        worker.close()
        assert ours.receive() is None


@HOSTS
def test_messages_that_arrive_in_pieces(host: str | None) -> None:
    """A message is complete when the descriptor is readable for it: the end of one never contains the next."""

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.binary(max_size=60), min_size=1, max_size=12), st.integers(1, 200))
    def receive(payloads: list[bytes], piece: int) -> None:
        sent = [Message(Kind.DATA, i, 2**40 + i, payload) for i, payload in enumerate(payloads)]
        content = b"".join(message.pack() for message in sent)
        with connected(host) as (ours, worker), socket.socket(fileno=os.dup(worker.fileno())) as raw:
            sending = threading.Thread(
                target=lambda: [raw.sendall(content[at : at + piece]) for at in range(0, len(content), piece)]
            )
            sending.start()
            for message in sent:
                assert select.select([ours], [], [], SECONDS)[0]
                assert ours.receive() == message
            sending.join()
            assert not select.select([ours], [], [], 0.0)[0]

    receive()


@HOSTS
def test_ctrl_c_within_a_message_leaves_it_to_the_next_call(host: str | None) -> None:
    sent = Message(Kind.DATA, 1, 2, b"x" * 100_000)
    content, main = sent.pack(), threading.get_native_id()
    with connected(host) as (ours, worker), socket.socket(fileno=os.dup(worker.fileno())) as raw:

        def interrupt() -> None:
            wait_until_asleep(main)
            os.kill(os.getpid(), signal.SIGINT)

        for begin, end in ((0, 10), (10, 50_000)):  # within the header, and within the payload
            raw.sendall(content[begin:end])
            interrupting = threading.Thread(target=interrupt)
            interrupting.start()
            with pytest.raises(KeyboardInterrupt):
                ours.receive()
            interrupting.join()
        raw.sendall(content[50_000:])
        assert ours.receive() == sent
        worker.send(sent)
        assert ours.receive() == sent


def test_descriptors_travel_with_a_message_and_are_not_inherited_by_programs() -> None:
    with connected(None) as (ours, worker):
        memory = os.memfd_create("test")
        ours.send(Message(Kind.DATA, fds=(memory,)))
        message = worker.receive()
        assert message is not None and len(message.fds) == 1 and not os.get_inheritable(message.fds[0])
        for fd in (memory, *message.fds):
            os.close(fd)


def test_a_message_with_more_descriptors_than_are_left_is_an_error() -> None:
    with connected(None) as (ours, worker), ExitStack() as opened:
        memory = [os.memfd_create("test") for _ in range(2)]
        for fd in memory:
            opened.callback(os.close, fd)
        ours.send(Message(Kind.ACCEPTED, fds=memory))
        with descriptors_left(1), pytest.raises(wsync.NotConnected, match="too many open files"):
            worker.receive()


@HOSTS
def test_the_longest_payload_arrives(host: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wsync.control.connection._MAX_PAYLOAD", 1000)
    with connected(host) as (ours, worker):
        with pytest.raises(ValueError, match="at most 1000 bytes, not 1001"):
            ours.send(Message(Kind.DATA, payload=bytes(1001)))
        ours.send(Message(Kind.DATA, payload=bytes(1000)))
        message = worker.receive()
        assert message is not None and len(message.payload) == 1000


def test_a_payload_that_no_listener_accepts_is_refused() -> None:
    with closing(Listener()) as listener:
        with pytest.raises(ValueError, match="the payload has at most") as refused:
            connect(listener.address, 0, None, bytes(2000))
        longest = int(str(refused.value).split()[5])
        with closing(connect(listener.address, 0, time.monotonic() + SECONDS, bytes(longest))):
            ours, hello = accept(listener)
            ours.close()
        assert len(hello.payload) == longest


class NoCallbacks:
    """Of ``WorkerConnections``."""

    def accepted_message(self, worker: int, rejoined: bool) -> Message:
        return Message(Kind.ACCEPTED, worker)

    def on_accepted(self, worker: int, deadline: float | None) -> None: ...

    def on_message(self, worker: int, message: Message) -> None: ...

    def on_disconnected(self, worker: int) -> None: ...


@HOSTS
def test_a_shutdown_reaches_a_worker_that_has_not_read_a_long_message(host: str | None) -> None:
    listener = Listener(host)
    connections = WorkerConnections(listener, 1, NoCallbacks())
    with closing(connect(listener.address, 0, time.monotonic() + SECONDS)) as worker:
        connections.wait_for_workers([0], {}, time.monotonic() + SECONDS)
        connections.send(0, Message(Kind.DATA, payload=bytes(20 << 20)))
        closing_all = threading.Thread(target=connections.close, kwargs={"finished": True})
        closing_all.start()
        kinds = [message and message.kind for message in (worker.receive() for _ in range(4))]
        closing_all.join()
    assert kinds == [Kind.ACCEPTED, Kind.DATA, Kind.LEAVE, None]


@HOSTS
def test_a_worker_that_exits_after_an_answer_is_dead_although_its_child_keeps_the_socket(
    host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A receive from a socket without data would wait for ten minutes.
    monkeypatch.setattr("wsync.control.connection.STALL_TIMEOUT", struct.pack("ll", 600, 0))
    with ExitStack() as stack:
        for _ in range(8):  # the numbers of the descriptors decide which one is looked at first
            memory = os.memfd_create("test")
            stack.callback(os.close, memory)
            _answer_and_exit(host)


def _answer_and_exit(host: str | None) -> None:
    listener, child_ends = Listener(host), os.pipe()
    worker = os.fork()
    if worker == 0:
        connection = connect(listener.address, 0, time.monotonic() + SECONDS)
        connection.receive()
        if os.fork() == 0:
            os.close(child_ends[1])
            os.read(child_ends[0], 1)  # until the test has ended
            os._exit(0)
        connection.send(Message(Kind.ACK, 0, 1))
        os._exit(0)
    with closing(WorkerConnections(listener, 1, NoCallbacks())) as connections:
        connections.wait_for_workers([0], {}, time.monotonic() + SECONDS)
        os.waitpid(worker, 0)
        acks: list[wsync.Ack] = []

        def wait() -> None:
            for version in (1, 2):
                acks.extend(connections.wait_acks([0], version, time.monotonic() + SECONDS))

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(2 * SECONDS)
        assert [ack.died for ack in acks] == [False, True]
    for fd in child_ends:
        os.close(fd)


def test_a_wait_ends_at_its_deadline_although_others_send_without_a_pause() -> None:
    always = os.eventfd(1)
    with closing(WorkerConnections(Listener(), 1, NoCallbacks())) as connections:
        connections.watch(always, lambda: None)
        ending = threading.Thread(
            target=connections.wait_acks, args=[[0], 1, time.monotonic() + 0.2], name="waits", daemon=True
        )
        ending.start()
        ending.join(SECONDS)
        assert not ending.is_alive()
    os.close(always)


def in_inner_namespace(address: Address, answer: int) -> None:
    """Connect in a process that has its own PID namespace; write the description of the sender to ``answer``."""
    libc = ctypes.CDLL(None)
    if libc.unshare(CLONE_NEWPID) and libc.unshare(CLONE_NEWUSER | CLONE_NEWPID):
        os.write(answer, b"not permitted")
    elif os.fork() == 0:
        with closing(connect(address, 0, time.monotonic() + SECONDS)) as connection:
            os.write(answer, connection.peer_name.encode())
        os._exit(0)


def test_a_peer_in_another_pid_namespace_has_no_process_id() -> None:
    read_end, write_end = os.pipe()
    with closing(Listener()) as listener, open(read_end, "rb") as answer:
        process = multiprocessing.get_context("fork").Process(
            target=in_inner_namespace, args=(listener.address, write_end)
        )
        process.start()
        os.close(write_end)
        described = answer.read().decode()
        process.join()
    if described == "not permitted":
        pytest.skip("this user cannot make a PID namespace")
    assert described == "a process of this machine"


@HOSTS
def test_what_was_sent_before_the_end_of_a_connection_arrives(host: str | None) -> None:
    """Also where the other end closes with something unread, which the kernel reports first."""
    with connected(host) as (ours, worker):
        ours.send(Message(Kind.DATA, version=7))
        worker.send(Message(Kind.DATA, version=8))
        worker.close()
        message = ours.receive()
        assert message is not None and message.version == 8
        assert ours.receive() is None


@HOSTS
def test_a_forked_child_can_neither_send_nor_end_the_connection(host: str | None) -> None:
    with connected(host) as (ours, worker):
        child = os.fork()
        if child == 0:
            try:
                worker.send(Message(Kind.DATA))
            except ConnectionError:
                worker.close()
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        worker.send(Message(Kind.DATA, version=9))
        message = ours.receive()
        assert message is not None and message.version == 9
