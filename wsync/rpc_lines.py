"""Lines that are made of calls: ``torch.distributed.rpc``, with no thread of our own at either end.

What the trainer says is a call of ``_receive_weights_scheme`` in the worker, which does it (through the gate) and
returns what the worker has to say to it. Calls are numbered: RPC may run them out of order. What a worker says of
itself is a call the other way. An end that is waited for has a descriptor, as a socket would: a counting eventfd.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from torch.distributed import rpc

from wsync.errors import NotConnected
from wsync.identity import Watch, identity
from wsync.receiver_thread import Told
from wsync.words import PROTOCOL, Kind, Line, Message, unpack

_FOREVER = 0.0  # as RPC says it: whoever waits has a deadline of its own
_GOODBYE = 5.0  # seconds
_doors: dict[str, RpcDoor] = {}
_ends: dict[tuple[str, int], WorkerLine] = {}


def own_name() -> str:
    """This process's name among its RPC peers.

    Raises:
        NotConnected: RPC is not initialised here.
    """
    try:
        return rpc.get_worker_info().name
    except RuntimeError as error:
        raise NotConnected(
            "torch.distributed.rpc is not initialised in this process: call init_rpc(name, rank=…, world_size=…) first"
        ) from error


class _Inbox:
    """What has been said and not been read, behind a descriptor that is readable while there is something."""

    def __init__(self) -> None:
        self._messages: deque[Message | None] = deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._bell

    @property
    def waiting(self) -> bool:
        return bool(self._messages)

    def put(self, message: Message | None) -> None:
        with self._lock:
            if self._bell >= 0:
                self._messages.append(message)
                os.eventfd_write(self._bell, 1)

    def get(self) -> Message | None:
        with self._lock:
            os.eventfd_read(self._bell)
            return self._messages.popleft()

    def close(self) -> None:
        with self._lock:
            if self._bell >= 0:
                os.close(self._bell)
                self._bell = -1


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
        self._inbox = _Inbox()
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
            future = rpc.rpc_async(self._name, _receive_weights_scheme, args=arguments, timeout=_FOREVER)
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
        """Take in what the worker says."""
        self._inbox.put(unpack(data))

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
        self._visitors = _Inbox()
        self._waiting: deque[TrainerLine] = deque()
        self._lines: dict[int, TrainerLine] = {}
        _doors[key] = self

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
        _doors.pop(self._key, None)
        self._visitors.close()


class WorkerLine:
    """A worker's end of the line to its trainer (a ``Line``).

    Args:
        key: of the trainer's door.
        trainer: the name by which RPC knows the trainer.
        worker: this worker's index.
    """

    def __init__(self, key: str, trainer: str, worker: int) -> None:
        self.peer = f"RPC worker '{trainer}'"
        self._end = (key, worker)
        self._trainer = trainer
        self._inbox = _Inbox()
        self._order = threading.Lock()  # one call is served at a time
        self._heard = 0
        self._early: dict[int, Message] = {}
        self._told: Told | None = None
        self._saying = threading.Lock()
        self._reply: list[bytes] | None = None  # of the call that is being served
        _ends[self._end] = self
        name = own_name()
        try:
            rpc.rpc_sync(trainer, _knock, args=(key, worker, PROTOCOL, name, identity()), timeout=_GOODBYE)
        except RuntimeError as error:
            self.close()
            cause = f"the sender '{trainer}' is gone, has been shut down, or has another name: {error}"
            raise NotConnected(f"worker {worker}: {cause}") from error

    @property
    def signs(self) -> Sequence[int]:
        """The inbox's descriptor."""
        return (self._inbox.fileno(),)

    def fileno(self) -> int:
        """The inbox's descriptor."""
        return self._inbox.fileno()

    def serve(self, number: int, message: Message) -> list[bytes]:
        """Do what the trainer said, in the order in which it was said; what there is to reply."""
        with self._order:
            self._early[number] = message
            while (following := self._early.pop(self._heard + 1, None)) is not None:
                self._heard += 1
                self._inbox.put(following)
            return self._heed()

    def _heed(self) -> list[bytes]:
        if self._told is None:
            return []
        with self._saying:
            self._reply = []
        try:
            while self._inbox.waiting and self._told is not None:
                if not self._told.heed():
                    self._told = None
        finally:
            with self._saying:
                reply, self._reply = self._reply, None
        return reply or []

    def attach(self, receiver: Told) -> None:
        """From now on calls are served as they come; and now, what has come meanwhile."""
        with self._order:
            self._told = receiver
            replies = self._heed()
        for reply in replies:
            self._tell(reply)

    def detach(self) -> None:
        """Serve no more."""
        self._told = None

    def send(self, message: Message) -> None:
        """Say it in reply to the call that is being served, or by a call to the trainer."""
        data = message.pack()
        with self._saying:
            if self._reply is not None:
                self._reply.append(data)
                return
        self._tell(data)

    def _tell(self, data: bytes) -> None:
        try:
            arguments = (*self._end, own_name(), data)
            rpc.rpc_async(self._trainer, _hear, args=arguments, timeout=_GOODBYE)
        except (RuntimeError, NotConnected) as error:
            raise ConnectionError(f"{self.peer} cannot be called: {error}") from error

    def call(self, message: Message) -> None:
        """Send."""
        self.send(message)

    def receive(self) -> Message | None:
        """The next message."""
        return self._inbox.get()

    def close(self) -> None:
        """Hang up; harmless when repeated."""
        _ends.pop(self._end, None)
        self._inbox.close()


def _knock(key: str, worker: int, protocol: int, name: str, who: bytes) -> None:
    """Called in the trainer."""
    if key not in _doors:
        raise NotConnected("there is no such sender here (any more)")
    _doors[key].knock(worker, protocol, name, who)


def _hear(key: str, worker: int, name: str, data: bytes) -> None:
    """Called in the trainer."""
    door = _doors.get(key)
    if door is not None:
        door.hear(worker, name, data)


def _receive_weights_scheme(end: tuple[str, int], number: int, data: bytes) -> list[bytes]:
    """Called in a worker, for everything that the trainer says; weights that it announces come by their own way."""
    line = _ends.get(end)
    return [] if line is None else line.serve(number, unpack(data))
