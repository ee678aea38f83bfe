"""What a worker hears from its sender, and who follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from wsync.receiving.gate import Feed
from wsync.receiving.receiver_thread import LineHandler
from wsync.types import Update
from wsync.weights.layout import Layout


@dataclass(frozen=True, slots=True)
class News:
    """A version waits: pass through the gate."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Check ``update`` and keep it ready."""

    transaction: int
    update: Update


@dataclass(frozen=True, slots=True)
class Decision:
    """Install, or forget, what is staged."""

    transaction: int
    install: bool


@dataclass(frozen=True, slots=True)
class Proposal:
    """See whether weights of a layout would fit; ``version`` is what the answer is to."""

    version: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Closed:
    """The sender has gone."""


Event = News | Stage | Decision | Proposal | Closed


class Follower(Feed, LineHandler, Protocol):
    """What follows a sender: the gate asks it for news, and whoever listens to the line tells it of them."""


class SlowPath(Follower, Protocol):
    """A ``Receiver``, as a faster path sees it: who goes on with whatever is unusual.

    Attributes:
        version: that the model has.
        told_at: when the update was announced that is being installed, on ``time.perf_counter``; 0.0 if it was not.
        waiting: how many wait in ``receive``, and have to be woken by an update.
    """

    version: int
    told_at: float
    waiting: int

    def follow(self, events: Sequence[Event]) -> bool:
        """Do what the sender has said; False when there will be nothing more."""
        ...
