"""The trainer's end of lines that are made of RPC calls, and the door by which workers come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch.distributed import rpc

from wsync.identity import Watch
from wsync.rpc_calls import Inbox, porters, receive_weights_scheme
from wsync.words import Kind, Line, Message, unpack

_FOREVER = 0.0  # as RPC says it: whoever waits has a deadline of its own


class TrainerLine:
    """The trainer's end of the line to one worker (a ``Line``).

    Args:
        key: of the door by which it came.
        worker: its index.
        name: by which RPC knows it.
        who: its identity.
    """

    def __init__(self, key: str, worker: int, name: str, who: bytes) -> None:
        self.peer = f"RPC worker '{name}'"
        self._end = (key, worker)
        self._name = name
        self._watch = Watch(who)
        self._inbox = Inbox()
        self._said = 0

    @property
    def signs(self) -> Sequence[int]:
        """The inbox's descriptor, and the process's if it runs on this machine."""
        return (self._inbox.fileno(), *self._watch.descriptors)

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
        self._watch.close()
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
        self._lines: dict[int, TrainerLine] = {}
        porters[key] = self

    def knock(self, worker: int, protocol: int, name: str, who: bytes) -> None:
        """A worker asks to be let in."""
        self._waiting.append(TrainerLine(self._key, worker, name, who))
        self._visitors.put(Message(Kind.HELLO, worker, protocol))

    def hear(self, worker: int, name: str, data: bytes) -> None:
        """A worker says something of itself."""
        line = self._lines.get(worker)
        if line is not None and line.peer == f"RPC worker '{name}'":
            line.hear(data)

    def fileno(self) -> int:
        """Readable when somebody is at the door."""
        return self._visitors.fileno()

    def accept(self) -> tuple[Line, Message] | None:
        """Who is at the door."""
        hello = self._visitors.get()
        line = self._waiting.popleft()
        if hello is None:
            return None
        self._lines[hello.worker] = line
        return line, hello

    def close(self) -> None:
        """Shut it; harmless when repeated."""
        porters.pop(self._key, None)
        self._visitors.close()
