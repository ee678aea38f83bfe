"""Sockets of which children that were forked meanwhile may have copies."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


def end(sock: socket.socket, opener: int) -> None:
    """Close ``sock``; harmless when repeated.

    In the process that opened it (``opener``, its id) that ends it for every copy, so that the other end hears of it. A
    child that has inherited it only lets its copy go.
    """
    if os.getpid() == opener:
        with suppress(OSError):  # it has ended already, or was closed
            sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def require_opener(opener: int) -> None:
    """Say nothing through a socket that ``opener`` (a process's id) has opened, but in that process.

    Raises:
        ConnectionError: this is a child that has inherited it; what it says would pass for its parent's word.
    """
    if os.getpid() != opener:
        raise ConnectionError("this line is the parent's of this process")
