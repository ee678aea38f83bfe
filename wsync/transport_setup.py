"""Setting up a transport between two processes, while their control connection is watched.

Making a process group is a blocking call that cannot end at a deadline or at the death of the peer. So it runs in a
thread of its own, the set-up thread. Meanwhile the thread in ``connect`` waits for the end of that call, the deadline
and the death of the peer, and relays the group's store over the authenticated connection. If it stops waiting, the
set-up thread ends, because its store raises.
"""

from __future__ import annotations

import logging
import os
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from wsync.control import Connection, Kind, Message
from wsync.control.messages import why_ended
from wsync.deadlines import deadline_in, remaining, wait_readable
from wsync.errors import NotConnected, SyncTimeout
from wsync.transport import Closable, FlatTransport, Transfer, TransportBackend
from wsync.weights.strategy import WeightStrategy

_log = logging.getLogger(__name__)
_KEY_LENGTH = struct.Struct("<H")
_LONGEST = 600.0  # seconds, where there is no deadline
_LATER = 1.0  # seconds by which the set-up thread's deadline is later: the waiting thread then reports the timeout


class RelayStore(Store):
    """A ``torch.distributed`` store of two processes: a value that one sets, the other can get.

    ``set``, ``get``, ``wait`` and ``check`` are called by the set-up thread; ``put`` and ``abandon`` by the thread that
    connects.

    Args:
        relay: sends a key and its value to the other process.
        deadline: the deadline of all waits.
    """

    def __init__(self, relay: Callable[[str, bytes], None], deadline: float | None) -> None:
        super().__init__()
        self._relay = relay
        self._deadline = deadline
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._abandoned = False

    def put(self, key: str, value: bytes) -> None:
        """Store a value that the other process has set."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def abandon(self) -> None:
        """Let every wait raise, now and later."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        """See ``torch.distributed.Store``. What is set after ``abandon`` is not sent."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, data)
        if not self._abandoned:
            self._relay(key, data)

    def get(self, key: str) -> bytes:
        """See ``torch.distributed.Store``; waits for the key."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        """See ``torch.distributed.Store``."""

        def complete() -> bool:
            return self._abandoned or all(key in self._values for key in keys)

        with self._changed:
            if not self._changed.wait_for(complete, remaining(self._deadline)) or self._abandoned:
                raise RuntimeError(f"the other process did not set {', '.join(keys)} in time")

    def check(self, keys: Sequence[str]) -> bool:
        """See ``torch.distributed.Store``."""
        return all(key in self._values for key in keys)


def close_transport(transport: TransportBackend | FlatTransport, pending: Transfer | None = None) -> bool:
    """Call ``close``, if the transport has it; an error is logged.

    Returns:
        Whether the ``pending`` transfer of a ``FlatTransport`` may still use its buffer.
    """
    try:
        if isinstance(transport, FlatTransport):
            return transport.close(pending)
        if isinstance(transport, Closable):
            transport.close()
    except Exception:  # noqa: BLE001  of a user's transport: other workers have to be closed all the same
        _log.exception("%s.close() raised an error, which has no other effect", type(transport).__name__)
        return pending is not None
    return False


def _key_and_value(message: Message) -> tuple[str, bytes]:
    """Return key and value of a ``SETUP_KEY`` message.

    Raises:
        ValueError: it is malformed.
    """
    payload = message.payload
    if len(payload) < _KEY_LENGTH.size:
        raise ValueError("a SETUP_KEY message without a key")
    (length,) = _KEY_LENGTH.unpack_from(payload)
    begin = _KEY_LENGTH.size
    return payload[begin : begin + length].decode(), payload[begin + length :]


class TransportSetup:
    """The set-up of one end of a transport, in a thread of its own. Used by the thread that connects.

    Args:
        connection: the connection to the other process; only ``wait`` reads it meanwhile.
        worker: the worker's index.
        deadline: the deadline of the whole set-up.
        transport: the transport to set up.
        rank: 0 on the sender, 1 in the worker.
        connection_number: see ``SenderSettings``.
        strategy: in the worker, the format in which a ``TransportBackend`` is given a buffer.

    Attributes:
        thread: the set-up thread, which ``wait`` starts. After ``wait`` has raised it may still run for a short time.
    """

    def __init__(
        self,
        connection: Connection,
        worker: int,
        deadline: float | None,
        transport: TransportBackend | FlatTransport,
        rank: int,
        connection_number: int,
        strategy: WeightStrategy | None = None,
    ) -> None:
        self._connection = connection
        self._worker = worker
        self._deadline = deadline
        self._transport = transport
        self._lock = threading.Lock()  # guards the next three, which both threads use
        self._ended = False  # whether the set-up has returned or raised
        self._given_up = False  # whether ``wait`` has raised
        self._done = -1  # an eventfd, while ``wait`` runs
        self._error: BaseException | None = None
        end = "sender" if rank == 0 else "receiver"
        method = "connect" if isinstance(transport, FlatTransport) else f"setup_connection_and_weights_on_{end}"
        self._method = f"{type(transport).__name__}.{method}()"
        self._unread: list[Message] = []
        latest = deadline_in(_LONGEST) if deadline is None else deadline + _LATER
        self._store = RelayStore(self._relay, latest)
        set_up: Callable[[], Any]
        if isinstance(transport, FlatTransport):
            set_up = partial(transport.connect, self._store, rank, connection_number, connection.local_host, latest)
        elif rank == 0:
            set_up = transport.setup_connection_and_weights_on_sender
        else:
            set_up = partial(transport.setup_connection_and_weights_on_receiver, worker_idx=worker, strategy=strategy)
        self.thread = threading.Thread(target=self._run, args=(set_up,), name="wsync-transport-setup", daemon=True)

    def _relay(self, key: str, value: bytes) -> None:
        name = key.encode()
        payload = _KEY_LENGTH.pack(len(name)) + name + value
        self._connection.send(Message(Kind.SETUP_KEY, self._worker, payload=payload))

    def _run(self, set_up: Callable[[], Any]) -> None:
        try:
            set_up()
        except BaseException as error:  # noqa: BLE001  raised by wait()
            self._error = error
        with self._lock:
            self._ended = True
            failed = self._given_up or self._error is not None
        if failed and isinstance(self._transport, FlatTransport):
            close_transport(self._transport)
        with self._lock:
            if self._done >= 0:
                os.eventfd_write(self._done, 1)

    def wait(self) -> Sequence[Message]:
        """Set up this end; return other messages that arrived meanwhile. Called once.

        Raises:
            NotConnected: the connection ended.
            SyncTimeout: the deadline passed.
            OSError, RuntimeError: there is no descriptor or thread left.
            Exception: whatever the set-up raised.
        """
        try:
            self._done = os.eventfd(0, os.EFD_CLOEXEC)
            self.thread.start()
            return self._wait()
        except BaseException:
            self._abandon()
            raise
        finally:
            self._store.abandon()
            with self._lock:
                done, self._done = self._done, -1
            if done >= 0:
                os.close(done)
            self._error = None  # its traceback would keep the group's descriptors

    def _abandon(self) -> None:
        """Close the transport. If ``connect`` is running, or has failed, the set-up thread closes it."""
        with self._lock:
            self._given_up = True
            idle = self.thread.ident is None or (self._ended and self._error is None)
        if idle or not isinstance(self._transport, FlatTransport):
            close_transport(self._transport)  # ends a set-up that blocks

    def _wait(self) -> Sequence[Message]:
        descriptors = [self._done, *self._connection.descriptors]
        while True:
            ready = wait_readable(descriptors, self._deadline)
            if not ready:
                raise SyncTimeout(f"worker {self._worker}: {self._method} did not return in time{self._position()}")
            if self._connection.fileno() in ready:
                self._take(self._connection.receive())
            elif self._done in ready:
                if self._error is not None:
                    raise self._error
                return self._unread
            else:
                raise NotConnected(
                    f"worker {self._worker}: {self._connection.peer_name} died while the transport was set up"
                )

    def _position(self) -> str:
        """Return the line at which the set-up is, for an error: the innermost in the transport's file, if any."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        if frame is None:
            return ""
        stack = traceback.extract_stack(frame)
        file = getattr(sys.modules.get(type(self._transport).__module__), "__file__", None)
        line = ([one for one in stack if one.filename == file] or stack)[-1]
        return f": it is in {line.name}(), {line.filename} line {line.lineno}"

    def _take(self, message: Message | None) -> None:
        if message is None or message.kind is Kind.LEAVE:
            raise NotConnected(f"worker {self._worker}: {why_ended(self._connection.peer_name, message)}")
        if message.kind is Kind.SETUP_KEY:
            self._store.put(*_key_and_value(message))
        else:
            self._unread.append(message)
