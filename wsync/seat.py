"""What a worker's model is on, as its end of the line knows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Seat:
    """A worker's place in an arena. ``_native.Seat`` has the same attributes, and takes updates by itself.

    Attributes:
        version: that the model has.
        slot: that the model is bound to; -1 if it has memory of its own.
        refused: the newest version that could not be installed.
        hold: whether the next version may be refused: then ``slot`` is kept safe between forwards as well.
        busy: whether a slot is in use.
    """

    version: int = 0
    slot: int = -1
    refused: int = 0
    hold: bool = False
    busy: bool = False
