"""The sender's end of connections by RPC calls."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Any

from torch.distributed import rpc

from wsync.backends.rpc_calls import ConnectionId, Inbox, RpcConnection, decode, sender_endpoints, serve_message
from wsync.control.interfaces import Connection
from wsync.control.messages import Kind, Message
from wsync.control.receiver_thread import MessageHandler
from wsync.deadlines import NOW, wait_readable
from wsync.errors import NotConnected

_log = logging.getLogger(__name__)
_NO_TIMEOUT = 0.0  # in RPC's terms: the sender has a deadline of its own


class RpcWorkerConnection(RpcConnection):
    """The sender's end of the connection to one worker.

    Args:
        connection_id: the id of the connection.
        name: the worker's, in RPC.
        identity: the worker's process.
        host: the sender's address for process groups.
    """

    def __init__(self, connection_id: ConnectionId, name: str, identity: bytes, host: str) -> None:
        super().__init__(connection_id, name, identity)
        self.local_host = host

    @property
    def peer(self) -> str:
        """See ``Connection``. Of a process that has died, with a possible cause that leaves no other trace here."""
        name = f"RPC worker '{self._name}'"
        if not wait_readable(self._peer.descriptors, NOW):
            return name
        return f"{name} (see its output; garbage that a program sends to its RPC port may have made torch abort it)"

    def send(self, message: Message, *, may_drop: bool = False) -> None:
        """See ``Connection``: call the worker; its answers go into the inbox."""
        self._require_opener()
        self._sent += 1
        try:
            arguments = (self._id, self._sent, message.pack())
            future = rpc.rpc_async(self._name, serve_message, args=arguments, timeout=_NO_TIMEOUT)
        except RuntimeError as error:
            self._inbox.put(None)  # the worker would wait for the message with this number
            raise ConnectionError(f"{self.peer} cannot be called: {error}") from error
        future.add_done_callback(self._answered)

    def _answered(self, future: Any) -> None:
        """Take the answers to a call. Called by a thread of RPC."""
        try:
            answers = [decode(data) for data in future.value()]
        except Exception as error:  # noqa: BLE001  torch raises what the call has raised in the worker, with its type
            self._end_after(error)
            return
        for answer in answers:
            self._inbox.put(answer)

    def deliver(self, number: int, data: bytes) -> None:
        """Take a message that the worker has sent by itself; garbage ends the connection."""
        try:
            self._inbox.put_in_order(number, decode(data))
        except ValueError as error:
            self._end_after(error)

    def _end_after(self, error: Exception) -> None:
        """End the connection: the worker is gone, or has raised, or has sent garbage."""
        _log.debug("%s: the connection ends: %s", self.peer, error)
        self._inbox.put(None)

    def attach(self, handler: MessageHandler) -> None:
        """See ``Connection``: of workers only."""

    def detach(self, handler: MessageHandler) -> None:
        """See ``Connection``: of workers only."""

    def peer_is_alive(self) -> bool:
        """See ``Connection``: the descriptors tell."""
        return True

    def has_ended(self) -> bool:
        """See ``Connection``: of workers only."""
        return False

    def close(self) -> None:
        """See ``Connection``."""
        if self._inbox.fileno() < 0:
            return
        self._inbox.close()
        self._peer.close()
        try:
            self.send(Message(Kind.LEAVE))
        except ConnectionError:
            return


class RpcListener:
    """Where workers connect by a call (a ``ConnectionSource``).

    Args:
        key: the key of this sender.
        host: the sender's address for process groups.
    """

    passes_descriptors = False

    def __init__(self, key: str, host: str) -> None:
        self._key = key
        self._host = host
        self._arrivals = Inbox()
        self._pending: deque[RpcWorkerConnection] = deque()
        self._connections: dict[ConnectionId, RpcWorkerConnection] = {}
        self._lock = threading.Lock()  # calls come on several threads
        sender_endpoints[key] = self

    def register(self, connection_id: ConnectionId, protocol: int, name: str, identity: bytes) -> None:
        """See ``SenderEndpoint``."""
        with self._lock:
            if self._arrivals.fileno() < 0:
                raise NotConnected("there is no such sender here any more")
            connection = RpcWorkerConnection(connection_id, name, identity, self._host)
            self._connections = {other: one for other, one in self._connections.items() if one.fileno() >= 0}
            self._connections[connection_id] = connection
            self._pending.append(connection)
            self._arrivals.put(Message(Kind.HELLO, connection_id[1], protocol))

    def deliver(self, connection_id: ConnectionId, number: int, data: bytes) -> None:
        """See ``SenderEndpoint``."""
        connection = self._connections.get(connection_id)
        if connection is not None:
            connection.deliver(number, data)

    def fileno(self) -> int:
        """See ``ConnectionSource``."""
        return self._arrivals.fileno()

    def accept(self) -> tuple[Connection, Message] | None:
        """See ``ConnectionSource``."""
        hello = self._arrivals.get()
        connection = self._pending.popleft()
        return None if hello is None else (connection, hello)

    def close(self) -> None:
        """See ``ConnectionSource``."""
        sender_endpoints.pop(self._key, None)
        with self._lock:
            self._arrivals.close()
            pending, self._pending = self._pending, deque()
            self._connections.clear()
        for connection in pending:
            connection.close()
