"""A worker's part of an arena's words: taking the published slot before a forward, and releasing it afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

from wsync.loops.gate_state import GateHook, GateState
from wsync.loops.installer import Installer
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


class SlotUpdater(GateHook, Protocol):
    """A ``ModelUpdater``, which installs the updates that the fast path of its ``WorkerSlot`` does not.

    Attributes:
        version: the version that is installed in the model.
        announced_at: when the message about the update that is being installed arrived, on ``time.perf_counter``; 0.0
            if there was none.
        waiting: one object for each call of ``receive`` that waits; installing an update has to wake its thread.
    """

    version: int
    announced_at: float
    waiting: set[object]

    @property
    def in_forward(self) -> bool:
        """Whether the gate was entered for a forward that may use the model. Read inside the gate."""
        ...

    def require_one_version(self) -> None:
        """Raise WeightSyncError if the model may have weights of two versions. Called inside the gate."""
        ...

    def on_readable(self) -> bool:
        """See ``WorkerSlot.on_readable``."""
        ...

    def copy_to_own_memory(self, stay_unbound: bool = False) -> None:
        """See ``ModelUpdater``."""
        ...

    def is_bound_to(self, tensors: Iterable[Tensor]) -> bool:
        """Whether a parameter of the model uses the memory of one of ``tensors``. Called inside the gate."""
        ...


class WorkerSlot:
    """The slot of an arena that one worker uses. The gate and the receiver thread call it in place of the updater.

    Most methods are called inside the gate, by the acting thread (which runs the model's forward) or the receiver
    thread. Outside it are called: ``set_updater``, by the thread that connects, before the gate has this object;
    ``map_words``, by that thread or the receiver thread; ``on_readable``, by the receiver thread; ``set_wakeups`` and
    ``disable_fast_path``, by any thread; ``close``, by the thread that shuts down, after the gate has lost this object.

    A worker's words go to its replacement when the sender disconnects it. It may be alive then. So every method looks
    for the number of its connection, with the mutex locked, before it stores a word. If there is another number, the
    words stay as they are, and ``disconnected`` is set.

    A signal handler may raise in any method in Python. So ``busy`` is set before the words are, and the mutex is
    unlocked in a ``finally`` that begins before it is locked: see ``mutex.py``.

    Attributes:
        version: the version that is installed in the model.
        bound_slot: the slot that the model is bound to; -1 if the model has memory of its own.
        used: the slot in the worker's ``USED_SLOT``, as last stored here; -1 after a release. It keeps its value if the
            worker is disconnected first, so that ``ArenaReader`` can check that slot.
        failed_version: the newest version that could not be installed.
        hold: whether the model's slot is kept between forwards as well, so that a failed install can roll back.
        busy: whether a slot is in use.
        disconnected: whether the words have been found to belong to another connection.
        torn: whether the model may have weights of two versions: the updater then refuses each forward.
    """

    def __init__(self) -> None:
        self.version = 0
        self.bound_slot = NONE
        self.used = NONE
        self.failed_version = 0
        self.hold = False
        self.busy = False
        self.disconnected = False
        self.torn = False
        self._block: Block | None = None
        self._connection = 0
        self._updater: SlotUpdater | None = None

    def set_updater(self, updater: SlotUpdater, gate_state: GateState, /) -> None:
        """Set the updater, for updates outside the fast path, and the gate. Called once, before ``poll_update``."""
        self._updater = updater

    def map_words(self, words: memoryview, worker: int, connection: int, /) -> None:
        """Set the words of the arena.

        Args:
            words: the words of the arena.
            worker: the worker's index.
            connection: the number that the sender has given to the worker's connection.

        Raises:
            ValueError: ``words`` are too few.
        """
        self._connection = connection
        self._block = Block(words, worker)

    def close(self) -> None:
        """Drop all references. ``poll_update``, ``leaving_gate`` and ``on_readable`` do nothing from then on."""
        self._updater = self._block = None

    def install_fast_path(
        self,
        installer: Installer,
        plans: list[PackPlan],
        prepared: dict[int, Any],
        fd: int,
        bound: bool,
        num_workers: int,
        /,
    ) -> None:
        """Allow this object to install updates without the updater from now on, except while ``hold`` is set.

        The compiled class does that, and releases the slot after a forward by itself. This one does not.

        Args:
            installer: installs in the model.
            plans: the plans of the slots that are mapped here, for their views; new ones are appended.
            prepared: the prepared transactions of this process; while there are any, the updater installs all updates.
            fd: the descriptor of the connection's socket, for answers.
            bound: whether the model stays bound to slots; otherwise it copies.
            num_workers: the arena's number of workers. The updater installs updates with extra state.
        """

    def disable_fast_path(self) -> None:
        """The updater installs all updates from now on."""

    # --- the words ---

    def _mapped(self) -> Block:
        if self._block is None:
            raise RuntimeError("map_words() comes first")
        return self._block

    def take(self) -> tuple[int, int, bool] | None:
        """Start to use the published slot if its version is new here, else the slot that the model is bound to.

        Returns:
            ``(version, slot, acknowledge)`` of a new version; None if there is none, or the worker is disconnected.
        """
        block = self._mapped()
        word, slot, newer = 0, self.bound_slot, False
        self.busy = True
        try:
            block.mutex.lock()
            if block[CONNECTION] == self._connection:
                word = block[PUBLISHED]
                newer = version_in(word) > max(self.version, self.failed_version)
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
        if not (self.busy or self.hold):  # a slot that is held is not busy between forwards, but may have been lost
            return False
        block = self._mapped()
        wanted = 0
        try:
            block.mutex.lock()
            if block[CONNECTION] == self._connection:
                block[HELD_SLOT] = self.bound_slot if self.hold else NONE  # before the next store: see take()
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
        """See ``gate_state.GateHook``. Most calls find nothing new."""
        return self._updater is not None and self._updater.poll_update()

    def leaving_gate(self) -> None:
        """See ``gate_state.GateHook``."""
        if self._updater is not None:
            self._updater.leaving_gate()

    def on_readable(self) -> bool:
        """Read and process one message of the connection; False if there will be no more."""
        return self._updater is not None and self._updater.on_readable()
