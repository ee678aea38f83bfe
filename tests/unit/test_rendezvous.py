"""Lines between processes of one machine."""

from __future__ import annotations

import os
import socket

from wsync.local.rendezvous import LocalLine
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
