"""How a socket ends, though children that were forked meanwhile may have copies of it."""

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
