"""The first half of an update, of which no worker knows: everything is checked, then copied into buffers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from wsync.sending.end import SenderEnd
from wsync.sending.in_flight import InFlight
from wsync.sending.membership import Membership
from wsync.sending.source import Part, Source
from wsync.weights.binding import dump_extra
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer, Packer

Packed = tuple[Part, Buffer, bytes]
"""Weights for some workers, the buffer that they were copied into, and their extra state."""


class Loader:
    """Fills the buffers of one sender's end.

    Args:
        end: has the buffers.
        source: where weights come from when a call brings none.
        members: knows each worker's extra state.

    Attributes:
        layout: made from the first weights; None before.
    """

    def __init__(self, end: SenderEnd, source: Source, members: Membership) -> None:
        self.layout: Layout | None = None
        self._end = end
        self._source = source
        self._members = members
        self._packer: Packer | None = None

    def sketch(self, weights: object) -> Layout:
        """The layout that ``weights`` would make, if they were the first."""
        return Layout.of(self._source.first(weights))

    def plan(self, weights: object) -> tuple[Layout, Packer]:
        """The layout, and what packs by it."""
        if self.layout is None or self._packer is None:
            layout = self.sketch(weights)
            self._end.prepare(layout)
            self.layout, self._packer = layout, Packer(layout)
        return self.layout, self._packer

    @contextmanager
    def loaded(
        self,
        weights: object,
        workers: Sequence[int],
        absent: Sequence[int],
        version: int,
        deadline: float | None,
        *,
        keep: bool = False,
    ) -> Iterator[tuple[InFlight, Sequence[Packed]]]:
        """Check everything, then copy it into buffers that no worker reads; they are released if the block raises.

        Args:
            weights: for ``workers``, and for who comes in the place of ``absent`` ones; None reads the source.
            workers: who is to answer.
            absent: who has died.
            version: the update's.
            deadline: until when a buffer is waited for.
            keep: see ``SenderEnd.reserve``.
        """
        packed: list[Packed] = []
        try:
            started = time.perf_counter()
            layout, packer = self.plan(weights)
            parts = self._source.parts(weights, workers, absent, layout)
            blobs = [self._blob(part) for part in parts]
            extracted = time.perf_counter()
            waited, addressees = 0.0, [*workers, *absent]
            for part, blob in zip(parts, blobs, strict=True):
                before = time.perf_counter()
                buffer = self._end.reserve(addressees, deadline, keep=keep)
                packed.append((part, buffer, blob))
                waited += time.perf_counter() - before
                packer.pack(part.tensors, buffer)
            posted = InFlight(
                version=version,
                workers=workers,
                blobs=[(part.workers, blob) for part, _, blob in packed],
                acknowledge=True,
                deadline=deadline,
                started=started,
                extract=extracted - started,
                wait=waited,
                pack=time.perf_counter() - extracted - waited,
            )
            yield posted, packed
        except BaseException:
            self._end.release([buffer for _, buffer, _ in packed])
            raise

    def _blob(self, part: Part) -> bytes:
        """A part's extra state; weights that cannot say (a plain TensorDict) leave it as it was."""
        return dump_extra(part.extra) if part.extra is not None else self._members.extra.get(part.workers[0], b"")
