"""A worker's place in a collector, and the stages that it goes through.

BUILDING ─ready→ READY ─connect→ JOINING ─connected→ THERE
↑                                                  │ died, raised, or did not answer
└────────────── after a pause ── PAUSED ←──────────┤
DROPPED ←──────────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

from collectors.pool import Worker
from collectors.recovery import Pace
from collectors.worker import WorkerOptions

W = TypeVar("W", bound=Worker)


class Stage(Enum):
    """See the module."""

    BUILDING = auto()
    READY = auto()
    JOINING = auto()
    THERE = auto()
    PAUSED = auto()
    DROPPED = auto()


@dataclass(eq=False)
class Place(Generic[W]):
    """One worker index, and who has it.

    Attributes:
        options: of whoever has it.
        parts: likewise.
        worker: who has it; None for nobody.
        due: answers that it owes.
        since: when it last answered, or began to owe one.
        begins_at: when a paused one is started anew.
        joined: whether it gets updates.
        frames: that all who had this place have delivered, in an earlier run, too.
    """

    options: WorkerOptions
    parts: bytes
    pace: Pace
    worker: W | None
    stage: Stage = Stage.BUILDING
    due: int = 0
    since: float = 0.0
    begins_at: float = 0.0
    joined: bool = False
    num_envs: int = 0
    frames: int = 0
