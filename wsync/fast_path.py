"""The fast path: one call packs an update, publishes it to all workers and waits for their acknowledgements.

- *enabled* by an update that all workers get, with the same weights and no extra state, while none is missing
- *used* by later updates like it
- *disabled* by everything else: a death, a late worker, a transaction, weights for some workers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from wsync.types import SyncReport


class UnfinishedUpdate(NamedTuple):
    """The outcome of an update that was published, but is not finished.

    Attributes:
        report: what it has cost so far.
        slot: the slot of the weights.
        others: workers that could not be pointed to the slot at once: their mutex was held.
        answered: a byte for each worker, 1 if it has acknowledged the update.
    """

    report: SyncReport
    slot: int
    others: Sequence[int]
    answered: bytes

    def report_after(self, seconds: float) -> SyncReport:
        """Return the report of the update, finished after ``seconds``: the rest of them went to the last phase."""
        phases = dict(self.report.phases)
        phases["acknowledge"] += seconds - self.report.seconds
        return self.report._replace(seconds=seconds, phases=phases)


FastUpdate = Callable[[Any, int, float | None, float], SyncReport | tuple[SyncReport, int, list[int], bytes] | None]
"""``(tensors, version, timeout, began)`` → report, or fields of an ``UnfinishedUpdate``.

``tensors`` are a list in the order of the layout, or a ``TensorTree``. ``timeout`` is in seconds, None for no limit;
``began`` is when the call of ``send`` began, on ``time.perf_counter``.

None, and nothing was done, if a worker is missing, no slot is free, or the tensors are not plain bytes that fit. Raises
``NotConnected`` in a forked child."""


class FastCalls(NamedTuple):
    """The calls of the fast path. Made by the thread that calls the scheme, under the sender's lock.

    Attributes:
        update: the update in one call.
        finish_publishing: ``(unfinished, version)``: publish the update to the workers that lack it, and store the
            acknowledgements that were read; ``wait_acks`` then returns all.
    """

    update: FastUpdate
    finish_publishing: Callable[[UnfinishedUpdate, int], None]
