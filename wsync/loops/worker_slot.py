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
    CONNECTION,
    HELD_SLOT,
    NONE,
    PUBLISHED,
    USED_SLOT,
    WANTS_FREED,
    WANTS_WAKEUPS,
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

    def copy_to_own_memory(self, stay_unbound: bool = False) -> None:
        """See ``Receiver``."""
        ...


class WorkerSlot:
    """The slot of an arena that one worker uses. The gate and the receiver thread call it in place of the receiver.

    Most methods are called inside the gate, by the acting thread (which runs the model's forward) or the receiver
    thread. Outside it are called: ``set_receiver``, by the thread that connects, before the gate has this object;
    ``map_words``, by that thread or the receiver thread; ``on_readable``, by the receiver thread; ``set_wakeups`` and
    ``disable_fast_path``, by any thread; ``close``, by the thread that shuts down, after the gate has lost this object.

    A worker's words go to its replacement when the sender disconnects it. It may be alive then. So every method looks
    for the number of its connection, with the mutex locked, before it stores a word. If there is another number, the
    words stay as they are, and ``disconnected`` is set.

    A signal handler may raise in any method in Python. So ``busy`` is set before the words are, and the mutex is
    unlocked in a ``finally`` that begins before it is locked: see ``mutex.py``.

    Attributes:
        version: the version that is installed in the model.
        slot: the slot that the model is bound to; -1 if the model has memory of its own.
        used: the slot in the worker's ``USED_SLOT``, as last stored here; -1 once it was released in time, that is,
            before the worker was disconnected.
        refused: the newest version that could not be installed.
        hold: whether the model's slot is kept between forwards as well, so that a failed install can roll back.
        busy: whether a slot is in use.
        disconnected: whether the words have been found to belong to another connection.
    """

    def __init__(self) -> None:
        self.version = 0
        self.slot = NONE
        self.used = NONE
        self.refused = 0
        self.hold = False
        self.busy = False
        self.disconnected = False
        self._block: Block | None = None
        self._connection = self._worker = 0
        self._receiver: SlotReceiver | None = None
        self._gate_lock: GateLock | None = None
        self._installer: Installer | None = None
        self._plans: list[PackPlan] = []
        self._prepared: Mapping[int, Any] = {}
        self._fd = -1
        self._bound = False

    def set_receiver(self, receiver: SlotReceiver, gate_lock: GateLock, /) -> None:
        """Set the receiver, for updates outside the fast path, and the gate. Called once, before ``poll_update``."""
        self._receiver = receiver
        self._gate_lock = gate_lock

    def map_words(self, words: memoryview, worker: int, connection: int, /) -> None:
        """Set the words of the arena. Until then the receiver does everything.

        Args:
            words: of the arena.
            worker: the worker's index.
            connection: the number that the sender has given to the worker's connection.

        Raises:
            ValueError: ``words`` are too few.
        """
        self._worker, self._connection = worker, connection
        self._block = Block(words, worker)

    def close(self) -> None:
        """Drop all references. ``poll_update``, ``leaving_gate`` and ``on_readable`` do nothing from then on."""
        self._receiver = self._gate_lock = self._block = None
        self.disable_fast_path()

    def install_fast_path(
        self, installer: Installer, plans: list[PackPlan], prepared: dict[int, Any], fd: int, bound: bool, /
    ) -> None:
        """Install updates without the receiver from now on, except while ``hold`` is set.

        Args:
            installer: installs in the model.
            plans: of the slots that are mapped here, for their views; new ones are appended.
            prepared: the prepared transactions of this process; while there are any, the receiver installs all updates.
            fd: of the connection's socket, for answers.
            bound: whether the model stays bound to slots; otherwise it copies.
        """
        self._plans, self._prepared = plans, prepared
        self._fd, self._bound = fd, bound
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
    def _tried(self) -> int:
        """The newest version that was installed, or could not be."""
        return max(self.version, self.refused)

    def take(self) -> tuple[int, int, bool] | None:
        """Start to use the published slot if its version is new here, else the slot that the model is bound to.

        Returns:
            ``(version, slot, acknowledge)`` of a new version; None if there is none, or the worker is disconnected.
        """
        block = self._mapped()
        word, slot, newer = 0, self.slot, False
        self.busy = True
        try:
            block.mutex.lock()
            if block[CONNECTION] == self._connection:
                word = block[PUBLISHED]
                newer = version_in(word) > self._tried
                # The sender reads PUBLISHED, then USED_SLOT, then HELD_SLOT, without the mutex. A slot that is needed
                # must be in one of them at any moment. So the word that will protect it is stored before the word that
                # protects it now is changed.
                if newer and self.hold:
                    block[HELD_SLOT] = slot
                if newer:
                    slot = slot_in(word)
                block[USED_SLOT] = self.used = slot
            else:
                self.disconnected = True
        finally:
            block.mutex.unlock()
        self.busy = slot >= 0
        return (version_in(word), slot, bool(word & 1)) if newer else None

    def release(self) -> bool:
        """Stop using slots; return whether the sender waits for a message about it. Idempotent."""
        if not self.busy:
            return False
        block = self._mapped()
        wanted = 0
        try:
            block.mutex.lock()
            if block[CONNECTION] == self._connection:
                block[HELD_SLOT] = self.slot if self.hold else NONE  # before the next store: see take()
                block[USED_SLOT] = self.used = NONE
                wanted = block[WANTS_FREED]
                block[WANTS_FREED] = 0
            else:
                self.disconnected = True
        finally:
            block.mutex.unlock()
        self.busy = False
        return bool(wanted)

    def set_wakeups(self, wanted: bool, /) -> None:
        """Set whether the sender must wake this worker for an update that it need not acknowledge."""
        block = self._mapped()
        try:
            block.mutex.lock()
            if block[CONNECTION] == self._connection:
                block[WANTS_WAKEUPS] = wanted
            else:
                self.disconnected = True
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
        if self._use_current_slot(self._block) or self._install(receiver):
            return False
        return receiver.poll_update()

    def _use_current_slot(self, block: Block) -> bool:
        """Record the model's slot as used, and return True; False if there is a new version, or no connection."""
        current = False
        self.busy = True
        try:
            block.mutex.lock()
            if block[CONNECTION] != self._connection:
                self.disconnected = True
            elif version_in(block[PUBLISHED]) <= self._tried:
                block[USED_SLOT] = self.used = self.slot
                current = True
        finally:
            block.mutex.unlock()
        self.busy = not current or self.slot >= 0
        return current

    def _install(self, receiver: SlotReceiver) -> bool:
        """Install the published version on the fast path. If False, the caller has the receiver start over."""
        started, installer = time.perf_counter(), self._installer
        if installer is None or self.hold or self._prepared or receiver.waiting:
            return False
        views = self._views(0)  # the views of all slots are alike
        if views is None or not installer.fits(views):
            return False
        taken = self.take()
        views = None if taken is None else self._views(taken[1])
        if taken is None or views is None or not installer.install(views):
            return False  # the receiver meets the same error, and reports it to the sender
        self._installed(receiver, *taken, started)
        return not self.disconnected

    def _views(self, slot: int) -> Any:
        """The views of a slot; None if it has to be mapped, for the first time or again."""
        return self._plans[slot].views if slot < len(self._plans) and self._plans[slot].is_in_place() else None

    def _installed(self, receiver: SlotReceiver, version: int, slot: int, acknowledge: bool, started: float) -> None:
        self.version = version
        if self._bound:
            self.slot = slot
        freed = not self._bound and self.release()
        announced_at, receiver.announced_at = receiver.announced_at, 0.0
        receiver.version = version
        if freed:
            send_answer(self._fd, Message(SLOT_FREED, self._worker))
        if acknowledge:
            wait = started - announced_at if announced_at else 0.0
            send_answer(self._fd, Message(ACK, self._worker, version, wait, time.perf_counter() - started))

    def leaving_gate(self) -> None:
        """See ``gate_lock.GateHook``."""
        receiver = self._receiver
        if receiver is None:
            return
        if self._block is None or self._installer is None:
            receiver.leaving_gate()
            return
        if self.release():
            send_answer(self._fd, Message(SLOT_FREED, self._worker))
        if self.disconnected:
            receiver.leaving_gate()

    def on_readable(self) -> bool:
        """Read and process one message of the connection; False if there will be no more."""
        receiver, gate_lock = self._receiver, self._gate_lock
        if receiver is None or gate_lock is None:
            return False
        if self._installer is None or take_message(self._fd, UPDATE) is None:
            return receiver.on_readable()
        receiver.announced_at = time.perf_counter()
        gate_lock.pass_through()
        receiver.announced_at = 0.0  # the acting thread may have installed it
        return True
