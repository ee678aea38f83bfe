"""The one-call update: for updates that are usual in every respect.

- *enabled* by an update without extra state, the same for all workers, of which none is missing
- *taken* by every update like it: one call packs, publishes and waits for acknowledgements
- *dropped* with anything else: a death, a late worker, a transaction, weights for some workers
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from wsync.types import SyncReport


class PartialDelivery(NamedTuple):
    """The outcome of an update that was published, but is not finished.

    Attributes:
        report: what it has cost so far.
        slot: where it lies.
        others: workers that could not be pointed to it at once: their mutex was held.
        answered: a byte for each worker, 1 if it has acknowledged the update.
    """

    report: SyncReport
    slot: int
    others: Sequence[int]
    answered: bytes


FastUpdate = Callable[[Any, int, float | None, float], SyncReport | tuple[SyncReport, int, list[int], bytes] | None]
"""``(tensors, version, timeout, began)`` → a report, or a ``PartialDelivery``; None, and nothing done, if unusual."""


class FastCalls(NamedTuple):
    """What a ``SendChannel`` offers for the one-call update.

    Attributes:
        update: the call.
        complete: ``(delivery, version)``: do what is left; ``wait_acks`` then returns the rest.
    """

    update: FastUpdate
    complete: Callable[[PartialDelivery, int], None]
