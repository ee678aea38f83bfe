"""TCP connections to a peer that does not read, and to one whose machine fails."""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import select
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess

import pytest

from wsync.control import Connection, Kind, Listener, Message, connect

FORK = multiprocessing.get_context("fork")
SECONDS = 60.0
LONGER_THAN_A_FAILED_MACHINE_IS_WAITED_FOR = 13.0
CLONE_NEWUSER, CLONE_NEWNET, SIOCSIFFLAGS = 0x10000000, 0x40000000, 0x8914


@contextmanager
def connected() -> Iterator[tuple[Connection, Connection]]:
    """Both ends of a TCP connection: the listener's, and the worker's."""
    with closing(Listener("127.0.0.1")) as listener, closing(connect(listener.address, 0, None)) as worker:
        while (accepted := listener.accept()) is None:
            select.select([listener], [], [], SECONDS)
        with closing(accepted[0]) as sender:
            sender.send(Message(Kind.DATA))
            assert worker.receive() is not None
            yield sender, worker


def ended_within(seconds: float, *connections: Connection) -> bool:
    """Whether one of some connections ends, or brings a message, in that time."""
    poller = select.poll()
    for connection in connections:
        poller.register(connection, select.POLLIN)
    return bool(poller.poll(seconds * 1000))


def tcp_watchers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "wsync-tcp-watch"]


def test_the_thread_ends_with_the_last_connection() -> None:
    before = tcp_watchers()
    with connected():
        assert len(tcp_watchers()) == 1
    assert tcp_watchers() == before


# --- a machine that fails: a network of its own, whose loopback interface is switched off ---


def set_loopback(up: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", up))


def in_own_network(function: Callable[[], None], answer: Pipe) -> None:
    """Call ``function`` in a network of this process's own; answer with the traceback, "", or None for no network."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) and libc.unshare(CLONE_NEWUSER | CLONE_NEWNET):
        answer.send(None)
        return
    set_loopback(True)
    try:
        function()
        answer.send("")
    except BaseException:  # noqa: BLE001  fails the test
        answer.send(traceback.format_exc())


def fail_while_idle() -> None:
    with connected() as (sender, worker):
        set_loopback(False)
        assert ended_within(SECONDS, sender) and sender.receive() is None
        assert ended_within(SECONDS, worker) and worker.receive() is None


def fail_before_a_message() -> None:
    with connected() as (sender, _):
        set_loopback(False)
        sender.send(Message(Kind.DATA))
        assert ended_within(SECONDS, sender) and sender.receive() is None


def fail_while_unread() -> None:
    """While a long message is not read."""
    with connected() as (sender, _):
        sender.send(Message(Kind.DATA, payload=bytes(20 << 20)))
        while sender_has_room(sender):  # until its kernel has to ask whether the worker's has room
            select.select([], [], [], 0.05)
        set_loopback(False)
        assert ended_within(SECONDS, sender) and sender.receive() is None
        with pytest.raises(ConnectionError):
            sender.flush()


def sender_has_room(sender: Connection) -> bool:
    return bool(select.select([], [sender], [], 0)[1])


@pytest.mark.slow
def test_a_machine_that_fails_is_noticed() -> None:
    """Whatever is under way; each in a process and a network of its own, and all at once."""
    started = [start(function) for function in (fail_while_idle, fail_before_a_message, fail_while_unread)]
    try:
        problems = [answer.recv() for _, answer in started]
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    if None in problems:
        pytest.skip("this user cannot make a network namespace")
    assert problems == ["", "", ""]


def start(function: Callable[[], None]) -> tuple[BaseProcess, Pipe]:
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=in_own_network, args=(function, theirs))
    process.start()
    theirs.close()
    return process, ours
