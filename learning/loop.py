"""The training loop: collect, learn, sync, log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from learning import checkpoint
from learning.ppo import PPO
from learning.progress import WINDOW, Progress
from learning.reporting import Reporter
from learning.stop import StopRequest

if TYPE_CHECKING:
    from torch import nn

    from wsync import WeightSyncScheme


class Collector(Iterable[Any], Protocol):
    """What the loop asks of a collector: batches, and new weights for whoever collects them."""

    def update_policy_weights_(self, policy: nn.Module, /) -> Any:
        """Deliver the weights of `policy` to every worker."""


@dataclass(frozen=True)
class Goal:
    """When a run ends by itself.

    Attributes:
        total_frames: at the latest after so many.
        solved_at: mean return of the last 100 episodes at which the environment counts as solved; None: never.
        stop_when_solved: end there, rather than at `total_frames`.
    """

    total_frames: int
    solved_at: float | None = None
    stop_when_solved: bool = True

    def reached(self, progress: Progress) -> str | None:
        """Return "solved" or "finished" when there is nothing left to do, else None."""
        if self.stop_when_solved and progress.solved(self.solved_at):
            return "solved"
        return "finished" if progress.frames >= self.total_frames else None


@dataclass
class Training:
    """A run: a learner, the scheme that carries its policy's weights to whoever collects, and a goal.

    Attributes:
        learner: improves ``learner.policy``, of which the collector's workers have copies.
        scheme: the collector's scheme for that policy; the loop only reads its version and its metrics.
        goal: when to stop.
        folder: where checkpoints go.
        checkpoint_every: seconds between two checkpoints on the way; one is always written at the end.
        started: when the process began, as of ``time.perf_counter``.
        progress: the counters; those of a checkpoint, if the run was resumed.
        resumed_from: the folder of that checkpoint.
        reporters: who is told.
        facts: more entries for the summary (seed, number of workers, ...).
    """

    learner: PPO
    scheme: WeightSyncScheme
    goal: Goal
    folder: Path
    checkpoint_every: float = 60.0
    started: float = field(default_factory=time.perf_counter)
    progress: Progress = field(default_factory=Progress)
    resumed_from: Path | None = None
    reporters: Sequence[Reporter] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    def run(self, collector: Collector, stop: StopRequest, config: Any) -> dict[str, Any]:
        """Train until the goal is reached or somebody asks to stop; return the summary, which reporters get too.

        Whatever ends the run, a checkpoint and the summary are written. An error is raised again afterwards, unless it
        came after a request to stop: a signal to the whole process group ends the workers as well.
        """
        status = "failed"
        try:
            for reporter in self.reporters:
                reporter.begin(self.folder, config)
            status = self._loop(collector, stop)
        except RuntimeError:
            if not stop.requested:
                raise
            status = "interrupted"
        finally:
            checkpoint.save(self.folder, self.state_dict())
            summary = self.summary(status)
            with ExitStack() as everyone:  # each is told, even if one raises
                for reporter in reversed(self.reporters):
                    everyone.callback(reporter.finish, summary)
        return summary

    def _loop(self, collector: Collector, stop: StopRequest) -> str:
        progress, scheme, saved_at = self.progress, self.scheme, time.monotonic()
        batches = iter(collector)
        progress.begin()
        while (status := self.goal.reached(progress)) is None:
            if stop.requested:
                return "interrupted"
            batch = next(batches)
            progress.collected(batch, scheme.version)
            learning = self.learner.update(batch)
            collector.update_policy_weights_(self.learner.policy)
            row = progress.synchronised(learning, scheme.metrics, scheme.version)
            for reporter in self.reporters:
                reporter.update(row)
            if time.monotonic() - saved_at > self.checkpoint_every:
                checkpoint.save(self.folder, self.state_dict())
                saved_at = time.monotonic()
        return status

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs, as tensors and plain values."""
        return {"learner": self.learner.state_dict(), "progress": self.progress.state_dict()}

    def resume(self, folder: Path) -> None:
        """Go on from the checkpoint in `folder`.

        Raises:
            CheckpointError: there is none, it is damaged, or it is of another model or learner.
        """
        state = checkpoint.load(folder)
        try:
            self.learner.load_state_dict(state["learner"])
            self.progress.load_state_dict(state["progress"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            detail = " ".join(str(error).split())
            raise checkpoint.CheckpointError(f"{folder / checkpoint.FILE} does not fit this run: {detail}") from error
        self.resumed_from = folder
        self.facts["resumed_from"] = {
            "folder": str(folder), "frames": self.progress.frames, "version": self.progress.version
        }  # fmt: skip

    def summary(self, status: str) -> dict[str, Any]:
        """Return what ``summary.json`` holds."""
        progress = self.progress
        nothing = {"latency_us": dict.fromkeys(("p50", "p95", "p99", "max")), "phases_us": {}}
        sync = nothing | self.scheme.metrics.summary()
        return {
            "status": status,
            "solved": progress.solved(self.goal.solved_at),
            "verdict": self.verdict(status),
            "frames": progress.frames,
            "seconds": progress.seconds,
            "frames_per_second": progress.frames_per_second,
            "episodes": progress.episodes,
            "episode_return_mean_100": progress.return_mean,
            "solved_at": self.goal.solved_at,
            "seconds_to_first_update": progress.first_update_at and progress.first_update_at - self.started,
            **self.facts,
            "weight_sync": {**sync, "staleness_mean": progress.staleness_mean},
        }

    def verdict(self, status: str) -> str:
        """Say in a sentence or two how the run ended."""
        progress = self.progress
        mean = progress.return_mean
        scored = (
            "no episode ended"
            if mean is None
            else f"mean return {mean:.1f} over the last {len(progress.window)} episodes"
        )
        threshold = "" if self.goal.solved_at is None else f" (solved at {self.goal.solved_at:g})"
        how = "solved" if progress.solved(self.goal.solved_at) else status
        text = f"{how.capitalize()} after {progress.frames:,} frames in {progress.seconds:.1f} s: {scored}{threshold}."
        return f"{text} {self._control()}".rstrip()

    def _control(self) -> str:
        """Say so if no update ever reached a worker: the run is the control that ``weight_sync=none`` makes."""
        progress = self.progress
        acted, mean, first = progress.acted_on, progress.return_mean, progress.first_mean
        if acted is None or acted[0] != acted[1] or self.scheme.metrics.last is not None:
            return ""
        text = f"Nothing reached the workers: all their frames were acted with version {acted[0]}"
        if progress.solved(self.goal.solved_at):
            return (
                f"{text}, and yet it was solved: either the task needs no learning, or storage is shared by accident."
            )
        if mean is None or first is None or progress.episodes < 2 * WINDOW:
            return f"{text}, and it did not learn."
        return f"{text}, and it did not learn: mean return {first:.1f} at the start, {mean:.1f} at the end."
