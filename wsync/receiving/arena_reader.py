"""A worker's updates from the arena: it binds its model to a slot, or copies the weights out.

Called by the channel and the ``ModelUpdater``. ``on_prepare`` and ``set_layout`` are called outside the gate, by
the thread that connects and then by the receiver thread, while the acting thread may poll.
"""

from __future__ import annotations

import logging
from contextlib import suppress

import torch

from wsync.control import Connection, Kind, Message
from wsync.control.messages import unpack_exactly
from wsync.errors import NotConnected, WeightSyncError
from wsync.gate import process_gate
from wsync.loops import Installer, WorkerSlot
from wsync.loops.words import NONE
from wsync.loops.worker_slot import SlotUpdater
from wsync.receiving.events import Prepare
from wsync.receiving.prepared_updates import updates_by_transaction
from wsync.shm.arena import PREPARE_PAYLOAD, WorkerArena
from wsync.shm.registered import RegisteredView
from wsync.types import Update
from wsync.weights.binding import Binding
from wsync.weights.layout import Layout

_log = logging.getLogger(__name__)


class ArenaReader:
    """The updates of one worker from the arena.

    Args:
        arena: mapped here; owned by this object.
        connection: the connection to the sender.
        worker: the worker's index.
        connection_number: see ``SenderSettings``.
        binds: whether the model stays bound to its slot; otherwise it copies.
    """

    def __init__(
        self, arena: WorkerArena, connection: Connection, worker: int, connection_number: int, *, binds: bool
    ) -> None:
        self._arena = arena
        self._connection = connection
        self._worker = worker
        self._connection_number = connection_number
        self.binds = binds
        self._slot = WorkerSlot()
        self._has_layout = False
        self._checksum = False
        self._checked = 0  # the newest version with a checksum that was right
        self._installer: Installer | None = None  # of the fast path
        self._wakeups = True
        self._updater: SlotUpdater | None = None
        self._registered: RegisteredView | None = None
        self._torn = ""  # why the model may have weights of two versions; empty if it has one

    def set_layout(self, layout: Layout, checksum: bool | None, *, delta: bool) -> None:
        """Use this layout from now on; ``checksum`` as in ``SenderSettings``, ``delta`` is for transports."""
        self._arena.set_layout(layout)
        self._arena.map_all()
        self._checksum = checksum is True
        self._slot.map_words(self._arena.words, self._worker, self._connection_number)
        self._slot.hold = self.binds and self._checksum
        self._slot.set_wakeups(self._wakeups)
        self._has_layout = True  # last: an acting thread that reads it uses all of the above

    def handler_for(self, updater: SlotUpdater) -> WorkerSlot:
        """Return the object that the gate and the receiver thread call in place of ``updater``.

        It takes the fast path, and calls ``updater`` for the rest. Called once, outside the gate, by the thread that
        connects.
        """
        self._updater = updater
        self._slot.set_updater(updater, process_gate().gate_state)
        return self._slot

    def enable_fast_path(self, binding: Binding) -> None:
        """Let the ``WorkerSlot`` install the next update itself, unless updates have a checksum or may be refused.

        Called after each installed update, inside the gate, by the thread that has installed it.
        """
        connection = self._connection
        if binding.installer is self._installer or not self._has_layout or connection.busy:
            return
        self._installer = binding.installer
        self._slot.disable_fast_path()
        if not self._checksum and not self._slot.hold:
            self._slot.install_fast_path(
                binding.installer,
                self._arena.plans,
                updates_by_transaction,
                connection.fileno(),
                self.binds,
                self._arena.num_workers,
            )

    def on_sent(self) -> None:
        """Disable the fast path while a background thread sends: the fast path writes to the same socket.

        Called after each message, by the thread that has sent it.
        """
        if self._connection.busy:
            self._stop_fast_path()

    def _stop_fast_path(self) -> None:
        self._installer = None
        self._slot.disable_fast_path()

    def on_prepare(self, version: int, payload: bytes) -> Prepare:
        """Process a ``PREPARE`` message; return its event."""
        transaction, slot = unpack_exactly(PREPARE_PAYLOAD, payload)
        return Prepare(transaction, self._update(version, slot, acknowledge=True))

    def _update(self, version: int, slot: int, acknowledge: bool) -> Update:
        if not self._has_layout:
            raise ValueError("an update before its layout")
        try:
            views, extra = self._arena.views(slot), self._arena.read_extra(slot)
        except (OSError, RuntimeError) as error:  # no descriptor, memory or thread is left to map the slot
            return Update(version, (), b"", slot, acknowledge, f"version {version} could not be mapped: {error}")
        if self._checksum and version != self._checked:
            damage = self._arena.find_damage(version, slot, extra)
            if damage:
                return Update(version, views, extra, slot, acknowledge, damage)
            self._checked = version  # once is enough for a version that is prepared, then committed
        return Update(version, views, extra, slot, acknowledge)

    def set_wakeups(self, wanted: bool) -> None:
        """Set whether the sender must wake this worker for an update without acknowledgement. Called by any thread."""
        self._wakeups = wanted
        if self._has_layout:
            self._slot.set_wakeups(wanted)

    def hold_between_forwards(self) -> None:
        """Keep the model's slot between forwards too, until the next successful install.

        So a failed install can be undone. Called once, when the layout is known.
        """
        self._slot.hold = self.binds

    def poll_update(self) -> Update | None:
        """See ``ReceiveChannel``.

        Raises:
            WeightSyncError: a forward would use weights of two versions. See ``_copy_out``.
        """
        taken = self._slot.take() if self._has_layout else None
        if taken is not None:
            return self._update(*taken)
        if self._slot.disconnected:
            self._copy_out("the sender has disconnected this worker")
        self._require_untorn()
        return None

    @property
    def newest_version(self) -> int:
        """The version that the sender has published for this worker; 0 for none."""
        return self._arena.published_version(self._worker) if self._has_layout else 0

    def on_installed(self, update: Update, error: str) -> None:
        """See ``ReceiveChannel``: record the slot that the model is bound to."""
        if not error:
            self._slot.version = update.version
            self._torn, self._slot.torn = "", False
            if self.binds:
                self._slot.bound_slot = update.slot
        else:
            self._slot.failed_version = update.version
            self._stop_fast_path()  # the updater must see the next install, to allow forwards again
            if self.binds and not self._slot.hold:
                self._copy_out(f"version {update.version} could not be installed")
        if not self.binds:  # copied: the slot is free
            self._release()

    def unbind(self) -> None:
        """Record that the model has memory of its own until the next install. Called inside the gate."""
        if self._registered is None:  # else its next forward may bind it to the registered weights again
            self._slot.bound_slot = NONE

    def leaving_gate(self) -> None:
        """Release the slot that the forward used. Idempotent. Called inside the gate.

        Raises:
            WeightSyncError: the forward may have used weights of two versions. See ``_copy_out``.
        """
        self._release()
        if self._slot.disconnected:
            self._copy_out("the sender has disconnected this worker")
        self._require_untorn()

    def _release(self) -> None:
        if self._slot.release():
            with suppress(ConnectionError):  # the sender is gone, which the receiver thread will notice
                self._connection.send(Message(Kind.SLOT_FREED, self._worker))
            self.on_sent()

    # --- without protection: see ``shm/arena.py`` ---

    def _copy_out(self, cause: str) -> None:
        """Copy the model to memory of its own, and find out whether it has one version: the sender may write its slot.

        Nothing is done if the model has memory of its own already. Called inside the gate.
        """
        slot, registered = self._slot, self._registered
        number = slot.bound_slot if self.binds else slot.used
        if number == NONE or self._updater is None:
            return
        if registered is not None and registered.version == slot.version and not slot.disconnected:
            return  # it is bound to the registered weights, or will be before its next forward
        # What this forward or the install before it has read, and what the copy reads: a fork may have copied the model
        # out of the slot, and its next forward have bound it to the registered weights.
        from_slot = number == slot.used or self._updater.is_bound_to(self._arena.views(number))
        from_registered = registered is not None and self._updater.is_bound_to(registered.tensors.values())
        try:
            with torch.inference_mode(False):  # inference tensors could not be used by autograd later
                self._updater.copy_to_own_memory(stay_unbound=True)
        finally:  # also after a signal handler has raised. The copy is whole if its source was not written since.
            versions = [self._arena.slot_version(number)] if from_slot else []
            if from_registered and registered is not None:
                versions.append(registered.version)
            if any(version != slot.version for version in versions):
                self._refuse_forwards(cause)
        slot.bound_slot = slot.used = NONE

    def _refuse_forwards(self, cause: str) -> None:
        slot = self._slot
        self._torn = (
            f"worker {self._worker}: {cause}, and the memory of version {slot.version}, which the model had, has been "
            "written since: the model may have weights of two versions"
        )
        _log.error("%s", self._torn)
        slot.torn = True
        self._stop_fast_path()  # so that ``leaving_gate`` is called

    def _require_untorn(self) -> None:
        if self._torn and self._updater is not None and self._updater.in_forward:
            self.require_one_version()

    def require_one_version(self) -> None:
        """Raise an error if the model may have weights of two versions. Called inside the gate."""
        if self._torn:
            raise (NotConnected if self._slot.disconnected else WeightSyncError)(self._torn)

    def registered_weights(self) -> RegisteredView | None:
        """Return the registered weights, to which the model stays bound; None if there are none."""
        self._registered = RegisteredView.of(self._arena) if self.binds else None
        return self._registered

    def close(self) -> None:
        """Release everything. Idempotent."""
        self._slot.close()
        self._arena.close()
