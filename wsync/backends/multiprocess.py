"""Multiprocess: every worker has a copy of its own, made from the shared memory that all updates go through."""

from __future__ import annotations

from typing import Any, Unpack

from wsync.control.session import Medium
from wsync.media.queues import MPTransport, WeightQueue
from wsync.registry import SchemeOptions
from wsync.scheme import WeightSyncScheme
from wsync.transport import TransportBackend
from wsync.weights.strategy import Format


class MultiProcessWeightSyncScheme(WeightSyncScheme):
    """Weight synchronization by copies, for workers on the trainer's machine with memory of their own.

    It takes the options of ``WeightSyncScheme``; ``bind`` has no effect.
    """

    name = "multiprocess"
    arena = True

    def __init__(self, strategy: Format = "tensordict", sync: bool = True, **options: Unpack[SchemeOptions]) -> None:
        super().__init__(strategy, sync, **options)
        self.bind = False

    def make_medium(self, worker_idx: int) -> Medium:
        return Medium()  # without the C extension

    def create_transport(
        self, worker_idx: Any = None, *, weight_queue: WeightQueue | None = None, ack_queue: WeightQueue | None = None
    ) -> TransportBackend:
        """Return the scheme's own way to a worker; or, given queues, an ``MPTransport`` over them."""
        if weight_queue is None:
            return super().create_transport(worker_idx)
        return MPTransport(weight_queue, ack_queue, self.timeout)
