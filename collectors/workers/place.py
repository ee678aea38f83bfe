"""A worker's place in a collector, and the states that it goes through.

    BUILDING ─ready─▶ READY ─connect─▶ JOINING ─connected─▶ THERE

Who dies, raises or does not answer, in whatever state, leaves the place, once all have been there:

    on_worker_failure=restart   PAUSED ─after a pause─▶ BUILDING
    on_worker_failure=drop      DROPPED, for good
    on_worker_failure=raise     an error: also while the first of all have not been there yet
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

from collectors.workers.pool import Worker
from collectors.workers.recovery import RestartBackoff
from collectors.workers.worker import WorkerOptions

W = TypeVar("W", bound=Worker)


class WorkerState(Enum):
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
        gets_updates: whether an update for all goes to it.
        frames: that all who had this place have delivered, in an earlier run, too.
    """

    options: WorkerOptions
    parts: bytes
    backoff: RestartBackoff
    worker: W | None
    state: WorkerState = WorkerState.BUILDING
    due: int = 0
    since: float = 0.0
    begins_at: float = 0.0
    gets_updates: bool = False
    num_envs: int = 0
    frames: int = 0
