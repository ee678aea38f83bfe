"""A worker's end of a store: reads the newest version when there is one, outside the gate."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsync.control.session import checksum_of
from wsync.deadlines import NOW, remaining
from wsync.errors import LayoutMismatch, SyncTimeout, WeightSyncError
from wsync.gate import process_gate
from wsync.store import tensor_file
from wsync.store.versions import MANIFEST, Manifest, Versions
from wsync.transforms.delta import apply_difference, require_zstandard
from wsync.update import Inbox, Update
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer, BufferPool

if TYPE_CHECKING:
    from wsync.receiver import Receiver

_log = logging.getLogger(__name__)
_SHORTEST_RETRY, _LONGEST_RETRY = 0.02, 60.0  # seconds between two readings of a version that cannot be read
_SHORTEST_LOOK, _LONGEST_LOOK = 0.02, 1.0  # seconds between two looks for a newer one
_STEP = 5  # milliseconds until watchfiles reports a change
_CLOSING = 2.0  # seconds that ``close`` waits for the thread, which may be reading


class Reader:
    """Reads the newest version of a store, each once. Any thread may call.

    Args:
        store: where.
        oldest: the oldest version that may be used: earlier ones are those of an earlier trainer.
        seen: the name of a version that is not read; empty for none.
        keeps: whether the memory of a version is kept for a difference to it, as it is in use anyway.

    Attributes:
        stop: ends every wait.
    """

    def __init__(self, store: Versions, oldest: int = 1, seen: str = "", *, keeps: bool = True) -> None:
        self.store = store
        self.oldest = oldest
        self._seen = seen
        self.keeps = keeps
        self.stop = threading.Event()
        self._pool = BufferPool()
        self._lock = threading.Lock()  # guards what follows, and reading takes long
        self._manifest: Manifest | None = None  # of the newest version that was read
        self._layout: Layout | None = None
        self._base: Buffer | None = None  # its weights, if they are kept for a difference

    @property
    def newest(self) -> int:
        """The newest version that was read; 0 for none."""
        return self._manifest.version if self._manifest else 0

    @property
    def name(self) -> str:
        """The name of the newest version that was read, which no other version has; empty for none."""
        return self._manifest.name if self._manifest else ""

    @property
    def writer(self) -> str:
        """The trainer that has written it."""
        return self._manifest.writer if self._manifest else ""

    def read(self, newest: Manifest | None) -> Update | None:
        """Return the newest version; None: it was read already, or is not to be used. WeightSyncError: it is bad."""
        with self._lock:
            missing = ""
            while newest is not None and newest.version >= self.oldest and newest.name not in (self._seen, self.name):
                if self._manifest is not None and newest.version < self.newest and self.store.has(self._manifest):
                    return None  # an obsolete trainer's; one that begins again has an empty folder
                named = f"version {newest.version} of the store {self.store.url} cannot be read: {newest.file}"
                if newest.file == missing:
                    raise WeightSyncError(f"{named}: the file is missing, and {MANIFEST} names it")
                try:
                    return self._read_difference(newest) or self._read_whole(newest)
                except FileNotFoundError:  # deleted, because newer versions have been published
                    missing, newest = newest.file, self.store.newest()
                except WeightSyncError:
                    raise
                except Exception as error:
                    raise WeightSyncError(f"{named}: {self.store.folder.explain(error)}") from error
            return None

    def wait(self, deadline: float | None) -> Update | None:
        """Return the newest version, as soon as there is one; None at the deadline, if one was read, or at ``stop``."""
        pause = _SHORTEST_LOOK
        while True:
            update, left = self.read(self.store.newest()), remaining(deadline)
            if self.newest or left == 0.0 or self.stop.is_set():
                return update
            self.stop.wait(pause if left is None else min(pause, left))  # before there is a folder, nothing notifies
            pause = min(2 * pause, 0.25)

    def _read_whole(self, manifest: Manifest) -> Update:
        layout = self._layout_of(manifest)
        with self.store.folder.open(manifest.file) as file:
            names = tensor_file.read(file, layout)  # so that no more memory is allocated than the file has bytes
            buffer = self._pool.reserve(layout)
            tensor_file.read_tensors(file, names, layout, buffer.views)
        return self._accept(manifest, buffer)

    def _read_difference(self, manifest: Manifest) -> Update | None:
        """Read a version that is stored as a difference to the one here; None: the whole version has to be read."""
        newest, base = self._manifest, self._base
        if newest is None or base is None or (newest.version, newest.writer) != (manifest.base, manifest.writer):
            return None
        layout = self._layout_of(manifest)
        if layout is not base.layout:  # as it is for a trainer's difference
            return None
        buffer = self._pool.reserve(layout)
        try:
            require_zstandard()
            content = self.store.folder.content(manifest.delta, layout.nbytes + 1)
            apply_difference(base.memory, content, buffer.memory)
            return self._accept(manifest, buffer)
        except Exception as error:  # noqa: BLE001  of any library: the whole version may do
            buffer.flat.zero_()  # also between the tensors, which reading a file leaves as it is
            text = self.store.folder.explain(error)
            _log.warning("%s in the store %s: %s; the full version is read", manifest.delta, self.store.url, text)
            return None

    def _layout_of(self, manifest: Manifest) -> Layout:
        """Return the layout of a version: the same object as before, if it is the same."""
        try:
            layout = Layout.decode(manifest.layout)
            tensor_file.require_storable(layout)
        except Exception as error:  # whatever decoding raises: any process may have written it
            raise self.store.damaged(ValueError(f"{error} - at `$.layout`")) from error
        return self._layout if self._layout is not None and self._layout == layout else layout

    def _accept(self, manifest: Manifest, buffer: Buffer) -> Update:
        """Make a version that was read into ``buffer`` the newest one; ValueError: it is damaged."""
        checksum = checksum_of(buffer.memory, b"")
        if checksum != int(manifest.checksum, 16):
            raise ValueError(f"it is corrupt: its checksum is {checksum:016x}, not {manifest.checksum}")
        self._base = buffer if self.keeps or manifest.base else None
        self._layout, self._manifest = buffer.layout, manifest
        return Update(manifest.version, buffer, b"", checksum, manifest.requires, acknowledge=False)


class FileInbox(Inbox):
    """An ``Inbox`` that reads a store.

    A thread reads each version as it appears, if it ``watches``. ``connect`` and ``fetch`` read in the calling thread.
    A version that was read is staged until it is installed, or a newer one takes its place.
    """

    binds = True

    def __init__(self, reader: Reader, owner: Receiver, *, waits: bool = True, watches: bool = True) -> None:
        self._reader = reader
        self._owner = owner
        self._waits = waits
        self._watches = watches
        self._staged: Update | None = None
        self._used: Layout | None = None  # the layout that the owner uses
        owner.inbox = self
        self._thread: threading.Thread | None = None

    @property
    def newest(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The newest version that was read; 0 for none."""
        return self._reader.newest

    def connect(self, worker_idx: int, deadline: float | None) -> int:
        """Wait for a version that this worker may begin with, if it ``waits``; begin to watch.

        Raises:
            SyncTimeout: there is none yet.
            LayoutMismatch: it does not fit the model.
            WeightSyncError: the store cannot be read.
        """
        old, self._used, self._owner.inbox = self._reader, None, self
        self._reader = Reader(old.store, old.oldest, keeps=old.keeps)  # also what an earlier connection has read
        self.fetch(deadline if self._waits else NOW)
        if self._staged is not None:
            process_gate().call_without_forward(self._owner.set_layout, self._staged.buffer.layout)
        elif self._waits:
            url, oldest = self._reader.store.url, self._reader.oldest
            raise SyncTimeout(f"worker {worker_idx}: the store {url} has no version {oldest} yet")
        if self._watches:
            self._thread = threading.Thread(target=self._watch, args=[self._reader], name="wsync-store", daemon=True)
            self._thread.start()
        return self.newest

    def fetch(self, deadline: float | None) -> None:
        """Read the newest version in the calling thread, waiting for a first one; WeightSyncError: it is damaged."""
        self._stage(self._reader.wait(deadline))

    def _stage(self, update: Update | None) -> bool:
        """Stage what was read, if that is anything; not after ``close``, as the model is not gated any more."""
        if update is None or self._reader.stop.is_set():
            return False
        self._owner.sender, self._staged = self._reader.writer, update
        return True

    def _watch(self, reader: Reader) -> None:
        """Read each version as it appears; read one that cannot be read again, after growing pauses."""
        store, stop = reader.store, reader.stop
        notify, look = _notifier(store.folder.local), _SHORTEST_LOOK
        failed, retry_at, pause, logged = "", 0.0, _SHORTEST_RETRY, set[str]()
        while not stop.is_set():
            found, name = False, ""
            try:
                newest = store.newest()
                name = newest.name if newest is not None else ""
                if name != failed or remaining(retry_at) == 0.0:
                    found, failed = self._stage(reader.read(newest)), ""
            except WeightSyncError as error:
                if str(error) not in logged:
                    _log.warning("%s; the model keeps version %d", error, self.newest)
                logged.add(str(error))
                pause = min(2 * pause, _LONGEST_RETRY) if name == failed else _SHORTEST_RETRY
                failed, retry_at = name, time.monotonic() + pause
            if found:
                self._owner.settle()
            look = _SHORTEST_LOOK if found else min(2 * look, _LONGEST_LOOK)
            if notify is None:
                stop.wait(look)
            else:
                notify.watch(_STEP, _STEP, int(1000 * _LONGEST_LOOK), stop)
        if notify is not None:
            notify.close()

    # --- called by the receiver ---

    def use(self, layout: Layout, target: object) -> None:
        """Take note that the owner uses a layout."""
        self._used = layout

    def poll(self) -> Sequence[Update]:
        """Return the version that is staged; a trainer that has begun anew may have another layout."""
        update = self._staged
        if update is None:
            return ()
        if update.buffer.layout is not self._used:
            try:
                self._owner.set_layout(update.buffer.layout)
            except LayoutMismatch as error:
                update.damage = f"LayoutMismatch: {error}"
        return (update,)

    def settled(self, update: Update, error: str) -> None:
        """Forget a version that was installed; log why it was not. The trainer is not told."""
        if self._staged is update:
            self._staged = None
        if error:
            url = self._reader.store.url
            _log.warning("version %d of the store %s was not installed:\n%s", update.version, url, error)

    def close(self) -> None:
        """End the thread; from here on nothing is staged, although it may still be reading."""
        self._reader.stop.set()
        self._staged, thread, self._thread = None, self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSING)


def _notifier(folder: Path | None) -> Any:
    """Return what reports changes in a local folder; None elsewhere, where one looks again and again."""
    if folder is not None and folder.is_dir():
        with suppress(ModuleNotFoundError):  # of the extra ``store``
            from watchfiles._rust_notify import RustNotify  # documented; ``watchfiles.watch`` would begin later

            return RustNotify([str(folder)], False, False, 0, False, False)
    return None
