"""The fast path of an update: armed by one that was usual in every respect, gone with the first thing that is not.

- *armed* by an update without extra state, the same for all workers, none of whom is missing
- *taken* by every update like it: one call of compiled code (``csrc/``) checks, packs, publishes and listens
- *gone* with anything else: a death, a late joiner, a transaction, weights for some workers, another model
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from wsync import native
from wsync.types import SyncReport
from wsync.weights.snapshot import Listing


class PartialDelivery(NamedTuple):
    """What an update has come to that was published, but has left something to be done, or heard.

    Attributes:
        report: what it has cost so far.
        slot: where it lies.
        others: workers that have yet to be switched: somebody else held their mutex.
        answered: a byte for each worker, not 0 if it has acknowledged the update.
    """

    report: SyncReport
    slot: int
    others: Sequence[int]
    answered: bytes


FastUpdate = Callable[[Any, int, float | None, float], SyncReport | tuple[SyncReport, int, list[int], bytes] | None]
"""``(tensors, version, timeout, began)`` → a report, or a ``PartialDelivery``; None, and nothing done, if unusual."""


class FastEnd(NamedTuple):
    """What a sender's end offers.

    Attributes:
        update: the compiled call.
        complete: ``(partial, version)``: do what is left; after it the end's ``collect`` says the rest.
    """

    update: FastUpdate
    complete: Callable[[PartialDelivery, int], None]


class Locator(NamedTuple):
    """How to find the tensors of updates that are like the last one, in the layout's order.

    Attributes:
        model: the module that was sent; or something that no update is.
        tree: its tensors.
        listing: finds them in what was sent instead of a module.
    """

    model: object
    tree: native.Tree | None
    listing: Listing | None = None


@dataclass(frozen=True, slots=True)
class FastPath:
    """The fast path of updates to all workers: all that it takes, in one object.

    Attributes:
        own: what a send without weights means.
        model, tree, listing: see ``Locator``.
        update, complete: see ``FastEnd``.
    """

    own: object
    model: object
    tree: native.Tree | None
    listing: Listing | None
    update: FastUpdate
    complete: Callable[[PartialDelivery, int], None]

    def listed(self, given: object) -> list[Tensor] | None:
        """The tensors of what is not the module; None if it is not like the last update."""
        return None if self.listing is None else self.listing.tensors(given)
