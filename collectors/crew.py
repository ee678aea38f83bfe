"""What all collectors with several workers have in common, however the workers are reached."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import util
from typing import Any, Literal, Required, TypedDict

import torch
from tensordict import TensorDictBase

import wsync
from collectors.base import BaseCollector
from collectors.making import EnvMaker
from collectors.pickling import pickled
from collectors.updating import UpdaterOrFactory
from collectors.workers.gathering import FirstCome, Gathering, Together
from collectors.workers.members import Members
from collectors.workers.pool import Pool, Worker
from collectors.workers.recovery import FailurePolicy, OnFailure
from collectors.workers.worker import Parts, WorkerOptions


class CrewOptions(TypedDict, total=False):
    """What every collector with several workers takes; ``CrewCollector`` says what each means."""

    policy_factory: Callable[[], Any] | None
    frames_per_batch: Required[int]
    total_frames: int
    device: torch.device | str | Sequence[torch.device | str] | None
    storing_device: torch.device | str | None
    weight_sync_schemes: Mapping[str, wsync.WeightSyncScheme] | None
    weight_updater: UpdaterOrFactory | None
    max_frames_per_traj: int | None
    init_random_frames: int
    cat_results: int | Literal["stack"]
    track_policy_version: bool
    threads: int
    on_worker_failure: OnFailure
    worker_timeout: float | None
    max_restarts: int
    restart_window: float


class CrewCollector(BaseCollector):
    """Gathers batches with several workers, each with its own environments and its own copy of the policy.

    Args:
        create_env_fn: one function per worker; each makes an environment (lambdas are fine).
        policy: a module that reads "observation" and writes "action"; or any function of a TensorDict; None acts at
            random. Workers get copies. Whatever it wrote before is not handed to it again: there is no recurrence.
        sync: whether all workers wait for each other, and for new weights; otherwise a batch is one worker's.
        start: makes the pool of so many workers.
        policy_factory: makes the policy in each worker, instead.
        frames_per_batch: frames of a batch, over all workers (of each worker's batch, if asynchronous).
        total_frames: the end; -1 for none.
        device: where the policies act; one, or one per worker.
        storing_device: where batches are put.
        weight_sync_schemes: ``{model_id: scheme}``; by default one for ``policy``, which suits the workers, if that is
            a module with weights (where there is only a ``policy_factory``, there is none, and nothing reaches the
            workers).
        weight_updater: of the older API, deprecated; or a function that makes one.
        max_frames_per_traj: episodes are truncated after so many steps.
        init_random_frames: so many frames, over all workers, begin with random actions.
        cat_results: how workers' batches are joined: ``"stack"`` with a new leading dimension, or along one of theirs
            (0: more environments; the last one is time, where one worker's frames would seem to follow another's).
        track_policy_version: whether batches have ``policy_version``.
        threads: torch threads of each worker.
        on_worker_failure: when a worker dies, raises, or does not answer in time: ``"raise"``; ``"drop"`` it, and go on
            with the others (a synchronous batch is smaller by its share); or ``"restart"`` it: the others go on, and a
            new worker takes its place from the next batch on, with the newest weights of every model and a seed that
            nobody has had. Frames of a batch that it had not finished are lost, and not counted.
        worker_timeout: seconds in which a worker has to answer (a batch, its environments); one that does not is ended.
        max_restarts: a worker that fails more often than this within ``restart_window`` seconds, or since its last
            batch, is an error after all.
        restart_window: see ``max_restarts``.

    Raises:
        TypeError: something that a worker needs cannot be pickled.
        ValueError: no environment, numbers out of range, or a weight_updater that the schemes contradict.
        wsync.WorkerFailed: a worker could not start; carries its traceback. No worker is left.
        wsync.WorkerDied: a worker ended.
        wsync.SyncTimeout: a worker did not answer within ``worker_timeout``.
    """

    def __init__(
        self,
        create_env_fn: EnvMaker | Sequence[EnvMaker],
        policy: Any = None,
        *,
        sync: bool,
        start: Callable[[int], Pool[Any]],
        policy_factory: Callable[[], Any] | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        device: torch.device | str | Sequence[torch.device | str] | None = None,
        storing_device: torch.device | str | None = None,
        weight_sync_schemes: Mapping[str, wsync.WeightSyncScheme] | None = None,
        weight_updater: UpdaterOrFactory | None = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int = 0,
        cat_results: int | Literal["stack"] = "stack",
        track_policy_version: bool = True,
        threads: int = 1,
        on_worker_failure: OnFailure = "raise",
        worker_timeout: float | None = 600.0,
        max_restarts: int = 10,
        restart_window: float = 60.0,
    ) -> None:
        if not callable(create_env_fn) and not isinstance(create_env_fn, Iterable | None):
            what = type(create_env_fn).__name__
            raise TypeError(f"create_env_fn is a function that makes an environment, or a list of them, not a {what}")
        makers = [create_env_fn] if callable(create_env_fn) else list(create_env_fn or ())
        if not makers:
            raise ValueError("no environment: create_env_fn is a list of functions, one for each worker")
        self.num_workers = len(makers)
        failure_policy = FailurePolicy(on_worker_failure, worker_timeout, max_restarts, restart_window)
        super().__init__(
            policy,
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            storing_device=storing_device,
            weight_sync_schemes=weight_sync_schemes,
            track_policy_version=track_policy_version,
            weight_updater=weight_updater,
        )
        together = Together(cat_results)
        self._gathering: Gathering = together if sync else FirstCome()
        share = self._gathering.share(frames_per_batch, len(makers))
        devices = _spread(device, len(makers))
        options = [
            WorkerOptions(
                worker_idx=i,
                frames=share,
                buffers=self._gathering.buffers,
                device=devices[i],
                init_random_frames=-(-init_random_frames // len(makers)),
                max_frames_per_traj=max_frames_per_traj,
                threads=threads,
                log_level=logging.getLogger().getEffectiveLevel(),
            )
            for i in range(len(makers))
        ]
        carried = None if policy_factory is not None else policy
        for thing, name in ((carried, "policy"), (policy_factory, "policy_factory"), (makers, "create_env_fn")):
            pickled(thing, name)  # before any worker is started, and each alone: the error then says which it is
        pool = start(len(makers))
        # When the process ends (in the order of wsync.leaving), or nobody has this collector any more.
        self._leaving = util.Finalize(self, _leave, args=(weakref.ref(self), pool), exitpriority=1)
        self._members = Members(pool, failure_policy, self.weight_sync_schemes, self.failures)
        self._deliver_in_spite = None if on_worker_failure == "raise" else self._members.deliver
        try:
            for model_id, scheme in self.weight_sync_schemes.items():
                scheme.init_on_sender(model_id, context=self, num_workers=len(makers))
            parts = [Parts(maker, carried, policy_factory, self.weight_sync_schemes) for maker in makers]
            self._members.start([pickled(one, "schemes") for one in parts], options)
            self._gathering.require_joinable(self.remote_workers)
        except BaseException:
            self.shutdown()
            raise

    def _gather(self) -> TensorDictBase:
        try:
            batch = self._gathering.gather(self._members)
        except BaseException:  # KeyboardInterrupt, too: a later batch would be made of answers to what was asked now
            self.shutdown()
            raise
        self._members.complete()
        return batch

    def _look_into(self, error: wsync.WeightSyncError) -> None:
        try:
            if self._deliver_in_spite is None and isinstance(error, wsync.WorkerDied | wsync.SyncTimeout):
                self._members.blame(error)
        finally:
            if self._members.over:
                self.shutdown()

    def interrupt(self) -> None:
        """See BaseCollector: a batch that is not complete in two seconds raises ``wsync.SyncTimeout``.

        The seconds count from this call; once a batch is complete nobody is hurried any more.
        """
        if not self.closed:
            self._members.interrupt()

    @property
    def remote_workers(self) -> Sequence[Worker]:
        """The workers that there are, by index."""
        return sorted(self._members.pool.workers, key=lambda worker: worker.worker_idx)

    def set_seed(self, seed: int) -> int:
        """Worker ``w``'s environment ``i`` gets ``seed + w * num_envs + i``.

        A worker that is started anew gets the next free ones (random ones, if this was never called).
        """
        return self._members.seed(seed)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See BaseCollector."""
        super().load_state_dict(state_dict)
        self._members.resume(self.frames)

    def _refuse_restart(self, options: Mapping[str, Any], why: str) -> None:
        if options.get("on_worker_failure") == "restart":
            raise ValueError(f"{type(self).__name__} cannot restart these workers: {why}")

    def _close(self) -> None:
        try:
            self._members.close()
        finally:
            for scheme in self.weight_sync_schemes.values():
                scheme.shutdown()
            self._leaving.cancel()


def _spread(device: Any, workers: int) -> list[str | None]:
    """One device name per worker."""
    if device is None or isinstance(device, str | torch.device):
        return [None if device is None else str(device)] * workers
    if len(device) != workers:
        raise ValueError(f"{len(device)} devices for {workers} workers")
    return [str(one) for one in device]


def _leave(reference: weakref.ref[CrewCollector], pool: Pool[Any]) -> None:
    collector = reference()
    if collector is not None:
        collector.shutdown()
    else:  # its schemes have gone with it
        pool.close()
