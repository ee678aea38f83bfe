"""Structured configs of a training run and its policy; ``learning.config`` makes those of classes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MISSING: Any = "???"
"""A value that has to be given, as OmegaConf spells it."""


@dataclass
class TrainConfig:
    """A training run, composed from ``conf/train.yaml``; the groups have structured configs of their own.

    Attributes:
        num_workers: processes that collect.
        num_envs: environments in each of them, stepped together.
        frames_per_batch: rows of a batch: the frames that one update learns from, and the resets of a native vector
            environment; of all workers together, or of one worker if collection is asynchronous. Rounded up to whole
            steps of the environments.
        sync_each: when the weights are sent: after each ``update`` (all that is learnt from a batch), or after each
            ``epoch`` (a pass over the batch), which keeps asynchronous collection closer to what is learnt.
        total_frames: the run ends with the batch that reaches them, at the latest.
        stop_when_solved: end as soon as the mean of the last 100 returns reaches ``env.solved_at``.
        staleness: updates by which each version of the weights is sent late, see ``learning.loop.WeightDelay``.
        seed: the seed of environments, policies and the learner; a resumed run derives another one from it and the
            frames so far.
        timeout: seconds that connecting and sending weights may take; None: no limit, but the collectors for workers
            that are reached over TCP, by RPC or by Ray need one (``collector.timeout``).
        device: the learner's, as PyTorch names it: ``cpu``, ``cuda``, ``cuda:1``; workers act on the CPU.
        threads: torch's number of threads in the trainer.
        checkpoint_every: seconds.
        resume: folder of an earlier run to continue.
        objective: entry of ``summary.json`` that a sweeper compares (``hydra/sweeper=optuna``).
        callbacks: a list of reporters of your own, each with a _target_ and arguments, see learning.reporting.Reporter.
    """

    num_workers: int = 2
    num_envs: int = 16
    frames_per_batch: int = 1536
    sync_each: str = "update"
    total_frames: int = MISSING
    stop_when_solved: bool = True
    staleness: int = 0
    seed: int = 0
    timeout: float | None = 60.0
    device: str = "cpu"
    threads: int = 1
    checkpoint_every: float = 60.0
    resume: str | None = None
    objective: str = "episode_return_mean_100"
    weight_sync: Any = MISSING
    collector: Any = MISSING
    env: Any = MISSING
    policy: Any = MISSING
    algorithm: Any = MISSING
    logger: Any = MISSING
    callbacks: list[Any] = field(default_factory=list)


@dataclass
class PolicyConfig:
    """The network of the policy and of the critic, a class or function of the spec of an observation.

    Attributes:
        initial_std: standard deviation of continuous actions at the start, in units of half the action range.
        shared: whether one network serves the policy and the critic; otherwise each has its own.
    """

    _target_: str = MISSING
    initial_std: float = 1.0
    shared: bool = False
