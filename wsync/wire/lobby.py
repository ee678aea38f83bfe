"""Who has come to a sender's door and has not yet shown that it may come in: strangers delay nobody.

No visitor is waited for. Each is heard when it has said something, and the door's descriptor is readable meanwhile only
if somebody has. Until it has shown the token a visitor costs one descriptor and a kilobyte; one that says anything
else is turned away at once, one that is silent after five seconds, or as soon as its place is needed.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from wsync.wire.sockets import end
from wsync.wire.words import HEADER_SIZE, Kind, Line, Message, length_in, unpack

TOKEN = 16  # bytes
_PATIENCE = 5.0  # seconds in which a visitor has to have shown the token
_ROOM = 64  # visitors at a time
_GREETING = 1024  # bytes, at the most


@dataclass(slots=True)
class Visitor:
    """A connection, and what has come through it so far."""

    socket: socket.socket
    until: float
    heard: bytearray = field(default_factory=bytearray)


Admit = Callable[[Visitor], tuple[Line, Message] | None]
"""The line to a visitor and its greeting; None if the greeting is not whole yet; ValueError or OSError to refuse it."""


class Lobby:
    """Behind one listening socket.

    Args:
        door: listens; is closed with the lobby.
        admit: hears a visitor that has said something.
    """

    def __init__(self, door: socket.socket, admit: Admit) -> None:
        self._door = door
        self._opener = os.getpid()
        self._admit = admit
        self._visitors: dict[int, Visitor] = {}
        self._poll = select.epoll()
        door.setblocking(False)
        self._poll.register(door.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        """Readable when somebody is at the door, or in the lobby has said something."""
        return self._poll.fileno()

    def accept(self) -> tuple[Line, Message] | None:
        """Do what can be done without waiting: who has shown the token, if anybody has."""
        ready, door = {fd for fd, _ in self._poll.poll(0)}, self._door.fileno()
        for fd in ready - {door}:
            if (admitted := self._hear(fd)) is not None:
                return admitted
        if door in ready:  # last: who comes may take the place, and the descriptor's number, of who has just spoken
            self._enter()
        for fd in [fd for fd, visitor in self._visitors.items() if visitor.until < time.monotonic()]:
            self._dismiss(fd)
        return None

    def _enter(self) -> None:
        if len(self._visitors) == _ROOM:
            self._dismiss(next(iter(self._visitors)))  # who has been here longest
        try:
            sock, _ = self._door.accept()
        except (BlockingIOError, ConnectionError):
            return  # it is gone again
        sock.setblocking(False)
        self._visitors[sock.fileno()] = Visitor(sock, time.monotonic() + _PATIENCE)
        self._poll.register(sock.fileno(), select.EPOLLIN)

    def _hear(self, fd: int) -> tuple[Line, Message] | None:
        try:
            admitted = self._admit(self._visitors[fd])
        except (ValueError, OSError):
            self._dismiss(fd)
            return None
        if admitted is not None:
            self._poll.unregister(fd)
            del self._visitors[fd]
        return admitted

    def _dismiss(self, fd: int) -> None:
        visitor = self._visitors.pop(fd)
        if visitor.socket.fileno() >= 0:  # else whoever heard it has hung up
            self._poll.unregister(fd)
            visitor.socket.close()

    def close(self) -> None:
        """Shut the door, and send everybody away; harmless when repeated."""
        for visitor in self._visitors.values():
            end(visitor.socket, self._opener)
        self._visitors.clear()
        self._poll.close()
        if os.getpid() == self._opener:
            with suppress(OSError):  # there is nobody more, or it was shut before
                self._door.shutdown(socket.SHUT_RDWR)
                while True:  # where a child has a copy of the door, who has knocked would go on waiting
                    end(self._door.accept()[0], self._opener)
        self._door.close()


def greeting(visitor: Visitor, size: int, fits: Callable[[bytes], bool]) -> Message | None:
    """The greeting once it is whole, without its first ``size`` bytes; before they fit, only its header is read.

    Raises:
        ValueError: it is no greeting, or they do not fit.
    """
    heard = visitor.heard
    if len(heard) < HEADER_SIZE:
        return None
    length = length_in(heard)
    if not size <= length <= _GREETING or unpack(heard, b"").kind is not Kind.HELLO:
        raise ValueError("this is no greeting")
    begin = HEADER_SIZE + size
    if len(heard) >= begin and not fits(bytes(heard[HEADER_SIZE:begin])):
        raise ValueError("it does not know the token")
    return None if len(heard) < HEADER_SIZE + length else unpack(heard, bytes(heard[begin : HEADER_SIZE + length]))


def missing(visitor: Visitor) -> int:
    """How many bytes may be read of a greeting without reading what comes behind it."""
    heard = len(visitor.heard)
    return (HEADER_SIZE if heard < HEADER_SIZE else HEADER_SIZE + length_in(visitor.heard)) - heard
