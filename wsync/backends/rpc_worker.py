"""A worker's end of the connection by RPC calls. It has no thread of its own: calls bring the messages."""

from __future__ import annotations

import secrets
import socket
import threading
from contextlib import suppress
from typing import NoReturn

from torch.distributed import rpc

from wsync.backends.rpc_calls import (
    RpcConnection,
    deliver_to_sender,
    own_name,
    register_worker,
    sender_is_open,
    worker_endpoints,
)
from wsync.control.liveness import PeerProcess, own_identity
from wsync.control.messages import PROTOCOL, Kind, Message
from wsync.control.receiver_thread import MessageHandler
from wsync.deadlines import NOW, remaining, wait_readable
from wsync.errors import NotConnected, SyncTimeout
from wsync.gate import without_forward

_CALL_TIMEOUT = 5.0  # seconds to wait for the sender's answer that it is alive
_LEAVE_TIMEOUT = 1.0  # seconds to wait for the sender to take the last message, LEAVE
_NO_TIMEOUT = 0.0  # in RPC's terms
_TIMED_OUT = "RPCErr:1:"  # how torch begins the message of a call that has timed out


class RpcSenderConnection(RpcConnection):
    """A worker's end of the connection to its sender.

    Args:
        key: the key of the sender.
        trainer: the sender's name in RPC.
        host: the sender's address for process groups.
        worker: this worker's index.
        deadline: until when the sender has to have answered the call.

    Raises:
        SyncTimeout: it has not: it is stopped, or busy.
        NotConnected: there is no such sender (any more).
    """

    def __init__(self, key: str, trainer: str, host: str, worker: int, deadline: float | None) -> None:
        name = own_name()
        super().__init__((key, worker, secrets.token_hex(8)), trainer)
        self.peer = f"RPC worker '{trainer}'"
        self._host = host
        self._serving = threading.RLock()  # one call is processed at a time
        self._handler: MessageHandler | None = None
        self._sending = threading.Lock()
        self._answers: list[bytes] | None = None  # to the call that is being processed
        worker_endpoints[self._id] = self._serve
        left = remaining(deadline)
        timeout = _NO_TIMEOUT if left is None else max(left, 0.001)
        try:
            arguments = (self._id, PROTOCOL, name, own_identity())
            identity = rpc.rpc_sync(trainer, register_worker, args=arguments, timeout=timeout)
        except RuntimeError as error:
            self._give_up(worker, error)
        self._peer = PeerProcess(identity)

    def _give_up(self, worker: int, error: RuntimeError) -> NoReturn:
        late = _has_timed_out(error)
        if late:
            with suppress(ConnectionError):
                self._call(Message(Kind.LEAVE).pack())  # the sender may process the call yet
        self.close()
        sender = f"worker {worker}: the sender '{self._name}'"
        if late:
            raise SyncTimeout(f"{sender} did not answer in time: is it stopped, or busy?") from error
        raise NotConnected(f"{sender} is gone, has been shut down, or has another name: {error}") from error

    @property
    def local_host(self) -> str:
        """See ``Connection``: the address by which this machine reaches the sender's."""
        family, kind, protocol, _, where = socket.getaddrinfo(self._host, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(where)  # sends nothing
            return sock.getsockname()[0]

    def _serve(self, number: int, message: Message) -> list[bytes]:
        """See ``ServeMessage``: messages are processed in the order in which they were sent."""
        with self._serving:
            self._inbox.put_in_order(number, message)
            return self._process()

    @without_forward()
    def _process(self) -> list[bytes]:
        if self._handler is None:
            return []
        with self._sending:
            self._answers = []
        try:
            while self._inbox.waiting and self._handler is not None:
                if not self._handler.on_readable():
                    self._handler = None
        finally:
            with self._sending:
                answers, self._answers = self._answers, None
        return answers or []

    def attach(self, handler: MessageHandler) -> None:
        """See ``Connection``: calls are processed as they arrive from now on; those that have arrived, now."""
        with self._serving:
            self._handler = handler
            answers = self._process()
        for answer in answers:
            self._call(answer)

    def detach(self, handler: MessageHandler) -> None:
        """See ``Connection``."""
        with self._serving:
            self._handler = None

    def send(self, message: Message, *, may_drop: bool = False) -> None:
        """See ``Connection``: as an answer to the call that is being processed, or by a call to the sender."""
        data = message.pack()
        with self._sending:
            if self._answers is not None:
                self._answers.append(data)
                return
        self._call(data, last=message.kind is Kind.LEAVE)

    def _call(self, data: bytes, last: bool = False) -> None:
        """Call the sender, without waiting for it, unless this is the ``last`` call: that has arrived on return."""
        self._require_opener()
        with self._sending:
            self._sent += 1
            arguments = (self._id, self._sent, data)
        try:
            future = rpc.rpc_async(
                self._name, deliver_to_sender, args=arguments, timeout=_LEAVE_TIMEOUT if last else _NO_TIMEOUT
            )
            if last:
                future.wait()
        except RuntimeError as error:
            raise ConnectionError(f"{self.peer} cannot be called: {error}") from error

    def peer_is_alive(self) -> bool:
        """See ``Connection``: its process tells, if that runs on this machine, or else its answer to a call."""
        if self._peer.pid >= 0:
            return bool(self._peer.descriptors) and not wait_readable(self._peer.descriptors, NOW)
        try:
            return rpc.rpc_sync(self._name, sender_is_open, args=(self._id[0],), timeout=_CALL_TIMEOUT)
        except RuntimeError as error:
            return _has_timed_out(error)  # slow or stopped, but reachable

    def has_ended(self) -> bool:
        """See ``Connection``."""
        return not self.peer_is_alive()

    def close(self) -> None:
        """See ``Connection``."""
        self._peer.close()
        worker_endpoints.pop(self._id, None)
        self._inbox.close()


def _has_timed_out(error: RuntimeError) -> bool:
    """Return whether a call has timed out; otherwise it has failed."""
    return _TIMED_OUT in str(error)
