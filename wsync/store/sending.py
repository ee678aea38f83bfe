"""The trainer's end of a store: each update becomes a version of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from wsync.checksum import checksum_of
from wsync.control.settings import dump_tensor_layout
from wsync.sending.protocols import ConnectionlessChannel
from wsync.store.versions import VersionStore
from wsync.transforms.delta import Delta
from wsync.types import Ack
from wsync.weights.binding import require_no_extra
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.weights.tensor_file import dump_tensors

SAME_WEIGHTS = "all readers of a store get the same weights"


def publish(store: VersionStore, version: int, layout: Layout, buffer: Buffer, difference: bytes | None = None) -> None:
    """Store packed weights as a version; and its difference to an older version, if that is given.

    Raises:
        LayoutMismatch: a module has extra state, which would be a pickle in a file; or a tensor has a dtype that
            safetensors files cannot have.
        WeightSyncError: they could not be stored.
    """
    settings = dump_tensor_layout(layout, "stored")
    group = sorted(layout.leaders, key=lambda index: -layout.dtypes[index].itemsize)  # so that each tensor is aligned
    pieces = dump_tensors(layout, buffer.views, group, {})
    store.publish(version, pieces, settings, checksum_of(buffer.flat, b""), difference)


class StoreSendChannel(ConnectionlessChannel):
    """A ``SendChannel`` without connections: workers read the store.

    Args:
        store: open for writing.
        num_workers: the number of workers that reports list; readers are not counted.
        delta: makes a difference to the version before; None: only full versions are stored.
    """

    def __init__(self, store: VersionStore, num_workers: int, delta: Delta | None = None) -> None:
        self.workers: Collection[int] = range(num_workers)
        self._store = store
        self._delta = delta
        self._base: tuple[int, Tensor] | None = None  # a copy of the newest version, and its number
        self._carried = 0
        self._layout: Layout | None = None
        self._buffer: Buffer | None = None
        self._published = False
        self._version = 0  # the newest that was stored

    def check_layout(self, layout: Layout, version: int) -> None:
        """See ``SendChannel``: each worker checks it when it reads."""

    def set_layout(self, layout: Layout) -> None:
        """See ``SendChannel``."""
        self._layout = layout
        self._buffer = Buffer.new(layout)

    def wait_for_workers(self, workers: Collection[int], sentinels: Mapping[int, int], deadline: float | None) -> None:
        """See ``SendChannel``: workers come and go without notice."""

    def reserve(self, workers: Collection[int], deadline: float | None) -> Buffer:
        """See ``SendChannel``: the one buffer, from which each version is written.

        Raises:
            ValueError: the update is for some workers.
        """
        assert self._buffer is not None, "set_layout() comes first"
        if not {*self.workers} <= {*workers}:
            raise ValueError(f"{SAME_WEIGHTS}: send to all workers, without worker_ids")
        return self._buffer

    def newest_views(self) -> Sequence[Tensor] | None:
        """See ``SendChannel``."""
        return self._buffer.views if self._buffer and self._published else None

    def release(self, buffers: Sequence[Buffer]) -> None:
        """See ``SendChannel``: the buffer has values that were not published."""
        if buffers:
            self._published = False

    def publish(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], acknowledge: bool) -> None:
        """See ``SendChannel``. When this returns, readers see the version; it is durable unless ``durable=False``.

        Raises:
            LayoutMismatch, WeightSyncError: it could not be stored.
        """
        require_no_extra(extra, "stored")
        assert self._layout is not None, "set_layout() comes first"
        difference = self._difference(buffer, self._layout)
        publish(self._store, version, self._layout, buffer, difference)
        self._carried = len(difference) if difference else self._layout.nbytes
        if self._delta is not None:
            with torch.inference_mode(False):  # a later call may be made in another mode
                copy = self._base[1].copy_(buffer.flat) if self._base else buffer.flat.clone()
            self._base = version, copy
        self._published, self._version = True, version

    def _difference(self, buffer: Buffer, layout: Layout) -> bytes | None:
        if self._delta is None or self._base is None:
            return None
        version, base = self._base
        return self._delta.difference(base, version, buffer.flat, layout.width)

    def carried_bytes(self, version: int) -> int:
        """See ``SendChannel``: what a reader of the version before reads."""
        return self._carried

    def wait_acks(self, workers: Collection[int], version: int, deadline: float | None) -> list[Ack]:
        """See ``SendChannel``: a version that is stored counts as delivered."""
        return [Ack(worker, max(version, self._version)) for worker in workers]

    def close(self, *, finished: bool = False) -> None:
        """See ``SendChannel``: the versions stay."""
        self._buffer = None
