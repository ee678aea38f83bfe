"""The trainer's end of a store: each update becomes a version of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wsync.control.session import checksum_of
from wsync.store.tensor_file import dump, require_storable
from wsync.store.versions import Manifest, Versions
from wsync.transforms.delta import Delta
from wsync.update import Cause, Outlet, Stage, Update
from wsync.weights.binding import require_no_extra
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer, BufferPool

SAME_WEIGHTS = "all readers of a store get the same weights"


class Files(Outlet):
    """An ``Outlet`` without connections: whatever reads the store gets the newest version.

    A version that is published is stored: nothing has to be waited for, and nothing can fail later. ``num_workers`` is
    only for reports. With ``delta``, a difference to the version before is stored, too.
    """

    transactional = True

    def __init__(self, store: Versions, num_workers: int, delta: Delta | None = None) -> None:
        self.name = store.writer
        self.workers: Sequence[int] = range(num_workers)
        self._store = store
        self._delta = delta
        self._pool = BufferPool()
        self._layout: Layout | None = None
        self._base: Update | None = None  # the newest version, for the next difference
        self._carried = 0
        self._prepared: Manifest | None = None

    def begin(self) -> int:
        """Make the folder; return the newest version in it, 0 for none. WeightSyncError: it cannot be written."""
        return self._store.open_for_writing()

    def causes(self) -> Mapping[int, str]:
        """Nobody is absent."""
        return {}

    def connect(self, processes: Any, deadline: float | None) -> None:
        """Readers come and go without notice."""

    def readmit(self, worker: int, process: Any, deadline: float | None) -> None:
        """Readers come and go without notice."""

    def disconnect(self, worker: int, cause: str) -> None:
        """Readers come and go without notice."""

    def check_layout(self, layout: Layout, deadline: float | None) -> Mapping[int, Cause]:
        """Each reader checks the layout of the version that it reads."""
        return {}

    def set_layout(self, layout: Layout) -> None:
        """Define what is stored; LayoutMismatch: files cannot have it."""
        require_storable(layout)
        self._layout = layout

    def reserve(self, deadline: float | None) -> Buffer:
        """Return private memory, from which the version is written."""
        assert self._layout is not None, "set_layout() comes first"
        return self._pool.reserve(self._layout)

    def publish(self, update: Update, workers: Sequence[int]) -> None:
        """Store a version; LayoutMismatch, WeightSyncError: that failed. ValueError: it is for some workers."""
        self.prepare(update, workers)
        self.commit(update, workers)

    def prepare(self, update: Update, workers: Sequence[int]) -> None:
        """Write the files of a version, which readers do not see yet; see ``publish``."""
        if not {*self.workers} <= {*workers}:
            raise ValueError(f"{SAME_WEIGHTS}: send to all workers, without worker_ids")
        require_no_extra(update.extra, "stored")
        buffer, base, difference = update.buffer, self._base, None
        if self._delta is not None and base is not None and base.buffer.layout == buffer.layout:
            difference = self._delta.difference(base.buffer.memory, buffer.memory, buffer.layout.width)
        checksum = update.checksum or checksum_of(buffer.memory, b"")
        self._prepared = Manifest(
            update.version,
            self.name,
            buffer.layout.encode(),
            f"{checksum:016x}",
            base.version if base is not None and difference is not None else 0,
            dict(update.requires),
        )
        tensors = {buffer.layout.names[index]: update.views[index] for index in buffer.layout.leaders}
        self._store.write(self._prepared, dump(tensors), difference)
        self._carried = buffer.layout.nbytes if difference is None else len(difference)

    def announce_commit(self, update: Update, workers: Sequence[int]) -> None:
        """A reader that has several models uses a version only with those that it requires."""

    def commit(self, update: Update, workers: Sequence[int]) -> None:
        """Let readers see the version that was prepared."""
        manifest, self._prepared = self._prepared, None
        assert manifest is not None and manifest.version == update.version, "prepare() comes first"
        self._store.commit(manifest)
        if self._delta is not None:
            self._base = update

    def abort(self, version: int, workers: Sequence[int]) -> None:
        """Delete the files of the version that was prepared."""
        manifest, self._prepared = self._prepared, None
        if manifest is not None:
            self._store.discard(manifest)

    def wait(self, workers: Sequence[int], version: int, stage: Stage, deadline: float | None) -> Mapping[int, Cause]:
        """A version that is stored counts as delivered."""
        return {}

    def costs(self, workers: Sequence[int], version: int) -> tuple[float, float, int]:
        """Return the bytes that a reader of the version before reads; readers report no times."""
        return 0.0, 0.0, self._carried

    def close(self, *, graceful: bool) -> None:
        """The versions stay."""
        self._base = self._prepared = None
