"""The first part of an update, before anything is sent: check the weights, then pack them into buffers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from wsync.sending.in_flight import InFlight
from wsync.sending.membership import Membership
from wsync.sending.protocols import SendChannel
from wsync.sending.source import Part, Source
from wsync.weights.binding import dump_extra
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer, Packer

Packed = tuple[Part, Buffer, bytes]
"""Weights for some workers, the buffer that they were copied into, and their extra state.

Without the tensors, if those were made for the worker (``Source.maps``).
"""


class UpdatePacker:
    """Packs the weights of each update into free buffers. Used by the sending thread, under the sender's lock.

    Args:
        channel: owns the buffers.
        source: the weights to send if a call is given none.
        members: has each worker's extra state.

    Attributes:
        layout: the layout that the first weights have defined; None before.
    """

    def __init__(self, channel: SendChannel, source: Source, members: Membership) -> None:
        self.layout: Layout | None = None
        self._channel = channel
        self._source = source
        self._members = members
        self._tensor_packer: Packer | None = None

    def layout_of(self, weights: object) -> Layout:
        """Return the layout that ``weights`` would define, if they were the first."""
        return Layout.of(self._source.first(weights))

    def define_layout(self, weights: object) -> tuple[Layout, Packer]:
        """Return the layout and its packer. The first call makes them, and sends the layout to the workers.

        Args:
            weights: the first weights; None reads the source.
        """
        if self.layout is None or self._tensor_packer is None:
            layout = self.layout_of(weights)
            self._channel.set_layout(layout)
            self.layout, self._tensor_packer = layout, Packer(layout)
        return self.layout, self._tensor_packer

    @contextmanager
    def packing(
        self,
        weights: object,
        workers: Sequence[int],
        absent: Sequence[int],
        version: int,
        deadline: float | None,
        rest: Sequence[Tensor] | None = None,
    ) -> Iterator[tuple[InFlight, Sequence[Packed]]]:
        """Check everything, then copy it into buffers that no worker reads; they are released if the block raises.

        Args:
            weights: for ``workers``, and for replacements of ``absent`` ones; None reads the source.
            workers: the workers that have to acknowledge.
            absent: workers that have died or left.
            version: the update's.
            deadline: when to give up waiting for a free buffer.
            rest: completes ``weights``, where those are a part of the model.
        """
        packed: list[Packed] = []
        try:
            started = time.perf_counter()
            layout, packer = self.define_layout(weights)
            waited, packing, recipients = 0.0, 0.0, [*workers, *absent]
            for part in self._source.parts(weights, workers, absent, layout, rest):
                blob = self._extra_of(part)
                before = time.perf_counter()
                buffer = self._channel.reserve(recipients, deadline)
                reserved = time.perf_counter()
                # What was made for a worker is freed before the next worker's is made.
                packed.append((part._replace(tensors=[]) if self._source.maps else part, buffer, blob))
                packer.pack(part.tensors, buffer)
                waited, packing = waited + reserved - before, packing + time.perf_counter() - reserved
                del part
            update = InFlight(
                version=version,
                workers=workers,
                extra=[(part.workers, blob) for part, _, blob in packed],
                acknowledge=True,
                deadline=deadline,
                started=started,
                extract=time.perf_counter() - started - waited - packing,
                wait=waited,
                pack=packing,
            )
            yield update, packed
        except BaseException:
            self._channel.release([buffer for _, buffer, _ in packed])
            raise

    def _extra_of(self, part: Part) -> bytes:
        """Return a part's extra state; if its format has none (a plain TensorDict), that which the worker has."""
        if part.extra is not None:
            return dump_extra(part.extra)
        return self._members.extra_states.get(part.workers[0], b"")
