"""The training loop: collect, learn, sync, log."""

from __future__ import annotations

import copy
import random
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, repeat
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from collectors import BaseCollector
from collectors.errors import ConfigError
from learning import checkpoint
from learning.actor_critic import ActorCritic, Diverged, check_finite
from learning.normalization import ObservationNormalizer, RewardNormalizer
from learning.progress import Progress
from learning.reporting import Reporter
from learning.reporting.files import read_rows
from learning.summary import summarise
from wsync import WeightSyncScheme


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a request to stop, and SIGUSR1 into one for a checkpoint.

    Then SIGINT has its usual effect, and SIGTERM, which schedulers repeat, has none. A context manager for the main
    thread: in another one, Python cannot catch signals, and `requested` stays false.
    """

    def __init__(self) -> None:
        self.requested = False
        self.exit_status = 0  # of a process that a signal ended: 128 + its number
        self.wants_checkpoint = False
        self._callbacks: list[Callable[[], object]] = []
        self._handlers: dict[int, Any] = {}

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` when a signal arrives, inside the handler; at once if one has arrived."""
        if self.requested:
            callback()
        else:
            self._callbacks.append(callback)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            mine = {signal.SIGINT: self._request, signal.SIGTERM: self._request}
            if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:  # not that of a launcher
                mine[signal.SIGUSR1] = self._save
            self._handlers = {number: signal.signal(number, handler) for number, handler in mine.items()}
        return self

    def __exit__(self, *_: object) -> None:
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _request(self, number: int, frame: FrameType | None) -> None:
        if signal.SIGINT in self._handlers:
            signal.signal(signal.SIGINT, self._handlers.pop(signal.SIGINT))
        callbacks, self._callbacks = self._callbacks, []
        self.requested, self.exit_status = True, self.exit_status or 128 + number
        for callback in callbacks:
            callback()

    def _save(self, number: int, frame: FrameType | None) -> None:
        self.wants_checkpoint = True


class WeightDelay:
    """Holds each version of a policy's weights back until the learner has done so many further updates.

    ``delays``: how many, for every version, or for one after the other. This is a weight sync with a long latency and
    enough bandwidth: versions are sent in order, and late; of those that become due together, the newest. Until the
    first one is due, workers act with the weights that they were started with, after a resume as well.
    The staleness of a frame is the newest version sent, plus the number held back (``len``), less the frame's version.
    """

    def __init__(self, delays: int | Iterator[int] = 0) -> None:
        self._delays = repeat(delays) if isinstance(delays, int) and delays else delays or None
        self._held_back: deque[tuple[int, dict[str, Any]]] = deque()  # with the update after which each is due
        self._updates = 0
        self._acting: nn.Module | None = None
        self.skipped = 0  # versions that will not be sent, as a newer one was sent in their place, by `exchange`

    def __len__(self) -> int:
        return len(self._held_back)

    def acting_policy(self, policy: nn.Module) -> nn.Module:
        """Return a module with the weights that workers have or start with: `policy` itself without a delay."""
        if self._acting is None and self._delays is not None:
            self._acting = copy.deepcopy(policy)
        return policy if self._acting is None else self._acting

    def exchange(self, policy: nn.Module) -> nn.Module | None:
        """Take the weights of `policy` after an update; return what to send now, valid until the next call, or None."""
        if self._delays is None:
            return policy
        self._updates += 1
        self._held_back.append((self._updates + next(self._delays), copy.deepcopy(policy.state_dict())))
        due = []
        while self._held_back and self._held_back[0][0] <= self._updates:
            due.append(self._held_back.popleft()[1])
        if not due:
            return None
        self.skipped, acting = len(due) - 1, self.acting_policy(policy)
        acting.load_state_dict(due[-1])
        return acting


def delays(least: int, spread: int = 0, recorded: Path | None = None, seed: int = 0) -> int | Iterator[int]:
    """Return what ``WeightDelay`` takes: ``least`` updates, and up to ``spread`` more, drawn uniformly.

    Or the staleness of each batch in the folder of a ``recorded`` run, again and again. FolderError: there is none.
    """
    if recorded is not None:
        found = [round(row["staleness"]) for row in read_rows(recorded)]
        return cycle(found or [0])
    generator = random.Random(seed)
    return (least + generator.randint(0, spread) for _ in repeat(None)) if spread else least


@dataclass(frozen=True)
class Goal:
    """When a run ends."""

    total_frames: int  # with the batch that reaches this number, at the latest
    solved_at: float | None = None  # mean return of the last 100 episodes that counts as solved; None: never
    stop_when_solved: bool = True  # end as soon as it is solved, before `total_frames`

    def outcome(self, progress: Progress) -> str | None:
        """Return "solved" or "finished" if the run has reached its goal, else None."""
        if self.stop_when_solved and progress.solved(self.solved_at):
            return "solved"
        return "finished" if progress.frames >= self.total_frames else None


@dataclass
class Training:
    """A run: a learner, the scheme that sends its policy's weights to the workers, and a goal."""

    learner: ActorCritic  # trains ``learner.policy``; the collector's workers have copies of it
    scheme: WeightSyncScheme  # the collector's scheme for that policy; the loop reads its version and its metrics
    goal: Goal
    folder: Path  # for checkpoints
    checkpoint_every: float = 60.0  # seconds; one more is written at the end
    delay: WeightDelay = field(default_factory=WeightDelay)  # measures what a slow weight sync costs
    sync_each: str = "update"  # when the weights are sent; "epoch": after each pass over a batch
    progress: Progress = field(default_factory=Progress)  # a resumed run starts with that of the checkpoint
    resumed_from: Path | None = None  # the folder of that checkpoint
    reporters: Sequence[Reporter] = ()  # receive the rows and the summary
    observations: ObservationNormalizer | None = None  # of the learner's networks; the loop updates it
    rewards: RewardNormalizer = field(default_factory=RewardNormalizer)  # makes the learner's rewards
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))  # the learner's
    facts: dict[str, Any] = field(default_factory=dict)  # entries of the summary that describe the run

    def run(self, collector: BaseCollector, stop: StopRequest, config: Any) -> dict[str, Any]:
        """Train until the goal is reached or `stop` is requested; return the summary, which reporters get too.

        However the run ends, a checkpoint (unless the networks have diverged) and the summary are written. After a
        ``KeyboardInterrupt``, the second request, no reporter concludes. A RuntimeError after a request to stop is the
        end of the run.
        """
        status, failures = "failed", [collector.failures]
        stop.add_callback(collector.interrupt)
        if isinstance(self.learner, ActorCritic):  # one of the user's own may have other attributes
            stop.add_callback(partial(setattr, self.learner, "stopping", True))
        stop.add_callback(lambda: failures.insert(0, copy.deepcopy(collector.failures)))  # later ones: by the signal
        try:
            for reporter in self.reporters:
                reporter.begin(self.folder, config)
            status = self._loop(collector, stop)
        except (RuntimeError, KeyboardInterrupt) as error:
            status = "interrupted" if stop.requested or isinstance(error, KeyboardInterrupt) else "failed"
            if status == "failed" or isinstance(error, KeyboardInterrupt):
                raise
        finally:
            error = sys.exception()
            if self.sync_each == "epoch":
                self.learner.after_epoch = None
            described = {"error": None if error is None else f"{type(error).__name__}: {error}"}
            counts = (self.scheme.metrics, failures[0], collector.staleness)
            summary = summarise(status, self.progress, self.goal.solved_at, *counts) | described | self.facts
            steps: list[Callable[[], object]] = [partial(one.finish, summary) for one in self.reporters]
            if not isinstance(error, Diverged):
                steps.insert(0, lambda: checkpoint.save(self.folder, self.state_dict()))
            if not isinstance(error, KeyboardInterrupt):
                steps += [one.conclude for one in self.reporters]
            _do_all(steps, error)
        return summary

    def _loop(self, collector: BaseCollector, stop: StopRequest) -> str:
        progress, scheme, saved_at = self.progress, self.scheme, time.monotonic()
        batches, not_sent = iter(collector), 0  # updates with weight_sync=none, which has no versions: counted instead
        progress.begin(scheme.version)
        if self.sync_each == "epoch":
            self.learner.after_epoch = partial(collector.update_policy_weights_, self.learner.policy)
        self.delay.acting_policy(self.learner.policy)  # copies it now if there is a delay: the first update changes it
        while (status := self.goal.outcome(progress)) is None:
            if stop.requested:
                return "interrupted"
            batch = next(batches)
            check_finite(batch)  # before it counts; a learner of the user's may not check it
            progress.collected(batch, scheme.version + len(self.delay) + not_sent, collector.staleness)
            if progress.solved_after is None and progress.solved(self.goal.solved_at):
                progress.solved_after = progress.frames
            began = time.perf_counter()
            learning = self._learn(batch)
            progress.seconds_learning += time.perf_counter() - began
            if (due := self.delay.exchange(self.learner.policy)) is not None:
                if self.delay.skipped:  # versions have the numbers of updates
                    scheme.continue_from(scheme.version + self.delay.skipped)
                collector.update_policy_weights_(due)
                not_sent += not scheme.sends_weights
            row = progress.synchronised(learning, scheme.metrics, scheme.version, collector.failures.failed.total())
            for reporter in self.reporters:
                reporter.update(row)
            if stop.wants_checkpoint or time.monotonic() - saved_at > self.checkpoint_every:
                stop.wants_checkpoint = False
                checkpoint.save(self.folder, self.state_dict())
                saved_at = time.monotonic()
        return status

    def _learn(self, batch: TensorDictBase) -> Mapping[str, float]:
        """Learn from a batch and update the statistics of observations, which then travel with the new weights.

        The batch is learnt from with the statistics before this update, because workers acted with these. Only the
        first batch sets them beforehand: until then observations are not normalised.
        """
        if self.device.type != "cpu":
            batch = batch.to(self.device)
        observations, mask = self.observations, batch.get("mask", None)
        if mask is not None and not mask.any():  # of one step, in which all environments were reset
            return {}
        first = observations is not None and observations.is_new
        if observations is not None and first:
            observations.update(batch.get("observation"), mask)
        learning = self.learner.update(self.rewards(batch))
        if observations is not None and not first:
            observations.update(batch.get("observation"), mask)
        return learning

    def state_dict(self) -> dict[str, Any]:
        return {
            "learner": self.learner.state_dict(),
            "progress": self.progress.state_dict(),
            "rewards": self.rewards.state_dict(),
        }

    def resume(self, folder: Path) -> None:
        """Continue from the checkpoint in `folder`; raises CheckpointError, ConfigError if nothing is sent."""
        if not self.scheme.sends_weights:
            what = "workers would keep the weights of the checkpoint: choose another weight_sync"
            raise ConfigError(f"resume={folder}: with weight_sync={self.scheme.name}, {what}")
        state = checkpoint.load(folder)
        try:
            self.learner.load_state_dict(state["learner"])
            self.progress.load_state_dict(state["progress"])
            self.rewards.load_state_dict(state["rewards"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise checkpoint.does_not_fit(folder, "this run", error) from error
        self.resumed_from, before = folder, self.progress
        self.facts["resumed_from"] = {"folder": str(folder), "frames": before.frames, "version": before.version}


def _do_all(steps: Iterable[Callable[[], object]], first: BaseException | None) -> None:
    """Do every step; an error in one becomes a note on the `first` error, or is the first one, which is raised."""
    raised = first
    for step in steps:
        try:
            step()
        except Exception as late:  # noqa: BLE001  (of any class: a step may be the user's)
            if raised is None:
                raised = late
            elif str(late) != str(raised):  # closing a file that is full raises the same error again
                raised.add_note(str(late))
    if first is None and raised is not None:
        raise raised


def resumed_seed(seed: int, frames: int) -> int:
    """Return the seed of a run that continues after `frames` frames: it must not repeat the noise of the first one."""
    return int(np.random.SeedSequence([seed, frames]).generate_state(1)[0] >> 1) if frames else seed
