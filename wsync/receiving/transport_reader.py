"""A worker's updates from a transport: its receive buffers, and the updates that are not installed yet."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

import torch

from wsync.checksum import CHECKSUM, find_damage
from wsync.control.messages import TRANSACTION, unpack_exactly
from wsync.receiving.events import Failed, Prepare, Published
from wsync.transforms.delta import apply_difference, base_of
from wsync.types import Ack, Update
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer, BufferPool


class TransportReader(ABC):
    """The updates of one worker from a transport. A version may also come as a difference to the one that is installed.

    The receiver thread (before, the thread that connects) receives into a buffer that is not in use. The thread that
    installs the update, inside the gate, frees the buffer. ``_pending`` needs no lock: the sender sends the next
    version only after the answer to this one, and the receiver thread enters the gate after each message, so it reads
    none while another thread answers.

    Args:
        device: where the receive buffers are.
        binds: whether the model stays bound to a receive buffer in main memory; otherwise it copies.
        timeout: seconds that an announced version may take to arrive; None for no limit.

    Attributes:
        binds: as given; False with buffers on a GPU.
        last_answer: the worker's last answer, and whether it was to a check (``PREPARE``, ``CHECK_LAYOUT``): the sender
            may ask for it again (``RESEND``).
    """

    def __init__(self, device: torch.device, *, binds: bool, timeout: float | None) -> None:
        self.binds = binds and device.type == "cpu"
        self.last_answer: tuple[Ack, bool] | None = None
        self._timeout = timeout
        self._layout: Layout | None = None
        self._pool = BufferPool(device)
        self._used: set[int] = set()  # slots
        self._lock = threading.Lock()  # the receiver thread takes buffers, the acting thread may free them
        self._bound = -1  # the buffer that the model is bound to, or that is kept as the base of the next difference
        self._pending: Update | None = None  # received, and not installed
        self._received = 0  # the newest version that has arrived: it may be announced again
        self._prepared: dict[int, Update] = {}  # by transaction
        self._keeps_base = False  # whether the newest installed version is kept, for the next difference
        self._base_version = 0  # of the bound buffer
        self._reconstructed: tuple[int, Buffer] | None = None  # from a difference, before its UPDATE or PREPARE

    def set_layout(self, layout: Layout, checksum: bool | None, *, delta: bool) -> None:
        """Use this layout from now on; ``checksum`` and ``delta`` as in ``SenderSettings``. Called once."""
        self._layout = layout
        self._keeps_base = delta

    def _require_layout(self) -> Layout:
        if self._layout is None:
            raise ValueError("an update before its layout")
        return self._layout

    def _take_buffer(self) -> Buffer:
        """Return a buffer that is not in use.

        Raises:
            ValueError: the layout has not arrived.
        """
        with self._lock:
            buffer = self._pool.buffer(self._require_layout(), self._used)
            self._used.add(buffer.slot)
            return buffer

    def _free(self, slot: int) -> None:
        """End the use of a buffer; nothing happens for -1."""
        with self._lock:
            self._used.discard(slot)

    # --- messages: called by the thread that connects, and then by the receiver thread. They may raise ValueError (the
    # message is malformed, or comes before the layout) or ConnectionError (the transport has broken)

    @abstractmethod
    def _receive(self, version: int, payload: bytes) -> Update | Failed | None:
        """Receive an announced version; None if it arrived before.

        Raises:
            ConnectionError: the transport has broken.
        """
        ...

    def on_difference(self, version: int, payload: bytes) -> None:
        """Process a ``DELTA`` message. The version is complete once its ``UPDATE`` or ``PREPARE`` has come."""
        if version <= self._received:
            return
        self._drop_reconstructed()
        with self._lock:
            base_version, base = self._base_version, self._pool.at(self._bound) if self._bound >= 0 else None
        if base is None or base_of(payload) != base_version:
            raise ValueError(f"a difference to version {base_of(payload)}, but the model has version {base_version}")
        buffer = self._take_buffer()
        self._reconstructed = version, buffer
        apply_difference(payload, base.flat, buffer.flat)

    def _drop_reconstructed(self) -> None:
        if self._reconstructed is not None:
            self._reconstructed[1].flat.zero_()  # it may be damaged, also between the tensors
            self._free(self._reconstructed[1].slot)
        self._reconstructed = None

    def _receive_announced(self, version: int, payload: bytes) -> Update | Failed | None:
        """Return an announced version: reconstructed from the difference before it, or else by ``_receive``."""
        if self._reconstructed is None or self._reconstructed[0] != version:
            self._drop_reconstructed()
            return self._receive(version, payload)
        buffer, self._reconstructed = self._reconstructed[1], None
        checksum, extra = self._split(payload)
        self._received = version
        damage = find_damage(version, buffer.flat, extra, checksum)
        if damage:
            buffer.flat.zero_()  # also between the tensors, where ``receive_weights`` writes nothing
        return Update(version, buffer.views, extra, buffer.slot, damage=damage)

    def on_update(self, version: int, payload: bytes) -> Published | Failed | None:
        """Process an ``UPDATE`` message; return its event, or None if the version had arrived before."""
        return self._published(self._receive_announced(version, payload))

    def _published(self, update: Update | Failed | None) -> Published | Failed | None:
        """Have the gate install what has arrived; return the event of its message."""
        if not isinstance(update, Update):
            return update
        older, self._pending = self._pending, update
        if older is not None and older.slot != update.slot:  # superseded before it was installed
            self._free(older.slot)
        return Published()

    def on_prepare(self, version: int, payload: bytes) -> Prepare | Failed | None:
        """Process a ``PREPARE`` message, like ``on_update``."""
        (transaction,) = unpack_exactly(TRANSACTION, payload[: TRANSACTION.size])
        update = self._receive_announced(version, payload[TRANSACTION.size :])
        if not isinstance(update, Update):
            return update
        self._prepared[transaction] = update
        return Prepare(transaction, update)

    def on_decision(self, transaction: int, commit: bool) -> bool:
        """Process a ``COMMIT`` or ``ABORT`` message; return whether a version that was arriving is dropped."""
        update = self._prepared.pop(transaction, None)
        if update is not None and not commit:
            self._free(update.slot)
        return False

    def _split(self, payload: bytes) -> tuple[int, bytes]:
        """Return checksum and extra state.

        Raises:
            ValueError: there is no checksum.
        """
        if len(payload) < CHECKSUM.size:
            raise ValueError(f"the payload has {len(payload)} bytes, too few for a checksum of {CHECKSUM.size}")
        return CHECKSUM.unpack_from(payload)[0], payload[CHECKSUM.size :]

    # --- called inside the gate ---

    def poll_update(self) -> Update | None:
        """See ``ReceiveChannel``. The update stays pending until it is installed: a signal handler may raise."""
        return self._pending

    def on_installed(self, update: Update, error: str) -> None:
        """See ``ReceiveChannel``: free the buffer that is no longer needed."""
        if error or not (self.binds or self._keeps_base):
            self._free(update.slot)
        elif update.slot != self._bound:
            self._free(self._bound)
            with self._lock:
                self._bound, self._base_version = update.slot, update.version
        if self._pending is update:
            self._pending = None

    def close(self) -> None:
        """Release everything. Idempotent."""
        self._pending = None
