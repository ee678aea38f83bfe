"""Collectors with worker processes on the trainer's machine: synchronous, and asynchronous."""

from __future__ import annotations

import atexit
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDictBase

import wsync
from collectors.base import BaseCollector, EnvMaker
from collectors.pool import Pool, Worker
from collectors.single import pickled
from collectors.worker import Parts, WorkerOptions


class MultiCollector(BaseCollector):
    """Gathers batches in worker processes, each with its own environments and its own copy of the policy.

    ``MultiCollector(sync=True)`` is a ``MultiSyncCollector``, ``sync=False`` a ``MultiAsyncCollector``.

    Args:
        create_env_fn: one function per worker; each makes an environment (lambdas are fine).
        policy: a module that reads "observation" and writes "action"; or any function of a TensorDict; None acts at
            random. Workers get copies.
        policy_factory: makes the policy in each worker, instead.
        frames_per_batch: frames of a batch, over all workers (of each worker's batch, if asynchronous).
        total_frames: the end; -1 for none.
        device: where the policies act; one, or one per worker.
        storing_device: where batches are put.
        weight_sync_schemes: ``{model_id: scheme}``; by default one through shared memory for the policy.
        max_frames_per_traj: episodes are truncated after so many steps.
        init_random_frames: so many frames, over all workers, begin with random actions.
        cat_results: how workers' batches are joined: along a dimension (0), or ``"stack"`` with a new leading one.
        track_policy_version: whether batches have ``policy_version``.
        sync: whether all workers wait for each other, and for new weights.
        threads: torch threads of each worker.

    Raises:
        TypeError: something that a worker needs cannot be pickled.
        ValueError: no environment, or numbers out of range.
        wsync.WorkerFailed: a worker could not start; carries its traceback. No process is left.
    """

    def __new__(cls, *_: Any, sync: bool | None = None, **__: Any) -> MultiCollector:
        """Choose the class that ``sync`` says."""
        if cls is not MultiCollector:
            return super().__new__(cls)
        if sync is None:
            raise TypeError("MultiCollector needs sync=True or sync=False")
        chosen: Any = MultiSyncCollector if sync else MultiAsyncCollector
        return super().__new__(chosen)

    _buffers = 1

    def __init__(
        self,
        create_env_fn: Sequence[EnvMaker],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        device: torch.device | str | Sequence[torch.device | str] | None = None,
        storing_device: torch.device | str | None = None,
        weight_sync_schemes: Mapping[str, wsync.WeightSyncScheme] | None = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int = 0,
        cat_results: int | Literal["stack"] = 0,
        track_policy_version: bool = True,
        sync: bool | None = None,
        threads: int = 1,
    ) -> None:
        super().__init__(
            policy,
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            storing_device=storing_device,
            weight_sync_schemes=weight_sync_schemes,
            track_policy_version=track_policy_version,
        )
        makers = [create_env_fn] if callable(create_env_fn) else list(create_env_fn or ())
        if not makers:
            raise ValueError("no environment: create_env_fn is a list of functions, one for each worker")
        if cat_results != "stack" and not isinstance(cat_results, int):
            raise ValueError(f"cat_results is a dimension or 'stack', not {cat_results!r}")
        self.cat_results = cat_results
        self.num_workers = len(makers)
        per_worker = self._share(frames_per_batch, len(makers))
        devices = _spread(device, len(makers))
        for model_id, scheme in self.weight_sync_schemes.items():
            scheme.init_on_sender(model_id, context=self, num_workers=len(makers))
        schemes = self.weight_sync_schemes
        carried = None if policy_factory is not None else policy
        copies = pickled(carried, "policy"), pickled(policy_factory, "policy_factory"), pickled(schemes, "schemes")
        del copies  # each alone first: the error then says which it is
        parts = [pickled(Parts(maker, carried, policy_factory, schemes), "create_env_fn") for maker in makers]
        options = [
            WorkerOptions(
                worker_idx=i,
                trainer=os.getpid(),
                frames=per_worker,
                buffers=self._buffers,
                device=devices[i],
                init_random_frames=-(-init_random_frames // len(makers)),
                max_frames_per_traj=max_frames_per_traj,
                threads=threads,
                log_level=logging.getLogger().getEffectiveLevel(),
            )
            for i in range(len(makers))
        ]
        self._pool = Pool(parts, options)
        atexit.register(_shut_down, weakref.ref(self))  # before multiprocessing's own, which would wait for workers
        try:
            self._connect()
        except BaseException:
            self.shutdown()
            raise

    def _share(self, frames: int, workers: int) -> int:
        """The frames of a batch that each worker gathers."""
        share = -(-frames // workers)
        if share * workers != frames:
            warnings.warn(
                f"frames_per_batch={frames} does not divide by {workers} workers: each takes {share}, "
                f"{share * workers} in all",
                stacklevel=4,
            )
        return share

    def _connect(self) -> None:
        self._pool.hear_all("ready")
        self._pool.tell(self._pool.workers, "connect")
        for scheme in self.weight_sync_schemes.values():
            scheme.connect()
        self._pool.hear_all("connected")

    @property
    def remote_workers(self) -> Sequence[Worker]:
        """The worker processes, by index."""
        return self._pool.workers if "_pool" in self.__dict__ else ()

    def cascade_weights(self, model_id: str) -> None:
        """Pass on an update that this collector's own model has just been given by a scheme above."""
        self.update_policy_weights_(model_id=model_id)

    def set_seed(self, seed: int) -> int:
        """Worker ``w``'s environment ``i`` gets ``seed + w * num_envs + i``."""
        for worker in self._pool.workers:
            self._pool.tell([worker], "seed", seed)
            seed += worker.num_envs
        return seed

    def _close(self) -> None:
        if "_pool" in self.__dict__:
            self._pool.close()
        for scheme in self.weight_sync_schemes.values():
            scheme.shutdown()
        atexit.unregister(_shut_down)


class MultiSyncCollector(MultiCollector):
    """All workers gather their share of a batch, and then wait: a batch is of one version."""

    def _gather(self) -> TensorDictBase:
        self._pool.tell(self._pool.workers, "collect", 0)
        batches: Any = [worker.batches[index] for worker, index in self._heard_or_shut("batch")]
        how: Any = self.cat_results
        joined: Any = torch.stack(batches) if how == "stack" else torch.cat(batches, how)
        return joined

    def _heard_or_shut(self, expected: str) -> list[tuple[Worker, Any]]:
        try:
            return self._pool.hear_all(expected)
        except wsync.WeightSyncError:
            self.shutdown()
            raise


class MultiAsyncCollector(MultiCollector):
    """Workers go on while the trainer learns; a batch is the next one that any worker has finished."""

    _buffers = 2  # one is being filled while the other waits to be taken
    _underway = False

    def _share(self, frames: int, workers: int) -> int:
        return frames

    def _gather(self) -> TensorDictBase:
        pool = self._pool
        if not self._underway:
            self._underway = True
            for buffer in range(self._buffers):
                pool.tell(pool.workers, "collect", buffer)
        try:
            worker, buffer = pool.hear("batch", pool.workers)
        except wsync.WeightSyncError:
            self.shutdown()
            raise
        batch: Any = worker.batches[buffer]
        batch = batch.clone()
        pool.tell([worker], "collect", buffer)
        return batch


def _spread(device: Any, workers: int) -> list[str | None]:
    """One device name per worker."""
    if device is None or isinstance(device, str | torch.device):
        return [None if device is None else str(device)] * workers
    if len(device) != workers:
        raise ValueError(f"{len(device)} devices for {workers} workers")
    return [str(one) for one in device]


def _shut_down(reference: weakref.ref[MultiCollector]) -> None:
    collector = reference()
    if collector is not None:
        collector.shutdown()
