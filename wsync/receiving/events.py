"""What a channel delivers to a ``ModelUpdater``: versions, decisions, questions, and the end of the connection."""

from __future__ import annotations

from dataclasses import dataclass

from wsync.types import Update
from wsync.weights.layout import Layout


@dataclass(frozen=True, slots=True)
class Published:
    """A version is ready: the gate has to be entered, which installs it."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """Check an update and keep it for the transaction's commit."""

    transaction: int
    update: Update


@dataclass(frozen=True, slots=True)
class Decision:
    """Install (``commit``) or drop what was prepared in a transaction."""

    transaction: int
    commit: bool


@dataclass(frozen=True, slots=True)
class CheckLayout:
    """Answer, under ``version``, whether weights of a layout would fit."""

    version: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class Newest:
    """The newest version that can be requested.

    Attributes:
        version: its number.
        request: the number of the request that this answers; 0 for none.
    """

    version: int
    request: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A version did not arrive.

    Attributes:
        version: its number.
        error: why.
        sender_knows: whether the sender has the error already; otherwise it is sent as the answer.
    """

    version: int
    error: str
    sender_knows: bool = False


@dataclass(frozen=True, slots=True)
class Closed:
    """There will be no more events.

    Attributes:
        finished: whether the sender has shut down; otherwise it died, or has disconnected this worker.
    """

    finished: bool = False


Event = Published | Prepare | Decision | CheckLayout | Newest | Failed | Closed
