"""A worker's end of a store: reads the newest version when there is one, outside the gate."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence

import torch

from wsync.checksum import find_damage
from wsync.control.receiver_thread import MessageHandler, receiver_thread
from wsync.deadlines import remaining
from wsync.errors import SyncTimeout, WeightSyncError
from wsync.receiving.events import Event, Published
from wsync.store.files import File
from wsync.store.manifest import Manifest
from wsync.store.versions import VersionStore
from wsync.store.watch import Watch
from wsync.transforms.delta import apply_difference, require_zstandard
from wsync.types import Ack, Update
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer, BufferPool
from wsync.weights.tensor_file import read_entries, read_tensors

_log = logging.getLogger(__name__)


class StoreReceiveChannel:
    """A ``RequestChannel`` that reads a store.

    Versions are read by the receiver thread, which also serves all other models of this process: their messages wait
    while a version is read. ``connect`` and ``pull`` read in the calling thread.

    Args:
        store: where.
        oldest: the oldest version that this worker may use: earlier ones are those of an earlier trainer.
        waits: whether ``connect`` waits for such a version.
        seen: the name of a version that this worker does not begin with; empty for none.
        binds: whether the model may be bound to the memory that a version is read into.
        watches: whether new versions are installed as they appear; otherwise only by ``pull``.
    """

    arena = None

    def __init__(
        self, store: VersionStore, oldest: int, seen: str = "", *, waits: bool = True, binds: bool, watches: bool
    ) -> None:
        self.layout: Layout | None = None
        self.first_version = 0
        self.binds = binds
        self._store = store
        self._oldest = oldest
        self._waits = waits
        self._seen = seen
        self._watches = watches
        self._pool = BufferPool(torch.device("cpu"))
        self._reading = threading.Lock()  # held by the receiver thread, or by a thread in pull()
        self._newest: Manifest | None = None  # the version that was read last
        self._newest_layout: Layout | None = None
        self._base: Buffer | None = None  # its weights, if they are kept for a difference
        self._logged = set[str]()  # errors
        self._lock = threading.Lock()  # guards the next four, which the thread that holds the gate changes as well
        self._closed = False  # nothing is staged any more: the model is about to be ungated, or has been
        self._bound = -1  # the buffer that the model uses
        self._installing_slot = -1  # the buffer of an install that has begun, and may have been interrupted
        self._staged: Update | None = None  # the next to be installed; until it is
        self._watch: Watch | None = None

    def begin_connect(self, worker_idx: int, deadline: float | None) -> Sequence[int]:
        """Refuse: ``connect`` may have to wait for a first version, and there is no sender that announces it."""
        raise ValueError("the older init_on_worker() is not for a store: call init_on_receiver() and connect()")

    def connect(self, worker_idx: int, deadline: float | None) -> None:
        """See ``ReceiveChannel``; waits for a version that this worker may begin with.

        Raises:
            SyncTimeout: there is none yet.
            WeightSyncError: the store cannot be read.
        """
        self._forget()
        pause = 0.005
        while True:
            with self._reading:
                self._read(self._store.newest())
            self.first_version = self.newest_version
            if self._newest is not None or not self._waits:
                return
            left = remaining(deadline)
            if left == 0.0:
                raise SyncTimeout(f"worker {worker_idx}: the store {self._store.url} has no version {self._oldest} yet")
            time.sleep(pause if left is None else min(pause, left))  # before there is a folder, nothing can notify
            pause = min(2 * pause, 0.25)

    def _forget(self) -> None:
        """Read the newest version even if an earlier connection has read it."""
        with self._reading, self._lock:
            self._newest, self.first_version, self._base, self._staged = None, 0, None, None
            self.layout = self._newest_layout = None
            self._bound, self._installing_slot, self._closed = -1, -1, False
            self._logged.clear()
            self._pool.clear()

    def _read(self, newest: Manifest | None) -> None:
        """Stage the newest version, unless it has been read already."""
        if newest is None or not self._usable(newest) or newest.name == self.newest_name:
            return
        if self._newest is not None and newest.version < self.newest_version and self._store.has(self._newest):
            return  # an obsolete trainer's; one that begins again has an empty folder
        if not self._read_difference(newest):
            self._store.read(newest, self._take)

    def _usable(self, manifest: Manifest) -> bool:
        return manifest.version >= self._oldest and manifest.name != self._seen

    def _take(self, manifest: Manifest, file: File) -> None:
        """Stage a version from its file, if it is whole and one that this worker may use: nothing is staged otherwise.

        Raises:
            WeightSyncError: its manifest is damaged.
            ValueError: the file is damaged.
            OSError: it cannot be read.
        """
        if not self._usable(manifest):  # the manifest may have been read again
            return
        layout = self._layout_of(manifest)
        entries = read_entries(file, layout)  # so that no more memory is allocated than the file has bytes
        buffer = self._free_buffer(layout)
        read_tensors(file, layout, buffer.flat, entries)
        damage = find_damage(manifest.version, buffer.flat, b"", manifest.checksum)
        if damage:
            raise ValueError(damage)
        self._stage(manifest, layout, buffer)

    def _read_difference(self, manifest: Manifest) -> bool:
        """Stage a version that is stored as a difference to the one here; False: the full version has to be read."""
        newest, base = self._newest, self._base
        if newest is None or base is None or (newest.version, newest.writer) != (manifest.base, manifest.writer):
            return False
        try:
            require_zstandard()
        except ImportError as error:
            self._warn(f"{error}; full versions of the store {self._store.url} are read")
            return False
        layout = self._layout_of(manifest)
        if layout is not self._newest_layout:  # as it is for a trainer's difference
            return False
        content = self._store.read_difference(manifest, layout.nbytes + 1)
        if content is None:
            return False
        try:
            buffer = self._apply(content, base, manifest, layout)
        except Exception as error:  # noqa: BLE001  also of zstandard, or for want of memory: the full version may do
            self._warn(f"{manifest.delta} in the store {self._store.url}: {error}; the full version is read")
            return False
        self._stage(manifest, layout, buffer)
        return True

    def _apply(self, difference: bytes, base: Buffer, manifest: Manifest, layout: Layout) -> Buffer:
        """Return a buffer with the version.

        Raises:
            ValueError: the difference is damaged; or whatever else ``apply_difference`` raises.
        """
        buffer = self._free_buffer(layout)
        try:
            apply_difference(difference, base.flat, buffer.flat)
            damage = find_damage(manifest.version, buffer.flat, b"", manifest.checksum)
            if damage:
                raise ValueError(damage)
        except BaseException:
            buffer.flat.zero_()  # also between the tensors, which reading a file leaves as it is
            raise
        return buffer

    def _warn(self, message: str) -> None:
        """Log an error, once: a version that cannot be read is tried again and again."""
        if message not in self._logged:
            _log.warning("%s", message)
        self._logged.add(message)

    def _stage(self, manifest: Manifest, layout: Layout, buffer: Buffer) -> None:
        keeps = self.binds or manifest.base > 0  # a bound buffer is kept in any case
        with self._lock:
            if self._closed:
                return
            self._base = buffer if keeps else None
            self._staged = Update(manifest.version, buffer.views, slot=buffer.slot, acknowledge=False)
            self.layout, self._newest_layout = self.layout or layout, layout
            self._newest = manifest  # last: a forward that finds its model too old installs what is staged

    def _free_buffer(self, layout: Layout) -> Buffer:
        with self._lock:
            kept = self._base.slot if self._base else -1
            busy = {self._bound, self._installing_slot, self._staged.slot if self._staged else -1, kept}
        return self._pool.buffer(layout, busy)

    def _layout_of(self, manifest: Manifest) -> Layout:
        try:
            layout = manifest.parse_layout()
        except ValueError as error:
            raise self._store.damaged_manifest(error) from error
        newest = self._newest_layout
        return newest if newest is not None and newest == layout else layout

    def attach(self, handler: MessageHandler) -> None:
        """See ``ReceiveChannel``: begin to watch the store."""
        if not self._watches:
            return
        self._watch = Watch(self._store, self.newest_name)
        self._watch.start()
        receiver_thread().register(handler, self._watch.ready, [self._watch.ready])

    def detach(self, handler: MessageHandler) -> None:
        """See ``ReceiveChannel``. A thread in ``pull``, which may still be reading, stages nothing from here on."""
        receiver_thread().unregister(handler)
        with self._lock:
            self._closed = True

    def receive_event(self) -> Event | None:
        """See ``ReceiveChannel``: read the newest version. After an error it is read again after a pause."""
        assert self._watch is not None, "attach() comes first"
        try:
            os.eventfd_read(self._watch.ready)
        except BlockingIOError:
            return None
        try:
            return self.fetch_newest()
        except WeightSyncError as error:
            self._warn(f"{error}; the model keeps version {self.newest_version}")
            watch = self._watch  # read once: another thread may be in close()
            if watch is not None:
                watch.read_again()
            return None

    def fetch_newest(self) -> Event:
        """See ``ReadsStore``."""
        with self._reading:
            self._read(self._store.newest())
        return Published()

    @property
    def newest_name(self) -> str:
        """The name of the version that was read last; empty for none."""
        return self._newest.name if self._newest else ""

    @property
    def newest_version(self) -> int:
        """See ``RequestChannel``: the newest version that was read."""
        return self._newest.version if self._newest else 0

    def request_newest(self) -> int:
        """See ``RequestChannel``: readers read."""
        return 0

    def sender_has_ended(self) -> bool:
        """See ``ReceiveChannel``."""
        return False

    def poll_update(self) -> Update | None:
        """See ``ReceiveChannel``. The update stays staged until it is installed: a signal handler may raise."""
        with self._lock:
            update = self._staged
            if update is not None:
                self._installing_slot, self.layout = update.slot, self._newest_layout
        return update

    def on_installed(self, update: Update, error: str) -> None:
        """See ``ReceiveChannel``."""
        with self._lock:
            self._installing_slot = -1
            if self._staged is update:
                self._staged = None
            if not error:
                self._bound = update.slot
        if error:
            _log.warning("version %d of the store %s was not installed:\n%s", update.version, self._store.url, error)

    def answer(self, ack: Ack, *, prepared: bool = False) -> None:
        """See ``ReceiveChannel``: the trainer does not wait for answers."""

    def close(self) -> None:
        """See ``ReceiveChannel``."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
