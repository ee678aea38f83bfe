"""A worker's end of a store: reads the newest version when there is one, outside the gate."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from io import BufferedIOBase
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from wsync.control.loop import control_loop, run_blocking
from wsync.control.session import checksum_of
from wsync.deadlines import NOW, remaining
from wsync.errors import SyncTimeout, WeightSyncError
from wsync.gate import process_gate
from wsync.store.files import MANIFEST, MAX_HEADER, Manifest, Store
from wsync.store.safetensors_file import files_of
from wsync.transforms import apply_difference
from wsync.update import Inbox, Update
from wsync.weights.layout import ALIGNMENT, Buffer, BufferPool, Layout
from wsync.weights.tensors import raw_bytes

if TYPE_CHECKING:
    from wsync.receiver import Receiver

T = TypeVar("T")
_log = logging.getLogger(__name__)
_SHORTEST_LOOK, _LONGEST_LOOK = 0.02, 1.0  # seconds between two looks for a newer version
_STEP = 5  # milliseconds until watchfiles reports a change
_GRACE = 0.2  # seconds in which a call that has come to its deadline returns by itself
_CLOSING = 2.0  # seconds that ``close`` waits for the thread, which may be reading


class Reader:
    """Reads the newest version of a store, each once. Any thread may call. ``last``: what was read before."""

    def __init__(self, store: Store, oldest: int = 1, last: Update | None = None) -> None:
        self.store, self.oldest = store, oldest  # the oldest version that may be used
        self.last = last  # to which the next version may be a difference
        self.newest, self.writer = 0, ""  # the newest version that was read, and its trainer
        self.stop = threading.Event()  # ends every wait
        self._pool = BufferPool()
        self._lock = threading.Lock()  # guards these and what follows, and reading takes long
        self._layout: Layout | None = None

    def read(self, manifest: Manifest | None) -> Update | None:
        """Return the newest version; None: it was read already, or is not to be used. WeightSyncError: it is bad."""
        with self._lock:
            while manifest is not None and manifest.version >= max(self.oldest, self.newest + 1):
                with self.store.explaining(f"the manifest {MANIFEST} of {self.store.url} is damaged: its layout"):
                    layout = Layout.decode(manifest.layout)
                if self._layout is not None and self._layout == layout:  # the same object: a buffer may be used again
                    layout = self._layout
                try:
                    return self._read(manifest, layout)
                except WeightSyncError as error:
                    missing = isinstance(error.__cause__, FileNotFoundError)
                    newest = self.store.newest() if missing else manifest
                    if newest == manifest:
                        raise
                    manifest = newest  # the file was deleted, because newer versions have been published
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

    def _read(self, manifest: Manifest, layout: Layout) -> Update:
        """Make the newest version from the last one that was read, or from an anchor; see ``Manifest.way``."""
        last, self.last = self.last, None  # after an error, the next call begins at an anchor
        kept = buffer = None if last is None else last.buffer
        checksum = 0 if kept is None else checksum_of(kept.memory, manifest.layout)
        own = 0 if last is None or checksum != last.checksum else last.version  # its memory may be a model's own
        with self.store.explaining(f"the manifest {MANIFEST} of {self.store.url} is damaged"):
            way = manifest.way((own, f"{checksum:016x}"))
        for one, whole in way:
            name = manifest.name(one.version, whole=whole)
            with self.store.explaining(f"version {one.version} of the store {self.store.url} cannot be read: {name}"):
                if whole or buffer is None:
                    buffer = self._read_whole(name, layout, manifest.shard_bytes)
                else:
                    into = self._pool.reserve(layout) if buffer is kept else buffer
                    buffer = self._read_difference(name, buffer, checksum, into)
                checksum = checksum_of(buffer.memory, manifest.layout)
                if checksum != int(one.checksum, 16):
                    raise ValueError(f"it is corrupt: its checksum is {checksum:016x}, not {one.checksum}")
        assert buffer is not None, "a way without a step is from a version that was read"
        self._layout, self.newest, self.writer = layout, manifest.version, manifest.writer
        update = Update(manifest.version, buffer, b"", checksum, manifest.requires, acknowledge=False)
        self.last = update if manifest.differences else None
        return update

    def _read_whole(self, name: str, layout: Layout, shard_bytes: int) -> Buffer:
        """Read a file or a folder that ``Files`` has written, into place; the caller compares the checksum.

        Headers are passed over. The library ``safetensors`` maps a file, and a process that reads a mapped part that
        was cut off is killed; or it copies the file while no other thread can run. ValueError: a file has another size.
        """
        with ExitStack() as opened:
            files = list[tuple[BufferedIOBase, Sequence[int]]]()
            for path, entries in files_of(layout, shard_bytes).items():
                nbytes = sum(layout.byte_ranges[index][1] for index in entries)
                file = opened.enter_context(self.store.open(f"{name}/{path}".rstrip("/"), nbytes + MAX_HEADER))
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
                start = 8 + int.from_bytes(file.read(8), "little")
                if size != start + nbytes:
                    raise ValueError(f"it has {size} bytes, not the {start + nbytes} of its header and the tensors")
                file.seek(start)
                files.append((file, entries))
            nbytes = sum(layout.byte_ranges[index][1] for index in layout.leaders)
            if layout.nbytes > nbytes + ALIGNMENT * len(layout.names):  # no more memory than the tensors take
                raise ValueError(f"its layout has {layout.nbytes} bytes for tensors of {nbytes}")
            buffer = self._pool.reserve(layout)
            for file, entries in files:
                for index in entries:
                    view = buffer.views[index]
                    dense = view if view.is_contiguous() else torch.empty(view.shape, dtype=view.dtype)
                    if dense.numel() and file.readinto(raw_bytes(dense).numpy().data) < dense.nbytes:
                        raise ValueError("the file ends within its tensors")
                    if dense is not view:
                        view.copy_(dense)
            return buffer

    def _read_difference(self, name: str, base: Buffer, checksum: int, into: Buffer) -> Buffer:
        """Return the version that a file has as a difference to ``base``; ValueError: it is one to something else."""
        limit = base.layout.nbytes + 16  # more than precedes it
        with self.store.open(name, limit) as file:
            digest, difference = file.read(8), file.read(limit)
        if int.from_bytes(digest) != checksum:
            raise ValueError(f"it is a difference to weights with the checksum {digest.hex()}, not {checksum:016x}")
        apply_difference(base.memory, difference, into.memory)
        return into


def in_time(store: Store, function: Callable[[], T], deadline: float | None) -> T:
    """Call ``function``. If the store is not local, SyncTimeout: it has not answered by the deadline.

    Then the call goes on, in a thread of its own.
    """
    if store.local is not None:
        return function()
    loop, late = control_loop().acquire(), None if deadline is None else deadline + _GRACE
    try:
        return loop.call(run_blocking("store-read", function), late)
    except TimeoutError:
        raise SyncTimeout(f"the store {store.url} did not answer in time") from None
    finally:
        loop.release()


class FileInbox(Inbox):
    """A connection to a store, and its inbox.

    A thread reads each version as it appears, if it ``watches``; ``connect`` and ``fetch`` read as ``in_time`` does.
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
        self._look(deadline, deadline if self._waits else NOW)
        if self._staged is not None:
            process_gate().call_without_forward(self._owner.set_layout, self._staged.buffer.layout)
        elif self._waits:
            raise SyncTimeout(f"worker {worker_idx}: the store {store.url} has no version {oldest} yet")
        if self._watches:
            self._thread = threading.Thread(target=self._watch, args=[self._reader], name="wsync-store", daemon=True)
            self._thread.start()
        return self.newest

    def fetch(self, deadline: float | None) -> None:
        """Read the newest version, waiting for a first one; WeightSyncError: it is damaged."""
        self._look(deadline, deadline)

    def _look(self, deadline: float | None, until: float | None) -> None:
        reader = self._reader
        in_time(reader.store, lambda: self._stage(reader, reader.wait(until)), deadline)

    def _stage(self, reader: Reader, update: Update | None) -> bool:
        """Stage what was read, if that is anything; not after ``close``, as the model is not gated any more."""
        if update is None or reader.stop.is_set():
            return False
        self._owner.sender, self._staged = reader.writer, update
        return True

    def _watch(self, reader: Reader) -> None:
        """Read each version as it appears; the error of one that cannot be read is logged once."""
        wait = _waiting(reader.store.local, reader.stop)
        look, said = _SHORTEST_LOOK, ""
        while not reader.stop.is_set():
            found = False
            try:
                found, said = self._stage(reader, reader.read(reader.store.newest())), ""
            except WeightSyncError as error:
                if str(error) != said:
                    said = str(error)
                    _log.warning("%s; the model keeps version %d", error, self.newest)
            if found:
                self._owner.announce()
            look = _SHORTEST_LOOK if found else min(2 * look, _LONGEST_LOOK)
            wait(look)

    def poll(self) -> Sequence[Update]:
        update = self._staged
        return () if update is None else (update,)

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


def _waiting(folder: Path | None, stop: threading.Event) -> Callable[[float], object]:
    """Return what waits until a local folder changes; elsewhere, for the seconds that it is given."""
    if folder is not None and folder.is_dir():
        with suppress(ModuleNotFoundError):  # of the extra ``store``
            from watchfiles._rust_notify import RustNotify  # documented; ``watchfiles.watch`` would begin later

            notify = RustNotify([str(folder)], False, False, 0, False, False)
            return lambda _: notify.watch(_STEP, _STEP, int(1000 * _LONGEST_LOOK), stop)
    return stop.wait
