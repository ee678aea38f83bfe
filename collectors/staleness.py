"""How old a batch may be when it is delivered, counted in versions of the policy's weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from tensordict import TensorDictBase

from collectors.batch_layout import frames_of

_PATIENCE = 10  # batches of a worker that may be dropped in a row, beyond those that it has collected ahead


@dataclass
class Staleness:
    """The limit of a collector, and what was dropped because of it.

    A frame's staleness is the newest version sent minus the version that acted in it; 0 for random actions.

    Attributes:
        max_staleness, run_ahead: as ``WorkerCollector``.
        dropped_batches: number of workers' batches that were dropped.
        dropped_frames: number of frames of these.
    """

    max_staleness: int | None = None
    run_ahead: int = 0
    dropped_batches: int = 0
    dropped_frames: int = 0
    _in_a_row: Counter[int] = field(default_factory=Counter)  # by worker

    def __post_init__(self) -> None:
        check_count("run_ahead", self.run_ahead)
        if self.max_staleness is not None:
            check_count("max_staleness", self.max_staleness)

    def admits(self, batch: TensorDictBase, newest: int, worker: int) -> bool:
        """Return whether ``batch`` of ``worker`` may be delivered while ``newest`` is the newest version; count it.

        Raises:
            RuntimeError: so many batches of the worker were dropped in a row that waiting for another one is useless.
        """
        if self.max_staleness is None:
            return True
        acted = batch.get("policy_version")
        if not bool(((acted >= 0) & (acted < newest - self.max_staleness)).any()):
            self._in_a_row[worker] = 0
            return True
        self.dropped_batches += 1
        self.dropped_frames += frames_of(batch)
        self._in_a_row[worker] += 1
        if self._in_a_row[worker] > _PATIENCE + self.run_ahead:
            raise RuntimeError(
                f"{self._in_a_row[worker]} batches of worker {worker} in a row had frames that were more than "
                f"max_staleness={self.max_staleness} versions old: either more versions than that are sent while one "
                "batch is collected (raise max_staleness, or lower frames_per_batch), or none are sent to this worker "
                "(worker_ids)"
            )
        return False

    def as_dict(self) -> dict[str, int | None]:
        """Return the public attributes, for a log."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


def check_count(name: str, number: Any, *, least: int = 0, otherwise: str = "") -> None:
    """Raise TypeError or ValueError unless ``number`` is a whole one from ``least`` on, or what ``otherwise`` says."""
    if not isinstance(number, Integral) or isinstance(number, bool):
        raise TypeError(f"{name} is a whole number, not {number!r}")
    if int(number) < least:
        raise ValueError(f"{name} is at least {least}{otherwise}, not {number}")
