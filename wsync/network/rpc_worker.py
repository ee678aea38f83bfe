"""A worker's end of a line that is made of RPC calls, with no thread of its own: calls bring what there is to do."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from torch.distributed import rpc

from wsync.deadlines import NOW, remaining, wait_readable
from wsync.errors import NotConnected, SyncTimeout
from wsync.network.rpc_calls import Inbox, hear, knock, own_name, servers, there
from wsync.receiving.receiver_thread import LineHandler
from wsync.wire.identity import PeerProcess, identity
from wsync.wire.words import PROTOCOL, Kind, Message

_GOODBYE = 5.0  # seconds
_LAST = 1.0  # seconds in which a trainer that is neither stopped nor gone has heard that this worker leaves
_FOREVER = 0.0  # as RPC says it
_TOO_LATE = "RPCErr:1:"  # how torch begins the message of a call that has timed out


class WorkerLine:
    """A worker's end of the line to its trainer (a ``Line``).

    Args:
        key: of the trainer's door.
        trainer: the name by which RPC knows the trainer.
        worker: this worker's index.
        deadline: until when the trainer has to have heard the knock.

    Raises:
        SyncTimeout: it has not: it is stopped, or busy.
        NotConnected: there is no such trainer (any more).
    """

    def __init__(self, key: str, trainer: str, worker: int, deadline: float | None) -> None:
        name = own_name()
        self.peer = f"RPC worker '{trainer}'"
        self._end = (key, worker, secrets.token_hex(8))
        self._trainer = trainer
        self._inbox = Inbox()
        self._order = threading.RLock()  # one call is served at a time
        self._heard = 0
        self._early: dict[int, Message] = {}
        self._handler: LineHandler | None = None
        self._saying = threading.Lock()
        self._reply: list[bytes] | None = None  # of the call that is being served
        self._under_way: Any = None  # the newest call to the trainer, which ends within _GOODBYE
        self._peer = PeerProcess()
        servers[self._end] = self
        left = remaining(deadline)
        patience = _FOREVER if left is None else max(left, 0.001)
        try:
            who = rpc.rpc_sync(trainer, knock, args=(self._end, PROTOCOL, name, identity()), timeout=patience)
        except RuntimeError as error:
            self._give_up(worker, error)
        self._peer = PeerProcess(who)

    def _give_up(self, worker: int, error: RuntimeError) -> NoReturn:
        late = _is_late(error)
        if late:
            with suppress(ConnectionError):
                self._tell(Message(Kind.BYE).pack())  # it may hear the knock yet
        self.close()
        who = f"worker {worker}: the sender '{self._trainer}'"
        if late:
            raise SyncTimeout(f"{who} did not answer in time: is it stopped, or busy?") from error
        raise NotConnected(f"{who} is gone, has been shut down, or has another name: {error}") from error

    @property
    def signs(self) -> Sequence[int]:
        """The inbox's descriptor, and the trainer's process's if it runs on this machine."""
        return (self._inbox.fileno(), *self._peer.descriptors)

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
        if self._handler is None:
            return []
        with self._saying:
            self._reply = []
        try:
            while self._inbox.waiting and self._handler is not None:
                if not self._handler.on_readable():
                    self._handler = None
        finally:
            with self._saying:
                reply, self._reply = self._reply, None
        return reply or []

    def attach(self, receiver: LineHandler) -> None:
        """From now on calls are served as they come; and now, what has come meanwhile."""
        with self._order:
            self._handler = receiver
            replies = self._heed()
        for reply in replies:
            self._tell(reply)

    def detach(self, receiver: LineHandler) -> None:
        """Serve no more; return when no call is being served, unless it is by this one."""
        with self._order:
            self._handler = None

    def send(self, message: Message) -> None:
        """Say it in reply to the call that is being served, or by a call to the trainer."""
        data = message.pack()
        with self._saying:
            if self._reply is not None:
                self._reply.append(data)
                return
        self._tell(data, last=message.kind is Kind.BYE)

    def _tell(self, data: bytes, last: bool = False) -> None:
        """Call the trainer. The ``last`` call comes after what was said before, and has been heard on return.

        Else the trainer might take a failure for a departure, or let in and wait for somebody who has given up.
        """
        try:
            if last and self._under_way is not None:
                self._under_way.wait()
            patience = _LAST if last else _GOODBYE
            self._under_way = rpc.rpc_async(self._trainer, hear, args=(self._end, data), timeout=patience)
            if last:
                self._under_way.wait()
        except RuntimeError as error:
            raise ConnectionError(f"{self.peer} cannot be called: {error}") from error

    def call(self, message: Message) -> None:
        """Send."""
        self.send(message)

    def receive(self) -> Message | None:
        """The next message."""
        return self._inbox.get()

    def readable(self) -> bool:
        """Whether there is something to ``receive``, now."""
        return self._inbox.waiting

    def peek(self) -> Message | None:
        """Never: what is there is being dealt with, by the call that has brought it."""
        return None

    def alive(self) -> bool:
        """Whether the trainer is there: its process, if that runs on this machine, or else its answer to a call."""
        if self._peer.pid >= 0:
            return bool(self._peer.descriptors) and not wait_readable(self._peer.descriptors, NOW)
        try:
            return rpc.rpc_sync(self._trainer, there, args=(self._end[0],), timeout=_GOODBYE)
        except RuntimeError as error:
            return _is_late(error)  # it is slow, or stopped, but its end of the connection is there

    def close(self) -> None:
        """Hang up; harmless when repeated."""
        self._peer.close()
        servers.pop(self._end, None)
        self._inbox.close()


def _is_late(error: RuntimeError) -> bool:
    """Whether a call has timed out; else it has failed."""
    return _TOO_LATE in str(error)
