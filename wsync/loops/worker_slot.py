"""A worker's part of an arena's words: taking the published slot before a forward, and releasing it afterwards."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from wsync.loops.gate_lock import GateHook, GateLock
from wsync.loops.installer import Installer
from wsync.loops.messages import ACK, SLOT_FREED, UPDATE, Message, send_answer, take_message
from wsync.loops.pack_plan import PackPlan
from wsync.loops.words import (
    AWAITED,
    HELD,
    NONE,
    PUBLISHED,
    TAKEN,
    USED,
    WAKEUPS,
    Block,
    slot_in,
    version_in,
)


class SlotReceiver(GateHook, Protocol):
    """A ``wsync.receiver.Receiver``, which installs the updates that the fast path of its ``WorkerSlot`` does not.

    Attributes:
        version: the version that is installed in the model.
        announced_at: when the message about the update that is being installed arrived, on ``time.perf_counter``; 0.0
            if there was none.
        waiting: how many threads wait in ``receive``; installing an update has to wake them.
    """

    version: int
    announced_at: float
    waiting: int

    def on_readable(self) -> bool:
        """See ``WorkerSlot.on_readable``."""
        ...


class WorkerSlot:
    """The slot of an arena that one worker uses. The gate and the receiver thread call it in place of the receiver.

    All methods are called inside the gate, except ``on_readable`` and ``set_wakeups``: by the acting thread (which runs
    the model's forward) or the receiver thread.

    Attributes:
        version: the version that is installed in the model.
        slot: the slot that the model is bound to; -1 if the model has memory of its own.
        refused: the newest version that could not be installed.
        hold: whether installing the next version may fail. The model's slot is then kept between forwards as well.
        busy: whether a slot is in use.
    """

    def __init__(self) -> None:
        self.version = 0
        self.slot = NONE
        self.refused = 0
        self.hold = False
        self.busy = False
        self._block: Block | None = None
        self._receiver: SlotReceiver | None = None
        self._gate_lock: GateLock | None = None
        self._installer: Installer | None = None
        self._plans: list[PackPlan] = []
        self._staged: Mapping[int, Any] = {}
        self._fd = self._worker = -1
        self._bound = False

    def set_receiver(self, receiver: SlotReceiver, gate_lock: GateLock, /) -> None:
        """Set the receiver, for updates outside the fast path, and the gate. Called once, before ``poll_update``."""
        self._receiver = receiver
        self._gate_lock = gate_lock

    def map_words(self, words: memoryview, at: int, /) -> None:
        """Set the worker's words, which begin at index ``at`` of ``words``. Until then the receiver does everything.

        Raises:
            ValueError: ``words`` are too few.
        """
        self._block = Block(words, at)

    def close(self) -> None:
        """Drop all references. ``poll_update``, ``leaving_gate`` and ``on_readable`` do nothing from then on."""
        self._receiver = self._gate_lock = self._block = None
        self.disable_fast_path()

    def install_fast_path(
        self,
        installer: Installer,
        plans: list[PackPlan],
        staged: dict[int, Any],
        fd: int,
        worker: int,
        bound: bool,
        /,
    ) -> None:
        """Install updates without the receiver from now on, except while ``hold`` is set.

        Args:
            installer: installs in the model.
            plans: of the slots that are mapped here; new ones are appended.
            staged: the prepared transactions of this process; while there are any, the receiver installs all updates.
            fd: of the connection's socket, for answers.
            worker: the worker's index.
            bound: whether the model stays bound to slots; otherwise it copies.
        """
        self._plans, self._staged = plans, staged
        self._fd, self._worker, self._bound = fd, worker, bound
        self._installer = installer

    def disable_fast_path(self) -> None:
        """The receiver installs all updates from now on."""
        self._installer = None

    # --- the words ---

    def _mapped(self) -> Block:
        if self._block is None:
            raise RuntimeError("map_words() comes first")
        return self._block

    @property
    def _known(self) -> int:
        """The newest version that need not be installed again."""
        return max(self.version, self.refused)

    def take(self, hold: bool, /) -> tuple[int, int, bool] | None:
        """Start to use the published slot if its version is new here, else the slot that the model is bound to.

        Args:
            hold: keep the model's slot as well until ``release_previous`` or ``release``: installing may fail.

        Returns:
            ``(version, slot, acknowledge)`` of a new version; None if there is none.
        """
        block = self._mapped()
        self.busy = True  # before the words are written: an interrupted call is then followed by a release
        try:
            block.mutex.lock()
            word, slot = block[PUBLISHED], self.slot
            newer = version_in(word) > self._known
            if newer and hold:
                block[HELD] = slot
            if newer:
                slot = slot_in(word)
            # The sender reads TAKEN, then USED, then HELD, without the mutex. At each moment one of them must show that
            # a needed slot is needed: the new word is stored before the old one is changed.
            block[USED] = slot
            if newer:
                block[TAKEN] = version_in(word)
        finally:
            block.mutex.unlock()
        self.busy = slot >= 0
        return (version_in(word), slot, bool(word & 1)) if newer else None

    def release_previous(self) -> None:
        """Stop holding the previous slot: the new one is installed."""
        self._mapped()[HELD] = NONE

    def release(self) -> bool:
        """Stop using slots; return whether the sender waits for a message about it. Idempotent.

        The model's slot is held if installing the next version may fail, or installing the newest has failed.
        """
        if not self.busy:
            return False
        block = self._mapped()
        keep = self.slot if self.hold or self.refused > self.version else NONE
        try:
            block.mutex.lock()
            block[HELD] = keep  # before the next store: see take()
            block[USED] = NONE
            awaited = block[AWAITED]
            block[AWAITED] = 0
        finally:
            block.mutex.unlock()
        self.busy = False
        return bool(awaited)

    def set_wakeups(self, wanted: bool, /) -> None:
        """Set whether the sender must wake this worker for an update that it need not acknowledge."""
        block = self._mapped()
        try:
            block.mutex.lock()
            block[WAKEUPS] = wanted
        finally:
            block.mutex.unlock()

    # --- called by the gate and by the receiver thread ---

    def poll_update(self) -> bool:
        """See ``gate_lock.GateHook``. Most calls find nothing new."""
        receiver = self._receiver
        if receiver is None:
            return False
        if self._block is None:
            return receiver.poll_update()
        if not self._has_update(self._block) or self._install(receiver):
            return False
        return receiver.poll_update()

    def _has_update(self, block: Block) -> bool:
        """Whether a new version is published; if not, the model's slot is in use from here on."""
        self.busy = True  # see take()
        try:
            block.mutex.lock()
            newer = version_in(block[PUBLISHED]) > self._known
            if not newer:
                block[USED] = self.slot
        finally:
            block.mutex.unlock()
        self.busy = newer or self.slot >= 0
        return newer

    def _install(self, receiver: SlotReceiver) -> bool:
        """Install the published version on the fast path; False if the receiver has to (all is repeated then)."""
        started, installer = time.perf_counter(), self._installer
        if installer is None or self.hold or self._staged or receiver.waiting:
            return False
        views = self._views(0)  # the views of all slots are alike
        if views is None or not installer.fits(views):
            return False
        taken = self.take(self._bound)
        views = None if taken is None else self._views(taken[1])
        if taken is None or views is None or not installer.install(views):
            return False  # the receiver meets the same error, and reports it to the sender
        self._installed(receiver, *taken, started)
        return True

    def _views(self, slot: int) -> Any:
        """The views of a slot; None if it has to be mapped, for the first time or again."""
        return self._plans[slot].views if slot < len(self._plans) and self._plans[slot].is_in_place() else None

    def _installed(self, receiver: SlotReceiver, version: int, slot: int, acknowledge: bool, started: float) -> None:
        self.version = version
        if self._bound:
            self.slot = slot
            self.release_previous()
        awaited = not self._bound and self.release()
        announced_at, receiver.announced_at = receiver.announced_at, 0.0
        receiver.version = version
        if awaited:
            send_answer(self._fd, Message(SLOT_FREED, self._worker))
        if acknowledge:
            wait = started - announced_at if announced_at else 0.0
            send_answer(self._fd, Message(ACK, self._worker, version, wait, time.perf_counter() - started))

    def leaving_gate(self) -> None:
        """See ``gate_lock.GateHook``."""
        if self._receiver is None:
            return
        if self._block is None or self._installer is None:
            self._receiver.leaving_gate()
        elif self.release():
            send_answer(self._fd, Message(SLOT_FREED, self._worker))

    def on_readable(self) -> bool:
        """Read and process one message of the connection; False if there will be no more.

        Called by the receiver thread, outside the gate, when the connection is readable.
        """
        receiver, gate_lock = self._receiver, self._gate_lock
        if receiver is None or gate_lock is None:
            return False
        if self._installer is None or take_message(self._fd, UPDATE) is None:
            return receiver.on_readable()
        receiver.announced_at = time.perf_counter()
        gate_lock.pass_through()
        receiver.announced_at = 0.0  # the acting thread may have installed it
        return True
