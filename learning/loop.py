"""The training loop: collect, learn, sync, log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from learning import checkpoint
from learning.ppo import PPO, Diverged
from learning.progress import Progress
from learning.reporting import Reporter
from learning.stop import StopRequest
from learning.summary import Failures, summarise

if TYPE_CHECKING:
    from types import TracebackType

    from torch import nn

    from wsync import WeightSyncScheme


class Collector(Iterable[Any], Protocol):
    """What the loop asks of a collector: batches, and new weights for whoever collects them."""

    failures: Failures

    def interrupt(self) -> None:
        """Do not wait much longer for the batch under way."""

    def update_policy_weights_(self, policy: nn.Module, /) -> Any:
        """Deliver the weights of `policy` to every worker."""


@dataclass(frozen=True)
class Goal:
    """When a run ends by itself.

    Attributes:
        total_frames: at the latest with the batch that reaches so many.
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
        chaos: how many workers each fault has hit so far that is made on purpose.
        facts: more entries for the summary (seed, number of workers, ...); ``env`` says whose returns are counted.
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
    chaos: Mapping[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def run(self, collector: Collector, stop: StopRequest, config: Any) -> dict[str, Any]:
        """Train until the goal is reached or somebody asks to stop; return the summary, which reporters get too.

        Whatever ends the run, a checkpoint and the summary are written; but networks that have diverged are not, so
        that the last checkpoint before is the one to go on from. An error is raised again afterwards, unless it came
        after a request to stop: a signal to the whole process group ends the workers as well. What cannot be written
        after it is a note on it, and does not take its place. After a ``KeyboardInterrupt``, which is a second
        request, nothing else is waited for.
        """
        patient = True
        try:
            return self._run(collector, stop, config)
        except KeyboardInterrupt:
            patient = False
            raise
        finally:
            if patient:
                with ExitStack() as everyone:
                    for reporter in self.reporters:
                        everyone.push(_written_by(reporter.conclude))

    def _run(self, collector: Collector, stop: StopRequest, config: Any) -> dict[str, Any]:
        status, diverged = "failed", False
        stop.tell(collector.interrupt)
        try:
            for reporter in self.reporters:
                reporter.begin(self.folder, config)
            status = self._loop(collector, stop)
        except Diverged:
            diverged = True
            raise
        except RuntimeError:
            if not stop.requested:
                raise
            status = "interrupted"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            summary = self._summary(status, collector.failures)
            with ExitStack() as everyone:  # last in, first called; each is told, even if the disk is full
                for reporter in reversed(self.reporters):
                    everyone.push(_written_by(partial(reporter.finish, summary)))
                if not diverged:
                    everyone.push(_written_by(partial(checkpoint.save, self.folder, self.state_dict())))
        return summary

    def _loop(self, collector: Collector, stop: StopRequest) -> str:
        progress, scheme, saved_at = self.progress, self.scheme, time.monotonic()
        batches = iter(collector)
        progress.begin(scheme.version)
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
        progress = self.progress.state_dict()
        return {"learner": self.learner.state_dict(), "progress": progress, "env": self.facts.get("env")}

    def resume(self, folder: Path) -> None:
        """Go on from the checkpoint in `folder`.

        Raises:
            CheckpointError: there is none, it is damaged, or it is of another model or learner.
        """
        state = checkpoint.load(folder)
        try:
            self.learner.load_state_dict(state["learner"])
            self.progress.load_state_dict(state["progress"])
            if state["env"] != self.facts.get("env"):
                self.progress.forget_returns()  # it may not count as solved by what was reached in another one
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            detail = " ".join(str(error).split())
            raise checkpoint.CheckpointError(f"{folder / checkpoint.FILE} does not fit this run: {detail}") from error
        self.resumed_from = folder
        self.facts["resumed_from"] = {
            "folder": str(folder), "frames": self.progress.frames, "version": self.progress.version
        }  # fmt: skip

    def _summary(self, status: str, failures: Failures) -> dict[str, Any]:
        first = self.progress.first_update_at
        return {
            **summarise(status, self.progress, self.goal.solved_at, self.scheme.metrics, failures, self.chaos),
            "seconds_to_first_update": None if first is None else first - self.started,
            **self.facts,
        }


_Exit = Callable[[type[BaseException] | None, BaseException | None, "TracebackType | None"], None]


def _written_by(step: Callable[[], object]) -> _Exit:
    """Return what takes `step` when an ``ExitStack`` is left; what cannot be written is a note on an earlier error."""
    before = sys.exception()

    def leave(_: object, error: BaseException | None, __: object) -> None:
        first = error or before
        try:
            step()
        except (OSError, checkpoint.CheckpointError) as late:
            if not isinstance(first, Exception):
                raise
            if str(late) != str(first):  # a file that is full is full when it is closed, too
                first.add_note(str(late))

    return leave
