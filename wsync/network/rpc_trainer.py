"""The trainer's end of lines that are made of RPC calls, and the door by which workers come."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch.distributed import rpc

from wsync.errors import NotConnected
from wsync.network.rpc_calls import End, Inbox, porters, receive_weights_scheme
from wsync.wire.identity import PeerProcess
from wsync.wire.words import Kind, Line, Message, unpack

_FOREVER = 0.0  # as RPC says it: whoever waits has a deadline of its own


class TrainerLine:
    """The trainer's end of the line to one worker (a ``Line``).

    Args:
        end: of the line.
        name: by which RPC knows it.
        who: its identity.
    """

    def __init__(self, end: End, name: str, who: bytes) -> None:
        self.peer = f"RPC worker '{name}'"
        self._end = end
        self._name = name
        self._peer = PeerProcess(who)
        self._inbox = Inbox()
        self._said = 0

    @property
    def signs(self) -> Sequence[int]:
        """The inbox's descriptor, and the process's if it runs on this machine."""
        return (self._inbox.fileno(), *self._peer.descriptors)

    def fileno(self) -> int:
        """The inbox's descriptor."""
        return self._inbox.fileno()

    def send(self, message: Message) -> None:
        """Call the worker; its reply goes into the inbox."""
        self._said += 1
        try:
            arguments = (self._end, self._said, message.pack())
            future = rpc.rpc_async(self._name, receive_weights_scheme, args=arguments, timeout=_FOREVER)
        except RuntimeError as error:
            raise ConnectionError(f"{self.peer} cannot be called: {error}") from error
        future.add_done_callback(self._replied)

    def call(self, message: Message) -> None:
        """Send."""
        self.send(message)

    def _replied(self, future: Any) -> None:
        try:
            replies = future.value()
        except RuntimeError:  # the call failed: the worker is gone
            self._inbox.put(None)
            return
        for reply in replies:
            self.hear(reply)

    def hear(self, data: bytes) -> None:
        """Take in what the worker says; nonsense ends the line."""
        try:
            self._inbox.put(unpack(data))
        except ValueError:
            self._inbox.put(None)  # who talks nonsense has left

    def receive(self) -> Message | None:
        """The next message; None if the worker is gone."""
        return self._inbox.get()

    def close(self) -> None:
        """Hang up; harmless when repeated."""
        if self._inbox.fileno() < 0:
            return
        self._inbox.close()
        self._peer.close()
        try:
            self.send(Message(Kind.BYE))
        except ConnectionError:
            return


class RpcDoor:
    """Where workers knock, by a call (a ``Door``).

    Args:
        key: which door of this process.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._visitors = Inbox()
        self._waiting: deque[TrainerLine] = deque()
        self._lines: dict[End, TrainerLine] = {}
        self._order = threading.Lock()  # calls come on several threads
        porters[key] = self

    def knock(self, end: End, protocol: int, name: str, who: bytes) -> None:
        """A worker asks to be let in."""
        with self._order:
            if self._visitors.fileno() < 0:
                raise NotConnected("there is no such sender here any more")
            line = TrainerLine(end, name, who)
            self._lines = {other: open_ for other, open_ in self._lines.items() if open_.fileno() >= 0}
            self._lines[end] = line
            self._waiting.append(line)
            self._visitors.put(Message(Kind.HELLO, end[1], protocol))

    def hear(self, end: End, data: bytes) -> None:
        """A worker says something of itself."""
        line = self._lines.get(end)
        if line is not None:
            line.hear(data)

    def fileno(self) -> int:
        """Readable when somebody is at the door."""
        return self._visitors.fileno()

    def accept(self) -> tuple[Line, Message] | None:
        """Who is at the door."""
        hello = self._visitors.get()
        line = self._waiting.popleft()
        return None if hello is None else (line, hello)

    def close(self) -> None:
        """Shut it, and send away who waits there; harmless when repeated."""
        porters.pop(self._key, None)
        with self._order:
            self._visitors.close()
            waiting, self._waiting = self._waiting, deque()
            self._lines.clear()
        for line in waiting:
            line.close()
