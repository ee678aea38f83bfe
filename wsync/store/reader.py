"""A worker's end of a store: reads the newest version when there is one, outside the gate."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from wsync.control.session import checksum_of
from wsync.deadlines import NOW, remaining
from wsync.errors import LayoutMismatch, SyncTimeout, WeightSyncError
from wsync.gate import process_gate
from wsync.store.files import MANIFEST, Manifest, Store
from wsync.transforms import apply_difference, require_zstandard
from wsync.update import Inbox, Update
from wsync.weights.layout import ALIGNMENT, Buffer, BufferPool, Layout
from wsync.weights.tensors import raw_bytes

if TYPE_CHECKING:
    from wsync.receiver import Receiver

_log = logging.getLogger(__name__)
_SHORTEST_LOOK, _LONGEST_LOOK = 0.02, 1.0  # seconds between two looks for a newer version
_RETRY = 2.0  # seconds between two readings of a version that cannot be read
_STEP = 5  # milliseconds until watchfiles reports a change
_CLOSING = 2.0  # seconds that ``close`` waits for the thread, which may be reading


class Reader:
    """Reads the newest version of a store, each once. Any thread may call.

    Attributes:
        oldest: the oldest version that may be used.
        newest: the newest version that was read, by the trainer ``writer``; 0 for none.
        stop: ends every wait.
    """

    def __init__(self, store: Store, oldest: int = 1) -> None:
        self.store, self.oldest = store, oldest
        self.newest, self.writer = 0, ""
        self.stop = threading.Event()
        self._pool = BufferPool()
        self._lock = threading.Lock()  # guards the two above and what follows, and reading takes long
        self._layout: Layout | None = None
        self._base: Buffer | None = None  # the newest weights, if the trainer stores differences

    def read(self, manifest: Manifest | None) -> Update | None:
        """Return the newest version; None: it was read already, or is not to be used. WeightSyncError: it is bad."""
        with self._lock:
            missing = ""
            while manifest is not None and manifest.version >= max(self.oldest, self.newest + 1):
                layout = self._layout_of(manifest)
                named = f"version {manifest.version} of the store {self.store.url} cannot be read: {manifest.file}"
                with self.store.explaining(named):
                    if manifest.file == missing:
                        raise ValueError(f"the file is missing, and {MANIFEST} names it")
                    with suppress(FileNotFoundError):  # deleted, because newer versions have been published
                        return self._read_difference(manifest, layout) or self._read_whole(manifest, layout)
                missing, manifest = manifest.file, self.store.newest()
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

    def _layout_of(self, manifest: Manifest) -> Layout:
        """Return the layout of a version: the same object as before, if it is the same."""
        with self.store.explaining(f"the manifest {MANIFEST} of the store {self.store.url} is damaged: its layout"):
            layout = Layout.decode(manifest.layout)
            used = sum(-(-layout.byte_ranges[index][1] // ALIGNMENT) * ALIGNMENT for index in layout.leaders)
            if layout.extra or layout.nbytes > max(used, ALIGNMENT):  # no more memory than the tensors take
                raise ValueError(f"it has {layout.nbytes} bytes for {used}, or extra state")
        return self._layout if self._layout is not None and self._layout == layout else layout

    def _read_whole(self, manifest: Manifest, layout: Layout) -> Update:
        with self.store.open(manifest.file) as file:
            return self._accept(manifest, read_tensors(file, layout, self._pool.reserve))

    def _read_difference(self, manifest: Manifest, layout: Layout) -> Update | None:
        """Read a version that is stored as a difference to the one here; None: the whole version has to be read."""
        base = self._base
        if base is None or base.layout is not layout or (self.newest, self.writer) != (manifest.base, manifest.writer):
            return None
        buffer = self._pool.reserve(layout)
        try:
            require_zstandard()
            content = self.store.content(manifest.delta, layout.nbytes + 1)
            apply_difference(base.memory, content, buffer.memory)
            return self._accept(manifest, buffer)
        except Exception as error:  # noqa: BLE001  of any library: the whole version may do
            buffer.flat.zero_()  # also between the tensors, which reading a file leaves as it is
            text = self.store.explain(error)
            _log.warning("%s in the store %s: %s; the full version is read", manifest.delta, self.store.url, text)
            return None

    def _accept(self, manifest: Manifest, buffer: Buffer) -> Update:
        """Make a version that was read into ``buffer`` the newest one; ValueError: it is damaged."""
        checksum = checksum_of(buffer.memory, manifest.layout)
        if checksum != int(manifest.checksum, 16):
            raise ValueError(f"it is corrupt: its checksum is {checksum:016x}, not {manifest.checksum}")
        self._base = buffer if manifest.base else None
        self._layout, self.newest, self.writer = buffer.layout, manifest.version, manifest.writer
        return Update(manifest.version, buffer, b"", checksum, manifest.requires, acknowledge=False)


def read_tensors(file: BufferedIOBase, layout: Layout, reserve: Callable[[Layout], Buffer]) -> Buffer:
    """Read the tensors of a safetensors file, each into its place; the caller compares the checksum.

        8 bytes   length of the header, little-endian
        header    JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, …}
        rest      the tensors

    The dtypes and shapes in the header are not used: those of ``layout`` are. A malformed file is an ``Exception``.
    Readers of the library ``safetensors`` map a file, and a process that reads a mapped part that was cut off is
    killed; or they copy it while no other thread can run.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    start = 8 + int.from_bytes(file.read(8), "little")
    if start > size:
        raise ValueError("it is not a safetensors file: it ends within its header")
    header = msgspec.json.decode(file.read(start - 8), type=dict[str, dict[str, Any]])
    places = dict[int, int]()
    for index in layout.leaders:
        name, nbytes = layout.names[index], layout.byte_ranges[index][1]
        begin, end = header.get(name, {}).get("data_offsets", (-1, -1))
        if begin < 0 or end - begin != nbytes or start + end > size:
            raise ValueError(f"it has no {nbytes} bytes of '{name}'")
        places[index] = start + begin
    buffer = reserve(layout)
    for index, place in places.items():
        view = buffer.views[index]
        dense = view if view.is_contiguous() else torch.empty(view.shape, dtype=view.dtype)
        file.seek(place)
        if dense.numel() and file.readinto(raw_bytes(dense).numpy().data) < dense.nbytes:
            raise ValueError("the file ends within its tensors")
        if dense is not view:
            view.copy_(dense)
    return buffer


class FileInbox(Inbox):
    """A ``Connection`` to a store, and its inbox.

    A thread reads each version as it appears, if it ``watches``. ``connect`` and ``fetch`` read in the calling thread.
    A version that was read is staged until it is installed, or a newer one takes its place.
    """

    def __init__(self, reader: Reader, owner: Receiver, *, waits: bool = True, watches: bool = True) -> None:
        self._reader, self._owner = reader, owner
        self._waits, self._watches = waits, watches
        self._staged: Update | None = None
        self._thread: threading.Thread | None = None
        owner.inbox = self

    @property
    def newest(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._reader.newest

    def connect(self, worker_idx: int, deadline: float | None) -> int:
        """Wait for a version that this worker may begin with, if it ``waits``; begin to watch.

        SyncTimeout: there is none yet; LayoutMismatch: it does not fit; WeightSyncError: the store cannot be read.
        """
        store, oldest = self._reader.store, self._reader.oldest
        self._reader, self._owner.inbox = Reader(store, oldest), self  # also what an earlier connection has read
        self.fetch(deadline if self._waits else NOW)
        if self._staged is not None:
            process_gate().call_without_forward(self._owner.set_layout, self._staged.buffer.layout)
        elif self._waits:
            raise SyncTimeout(f"worker {worker_idx}: the store {store.url} has no version {oldest} yet")
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
        """Read each version as it appears; one that cannot be read is logged once, and read again now and then."""
        store, stop = reader.store, reader.stop
        notify, look = _notifier(store.local), _SHORTEST_LOOK
        said, failed, retry_at = "", None, 0.0
        while not stop.is_set():
            found, newest = False, None
            try:
                newest = store.newest()
                if newest is None or newest != failed or remaining(retry_at) == 0.0:
                    found, said = self._stage(reader.read(newest)), ""
            except WeightSyncError as error:
                if str(error) != said:
                    _log.warning("%s; the model keeps version %d", error, self.newest)
                said, failed, retry_at = str(error), newest, time.monotonic() + _RETRY
            if found:
                self._owner.settle()
            look = _SHORTEST_LOOK if found else min(2 * look, _LONGEST_LOOK)
            if notify is None:
                stop.wait(look)
            else:
                notify.watch(_STEP, _STEP, int(1000 * _LONGEST_LOOK), stop)
        if notify is not None:
            notify.close()

    def poll(self) -> Sequence[Update]:
        """Return the version that is staged; a trainer that has begun anew may have another layout."""
        update = self._staged
        if update is None:
            return ()
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
