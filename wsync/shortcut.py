"""The short way of an update: armed by one that was usual in every respect, gone with the first thing that is not.

armed    by an update of one plain module, the same for all workers, none of whom is missing
taken    by every update like it: one call of compiled code (``_native.c``) checks, packs, publishes and listens
gone     with anything else: a death, a late joiner, a transaction, weights for some workers, another model
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn

from wsync import native
from wsync.types import SyncReport


class Rest(NamedTuple):
    """What an update has come to that was published, but has left something to be done, or heard.

    Attributes:
        report: what it has cost so far.
        slot: where it lies.
        others: workers that have yet to be switched: their mutex was not to be had at once.
        answered: a byte for each worker, not 0 if it has acknowledged the update.
    """

    report: SyncReport
    slot: int
    others: Sequence[int]
    answered: bytes


class Express(NamedTuple):
    """What a sender's end offers.

    Attributes:
        update: ``(tree, acknowledge, timeout)`` → the compiled call of the short way, if there is one.
        complete: ``(rest, version, acknowledge)``: do what is left; after it the end's ``collect`` says the rest.
    """

    update: Callable[[native.Tree, bool, float | None], Update | None]
    complete: Callable[[Rest, int, bool], None]


Update = Callable[[int, float], SyncReport | tuple[SyncReport, int, list[int], bytes] | None]
"""``(version, began)`` → the report of an update; or a ``Rest``; or None, if it is unusual, and nothing was done."""


class Shortcut(NamedTuple):
    """The short way of one module's updates to all workers.

    Attributes:
        module: whose weights go this way.
        own: whether a send without weights means them.
        update: the compiled call.
        complete: as ``Express.complete``.
    """

    module: weakref.ref[nn.Module]
    own: bool
    update: Update
    complete: Callable[[Rest, int, bool], None]
