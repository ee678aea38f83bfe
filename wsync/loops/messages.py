"""The header of all messages (see ``control/messages.py``), and the three messages that the inner loops use."""

from __future__ import annotations

import ctypes
import errno
import socket
import struct
from typing import NamedTuple

HEADER = struct.Struct("<BxxxiQQdd")  # kind, worker, version, length of the payload, wait, apply
UPDATE, ACK, SLOT_FREED = 4, 17, 20  # as in control.messages.Kind

_libc = ctypes.CDLL(None, use_errno=True)  # releases the GIL: a send without MSG_DONTWAIT may wait
_arguments = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send, _recv = _libc["send"], _libc["recv"]
_send.argtypes = _recv.argtypes = _arguments
_send.restype = _recv.restype = ctypes.c_ssize_t
_shutdown = _libc["shutdown"]


class Message(NamedTuple):
    """A message without payload.

    Attributes:
        wait: in ``ACK``, seconds from the arrival of the update's message until installing began.
        apply: in ``ACK``, seconds that installing took.
    """

    kind: int
    worker: int
    version: int = 0
    wait: float = 0.0
    apply: float = 0.0


def send_message(fd: int, message: Message, flags: int = socket.MSG_DONTWAIT) -> int:
    """Send a message; return 0, or the number of the error.

    If only a part could be sent, the socket is shut down: the peer could not read what follows. The thread that reads
    the socket notices that.
    """
    data = HEADER.pack(message.kind, message.worker, message.version, 0, message.wait, message.apply)
    sent = _send(fd, data, len(data), flags | socket.MSG_NOSIGNAL)
    if sent == len(data):
        return 0
    if sent < 0:
        return ctypes.get_errno()
    _shutdown(fd, socket.SHUT_RDWR)
    return errno.EPIPE


def send_answer(fd: int, message: Message) -> None:
    """Send a message; wait for room up to the socket's timeout. A failure is noticed by the thread that reads it."""
    if send_message(fd, message) == errno.EAGAIN:
        while send_message(fd, message, 0) == errno.EINTR:
            continue


def take_message(fd: int, kind: int, version: int = 0) -> Message | None:
    """Receive the next message from a socket if it has arrived whole, without payload, and is the expected one.

    Args:
        fd: of the socket.
        kind: the expected kind.
        version: the expected version; 0 for any.

    Returns:
        The message. None if it is another one, or not complete: it stays in the socket then.
    """
    data = ctypes.create_string_buffer(HEADER.size)
    if _recv(fd, data, HEADER.size, socket.MSG_PEEK | socket.MSG_DONTWAIT) != HEADER.size:
        return None
    found, worker, about, length, wait, apply = HEADER.unpack(data.raw)
    if found != kind or length or (version and about != version):
        return None
    if _recv(fd, data, HEADER.size, socket.MSG_DONTWAIT) != HEADER.size:
        return None
    return Message(found, worker, about, wait, apply)
