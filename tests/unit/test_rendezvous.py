"""Lines between processes of one machine."""

from __future__ import annotations

import os
import socket

import pytest

from wsync.deadlines import deadline_in
from wsync.errors import SyncTimeout
from wsync.local.rendezvous import Listener, LocalLine, knock
from wsync.wire.words import Kind, Message


def test_a_program_that_is_started_inherits_no_memory_that_came() -> None:
    near, far = map(LocalLine, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    memory = os.memfd_create("wsync-test")
    near.send(Message(Kind.WELCOME, fds=(memory,)))
    message = far.receive()
    assert message is not None and len(message.fds) == 1
    assert not os.get_inheritable(message.fds[0])
    for fd in (memory, *message.fds):
        os.close(fd)
    near.close()
    far.close()


def test_the_last_words_of_one_that_leaves_with_something_unread_are_heard() -> None:
    """The kernel says first that the line was reset: a worker's answer, sent before it left, was lost by that."""
    near, far = map(LocalLine, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    near.send(Message(Kind.NEWS, 0, 7))
    far.send(Message(Kind.ACK, 0, 7))
    far.close()
    heard = near.receive()
    assert heard is not None and (heard.kind, heard.version) == (Kind.ACK, 7)
    assert near.receive() is None
    near.close()


@pytest.mark.timeout(60)
def test_who_finds_no_room_at_a_door_that_nobody_opens_waits_no_longer_than_it_wants() -> None:
    door = Listener()
    with pytest.raises(SyncTimeout, match="worker 7: the sender let nobody in"):
        while True:  # those who give up have knocked all the same
            knock(door.endpoint, 7, deadline_in(0.05)).close()
    door.close()


@pytest.mark.timeout(60)
def test_two_hundred_workers_have_room_at_a_door_before_it_is_opened() -> None:
    door = Listener()
    lines = [knock(door.endpoint, worker, deadline_in(20.0)) for worker in range(200)]
    came = set()
    while len(came) < len(lines):
        visitor = door.accept()
        if visitor is not None:
            line, hello = visitor
            came.add(hello.worker)
            line.close()
    for line in lines:
        line.close()
    door.close()
