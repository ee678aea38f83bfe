"""A worker's updates from a transport: receive buffers, and what was received and is not installed yet."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wsync.checksum import CHECKSUM, checksum_of, find_damage
from wsync.control.messages import TRANSACTION, unpack_exactly
from wsync.deadlines import as_timedelta
from wsync.errors import NotConnected
from wsync.loops.tensors import copy_all
from wsync.receiving.protocols import Event, Failed, Poller, Prepare, Published, UpdateReceiver
from wsync.transport import Closing, FlatTransport, Transfer, TransportBackend
from wsync.types import Update
from wsync.weights.binding import Binding
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.weights.snapshot import Snapshot, snapshot
from wsync.weights.strategy import WeightStrategy

_ATTEMPTS = 8  # calls of receive_weights for one version, of those that return another version


class ReceiveBuffers:
    """Buffers of one layout; a new one is made when all others are in use.

    Args:
        device: where they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layout: Layout | None = None
        self._lock = threading.Lock()  # the acting thread frees buffers, the receiver thread takes them
        self._buffers: list[Buffer] = []
        self._used: set[int] = set()

    @property
    def layout(self) -> Layout:
        """The layout of every buffer.

        Raises:
            NotConnected: it is not known yet.
        """
        if self._layout is None:
            raise NotConnected("an update arrived before its layout")
        return self._layout

    def set_layout(self, layout: Layout) -> None:
        """Define what a buffer holds. Called once."""
        self._layout = layout

    def take(self) -> Buffer:
        """Return a buffer that is not in use."""
        with self._lock:
            free = next((buffer for buffer in self._buffers if buffer.slot not in self._used), None)
            if free is None:
                flat = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=self._device)
                free = Buffer.over(self.layout, flat, len(self._buffers))
                self._buffers.append(free)
            self._used.add(free.slot)
            return free

    def free(self, slot: int) -> None:
        """End the use of a buffer; nothing happens for -1."""
        with self._lock:
            self._used.discard(slot)


class TransportReader:
    """One worker's end of a transport. Implements ``wsync.receiving.protocols.UpdateReader``.

    A model that is bound stays on the buffer of its version.

    Args:
        transport: set up; owned by this object.
        strategy: the format in which the transport is given a buffer.
        binds: whether the model may stay bound to a buffer.
        timeout: seconds that an announced version may take to arrive; None for no limit.
    """

    def __init__(
        self,
        transport: TransportBackend | FlatTransport,
        strategy: WeightStrategy,
        *,
        binds: bool,
        timeout: float | None,
    ) -> None:
        self._transport = transport
        self._flat = transport if isinstance(transport, FlatTransport) else None  # asked once: it takes 10 µs
        self._strategy = strategy
        self.binds = binds
        self._timeout = timeout
        self._buffers = ReceiveBuffers(self._flat.device if self._flat is not None else torch.device("cpu"))
        self._has_layout = False
        self._checksum = True
        self._bound = -1  # the buffer that the model is bound to
        self._pending: Update | None = None  # received, and not installed
        self._received = 0  # the newest version that has arrived: it may be announced once more
        self._fetched: dict[int, _Fetched] = {}  # by version, of a transport that is not flat
        self._prepared: dict[int, Update] = {}  # by transaction
        self._incoming: tuple[Buffer, list[Transfer]] | None = None  # a flat transfer that has begun

    def set_layout(self, layout: Layout, checksum: bool | None) -> None:
        """See ``UpdateReader``."""
        self._buffers.set_layout(layout)
        self._checksum = checksum is not False or self._flat is None
        self._has_layout = True
        self.answered()

    def poller(self, receiver: UpdateReceiver) -> Poller:
        """See ``ReceiveChannel``."""
        return receiver

    def enable_fast_path(self, binding: Binding, socket_fd: int) -> None:
        """See ``ReceiveChannel``: there is none."""

    def disable_fast_path(self) -> None:
        """See ``UpdateReader``: there is none."""

    # --- messages: called by the receiver thread ---

    def published(self, version: int, payload: bytes) -> Sequence[Event]:
        """See ``UpdateReader``: of a flat transport the version follows; of all others it was fetched before."""
        if self._flat is not None:
            if version <= self._received:
                return []
            update = self._receive_flat(version, payload)
        else:
            fetched = self._fetched.pop(version, None)
            if fetched is None:
                return []
            update = self._complete(version, fetched)
            if isinstance(update, Failed):
                return [update]
        older, self._pending = self._pending, update
        if older is not None and older.slot != update.slot:  # superseded before it was installed
            self._buffers.free(older.slot)
        return [Published()]

    def fetch(self, version: int, payload: bytes) -> Sequence[Event]:
        """See ``UpdateReader``: receive, and keep what came until ``UPDATE``."""
        if version <= self._received or version in self._fetched:
            return []
        for older in self._fetched.values():  # its UPDATE was never sent
            self._buffers.free(older.buffer.slot)
        self._fetched = {version: self._begin_fetch(payload)}
        return []

    def prepare(self, version: int, payload: bytes) -> Sequence[Event]:
        """See ``UpdateReader``."""
        (transaction,) = unpack_exactly(TRANSACTION, payload[: TRANSACTION.size])
        rest = payload[TRANSACTION.size :]
        update: Update | Failed
        if self._flat is not None:
            if version <= self._received:
                return []
            update = self._receive_flat(version, rest)
        elif version not in self._fetched:
            return []
        else:
            update = self._complete(version, self._fetched.pop(version))
        if isinstance(update, Failed):
            return [update]
        self._prepared[transaction] = update
        return [Prepare(transaction, update)]

    def decide(self, transaction: int, commit: bool) -> None:
        """See ``UpdateReader``; an aborted ``FETCH`` comes here as well, under its version."""
        update = self._prepared.pop(transaction, None)
        if update is not None and not commit:
            self._buffers.free(update.slot)
        fetched = self._fetched.pop(transaction, None)
        if fetched is not None:
            self._buffers.free(fetched.buffer.slot)

    # --- flat transports ---

    def answered(self) -> None:
        """See ``UpdateReader``: begin the next transfer before it is announced, so that it costs no round trip."""
        if self._flat is None or not self._has_layout or not self._flat.receives_ahead:
            return
        try:
            self._begin_transfer(self._flat)
        except RuntimeError:  # the transport has broken: the next announced version finds that
            return

    def _begin_transfer(self, transport: FlatTransport) -> tuple[Buffer, list[Transfer]]:
        if self._incoming is None:
            self._incoming = self._buffers.take(), []
        buffer, transfers = self._incoming
        if not transfers:
            transport.begin_receive(buffer.flat, transfers)
        return self._incoming

    def _receive_flat(self, version: int, payload: bytes) -> Update:
        """Return an announced version once it has arrived.

        Raises:
            ConnectionError: the transport has broken.
        """
        assert self._flat is not None, "called for flat transports"
        try:
            buffer, transfers = self._begin_transfer(self._flat)
            transfers[0].wait(as_timedelta(self._timeout))
            if buffer.flat.is_cuda:
                torch.cuda.current_stream(buffer.flat.device).synchronize()
        except RuntimeError as error:
            raise ConnectionError(f"the transport has broken: {error}") from error
        self._incoming, self._received = None, version
        checksum, extra = self._split(payload)
        damage = "" if checksum is None else find_damage(version, buffer.flat, extra, checksum)
        return Update(version, buffer.views, extra, buffer.slot, damage=damage)

    def _split(self, payload: bytes) -> tuple[int | None, bytes]:
        """Return checksum and extra state.

        Raises:
            ValueError: there is no checksum where one was promised.
        """
        if not self._checksum:
            return None, payload
        if len(payload) < CHECKSUM.size:
            raise ValueError(f"{len(payload)} bytes where {CHECKSUM.size} of a checksum were expected")
        return CHECKSUM.unpack_from(payload)[0], payload[CHECKSUM.size :]

    # --- other transports ---

    def _begin_fetch(self, payload: bytes) -> _Fetched:
        checksum, extra = self._split(payload)
        assert checksum is not None, "always, of transports that are not flat"
        fetched = _Fetched(self._buffers.take(), checksum, extra)
        self._receive_into(fetched)
        return fetched

    def _receive_into(self, fetched: _Fetched) -> bool:
        """Call ``receive_weights`` once; return whether it returned anything. Its error is kept."""
        layout, transport = self._buffers.layout, self._transport
        assert isinstance(transport, TransportBackend), "called for transports that are not flat"
        buffer = fetched.buffer
        own = self._strategy.extract_weights(dict(zip(layout.names, buffer.views, strict=True)))
        fetched.error = ""
        try:
            received: Any = transport.receive_weights(self._timeout, weights=own, strategy=self._strategy)
            if received is None:
                return False
            if received is not own:
                # The extra state came with the announcement.
                tensors: list[Tensor] = layout.order(Snapshot(snapshot(received).tensors))
                copy_all(list(buffer.views), tensors)
        except Exception:  # noqa: BLE001  a transport may raise anything; the trainer raises it as WorkerFailed
            fetched.error = traceback.format_exc()
            return False
        fetched.matches = checksum_of(buffer.flat, fetched.extra) == fetched.checksum
        return True

    def _complete(self, version: int, fetched: _Fetched) -> Update | Failed:
        """Return the update that was fetched; receive again while another version came."""
        for _ in range(_ATTEMPTS):
            if fetched.matches or not self._receive_into(fetched):
                break
        buffer = fetched.buffer
        if fetched.matches:
            self._received = version
            return Update(version, buffer.views, fetched.extra, buffer.slot)
        self._buffers.free(buffer.slot)
        limit = "" if self._timeout is None else f" within {self._timeout} s"
        why = fetched.error or (
            f"update {version} arrived corrupt, or did not arrive{limit}: "
            f"{type(self._transport).__name__}.receive_weights returned no weights with its checksum"
        )
        return Failed(version, why)

    # --- called inside the gate ---

    def set_wakeups(self, wanted: bool) -> None:
        """See ``ReceiveChannel``: every update has a message."""

    def hold_previous(self) -> None:
        """See ``ReceiveChannel``: a buffer is not written while the model is bound to it."""

    def poll_update(self) -> Update | None:
        """See ``ReceiveChannel``. It stays pending until it is installed: a signal handler may raise in between."""
        return self._pending

    def on_installed(self, update: Update, error: str) -> None:
        """See ``ReceiveChannel``: free the buffer that is no longer needed."""
        if error or not self.binds:
            self._buffers.free(update.slot)
        elif update.slot != self._bound:
            self._buffers.free(self._bound)
            self._bound = update.slot
        if self._pending is update:
            self._pending = None

    def forward_ended(self) -> bool:
        """See ``UpdateReader``."""
        return False

    def close(self) -> None:
        """See ``UpdateReader``."""
        if self._flat is not None:
            pending = self._incoming[1][0] if self._incoming and self._incoming[1] else None
            self._flat.close(pending)
        elif isinstance(self._transport, Closing):
            self._transport.close()
        self._incoming = self._pending = None


class _Fetched:
    """A version that a transport was asked for."""

    def __init__(self, buffer: Buffer, checksum: int, extra: bytes) -> None:
        self.buffer = buffer
        self.checksum = checksum
        self.extra = extra
        self.matches = False
        self.error = ""
