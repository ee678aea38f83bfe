"""Collectors with several workers: what they have in common, wherever the workers are."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import util
from typing import Any, ClassVar, TypeVar

import cloudpickle
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

import wsync
from collectors import arguments
from collectors.arguments import EnvMaker, PolicyFactory
from collectors.base import BaseCollector
from collectors.batches import Staleness
from collectors.worker import WorkerOptions, WorkerSpec
from collectors.workers.gathering import Gathering, How, gathering
from collectors.workers.group import WorkerGroup
from collectors.workers.pool import WorkerHandle, WorkerPool
from collectors.workers.records import FailurePolicy, OnFailure

T = TypeVar("T")


class WorkerCollector(BaseCollector):
    """Collects batches with several workers, each with its own environments and its own copy of the policy.

    Args:
        create_env_fn: one function per worker; each makes an environment (lambdas work).
        policy: a module that reads "observation" and writes "action", or any function of a TensorDict, or a module that
            maps the tensor of the one to that of the other (it acts by a ``TensorDictModule`` around it); None: random
            actions. Workers get copies. The policy's other outputs are stored; those under "next" are its inputs in the
            next step, see ``collectors.rollouts.rollout``.
        sync: whether a batch has a share of every worker, and all wait for new weights; otherwise it is one worker's.
        start: starts a pool of the given number of workers.
        policy_factory: makes the policy in each worker, instead of a copy of ``policy``; one for all, or a list with
            one for each worker.
        frames_per_batch: rows of a batch (frames, and rows that "mask" excludes), over all workers (asynchronous: of
            one worker); the share of each is rounded up to whole steps of its environments.
        total_frames: frames after which iteration ends; -1: no end.
        device: the device of the acting policies; one for all, or one per worker.
        storing_device: the device that batches are stored on.
        weight_sync_schemes: ``{model_id: scheme}``, not initialised; by default one scheme for the policy that fits the
            workers, if that is a module with weights, or if there is a ``policy_factory``: then workers keep the
            weights that they have made until others are sent. Of functions it says ``weight_sync_schemes={}``.
        weight_updater: one of the older API (deprecated), or a function that makes it.
        max_frames_per_traj: episodes are truncated after this number of steps.
        init_random_frames: number of first frames with random actions, over all workers.
        exploration_type: how a policy with a distribution (``ProbabilisticActor``, ours) acts: ``RANDOM`` samples, and
            ``DETERMINISTIC``, ``MODE``, ``MEAN`` do not; None: as the policy's ``default_interaction_type`` says.
        cat_results: synchronous: how the workers' batches are joined: ``"stack"`` with a new leading dimension, or
            along one of their dimensions (0: environments; the last one is time, and joins unrelated frames).
        track_policy_version: whether batches have ``policy_version``.
        replay_buffer: its ``extend`` gets the frames of each batch, ``[N]``, as TorchRL's buffers take them; iteration
            yields None then.
        threads: torch threads of each worker.
        on_worker_failure: what happens when a worker dies, raises, or does not answer in time: ``"raise"``; ``"drop"``:
            continue without it (a synchronous batch is smaller by its share); or ``"restart"``: the others continue;
            a new worker replaces it from the next batch on, with the newest weights of every model and an unused seed.
            Frames of an unfinished batch are lost, and not counted.
        worker_timeout: seconds in which a worker has to answer (a batch, its environments); a late one is disconnected,
            and killed if the collector has started its process.
        max_restarts: more failures of a worker than this since its last batch are raised.
        run_ahead: asynchronous: how many further batches a worker may begin while a finished one waits for the trainer:
            1 by default. Of n workers, up to n × (run_ahead + 1) batches are begun and not taken. A worker uses new
            weights from its next step on, also within a batch.
        max_staleness: versions, at most, that the newest weights may be ahead of those that acted in any frame of a
            batch when the batch is delivered; None: no limit. A worker's batch that is older is dropped and counted
            (``staleness``), and the worker collects another one; more than 10 + ``run_ahead`` in a row are a
            RuntimeError. With one update for each batch and equally fast workers, n × (run_ahead + 1) drops none.

    Raises:
        TypeError: an object that a worker needs cannot be pickled; or the policy cannot be called with one argument.
        ValueError: there is no environment, a number is out of range, ``weight_updater`` contradicts the schemes, or
            the policy is too large to be sent to a worker (1 GiB; worker processes, TCP).
        RuntimeError: a scheme is initialised already.
        wsync.WorkerFailed: a worker could not start; carries its traceback. All workers are ended.
        wsync.WorkerDied: a worker ended.
        wsync.SyncTimeout: a worker did not answer within ``worker_timeout``.
    """

    _host: str | None = None  # the interface on which workers reach this process; None: they share its memory

    def __init__(
        self,
        create_env_fn: EnvMaker | Sequence[EnvMaker],
        policy: Any = None,
        *,
        sync: bool,
        start: Callable[[int], WorkerPool],
        policy_factory: PolicyFactory | Sequence[PolicyFactory] | None = None,
        device: torch.device | str | Sequence[torch.device | str] | None = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int = 0,
        exploration_type: InteractionType | str | None = InteractionType.RANDOM,
        cat_results: How = "stack",
        threads: int = 1,
        on_worker_failure: OnFailure = "raise",
        worker_timeout: float | None = 600.0,
        max_restarts: int = 10,
        run_ahead: int | None = None,
        max_staleness: int | None = None,
        **options: Any,
    ) -> None:
        self.num_workers = count = len(makers := arguments.env_makers(create_env_fn))
        failure_policy = FailurePolicy(on_worker_failure, worker_timeout, max_restarts)
        factories = arguments.policy_factory_of_each(policy_factory, count)
        arguments.check_numbers(max_frames_per_traj, init_random_frames=init_random_frames, threads=threads)
        self._gathering: Gathering = gathering(sync, cat_results, run_ahead)
        staleness = Staleness(max_staleness, self._gathering.buffers - 1)
        super().__init__(policy, policy_factory=policy_factory, staleness=staleness, **options)
        arguments.check_fetching(self._worker_schemes)
        arguments.initialise(policy, makers[0])
        limits = {"init_random_frames": -(-init_random_frames // count), "max_frames_per_traj": max_frames_per_traj}
        common = WorkerOptions(
            worker_idx=0,
            frames=-(-self.frames_per_batch // count) if sync else self.frames_per_batch,
            buffers=self._gathering.buffers,
            acting={**limits, "exploration_type": exploration_type},
            threads=threads,
            log_level=logging.getLogger().getEffectiveLevel(),
        )
        devices = enumerate(arguments.device_of_each(device, count))
        of_each = [replace(common, worker_idx=i, device=device) for i, device in devices]
        sent_policy = None if policy_factory is not None else policy
        for name, value in {"policy": sent_policy, "policy_factory": policy_factory, "create_env_fn": makers}.items():
            arguments.pickled(value, name)  # each alone, before workers are started: the error names it
        pool = start(count)
        # The workers end at exit (in the order of wsync's own finalizers), or when the collector is garbage.
        self._finalizer = util.Finalize(self, _finalize, args=(weakref.ref(self), pool), exitpriority=1)
        self._group = WorkerGroup(pool, failure_policy, self._worker_schemes, self.failures)
        made = zip(makers, factories, strict=True)
        specs = [WorkerSpec(env, sent_policy, factory, self._worker_schemes) for env, factory in made]
        self._start(specs, of_each)

    def _default_scheme(self) -> wsync.WeightSyncScheme:
        return super()._default_scheme() if self._host is None else wsync.DistributedWeightSyncScheme(host=self._host)

    def _start(self, specs: Sequence[WorkerSpec], options: Sequence[WorkerOptions]) -> None:
        try:
            for model_id, scheme in self._worker_schemes.items():
                scheme.init_on_sender(model_id, context=self, num_workers=self.num_workers)
            # After init_on_sender: the pickles have the schemes' addresses.
            sent = [arguments.pickled(spec, "weight-sync scheme", arguments.REMEDY_GETSTATE) for spec in specs]
            self._group.build(sent, options)
            self._gathering.check_shapes(self.remote_workers, self.frames_per_batch)
            self._connect_hosted()
            self._group.connect()
        except BaseException:  # also Ctrl-C: the workers that have been started are ended
            self.shutdown()
            raise

    def _find_all(self, path: str) -> list[Any]:
        return [cloudpickle.loads(found) for found in self._group.find(path)]

    def _gather(self) -> TensorDictBase:
        self._group.batch_begun()
        try:
            batch = self._gathering.gather(self._group, self._admits)
        except BaseException:  # also KeyboardInterrupt: the next batch would get answers to commands of this one
            self.shutdown()
            raise
        self._group.batch_completed()
        return batch

    def _deliver(self, send: Callable[[Any, Any], T], weights: Any, worker_ids: int | Sequence[int] | None) -> T | None:
        try:
            if self._group.failure_policy.on_failure != "raise":
                self._require_open()  # also not in a forked child: messages of workers would be read there
                return self._group.deliver(send, weights, worker_ids)
            try:
                return send(weights, worker_ids)
            except (wsync.WorkerDied, wsync.SyncTimeout) as error:
                self._group.raise_worker_error(error)
                raise
        except BaseException as error:  # also Ctrl-C: messages of workers may have been lost
            if self._group.ended_by_failure or not isinstance(error, Exception):
                self.shutdown()
            raise

    def interrupt(self) -> None:
        """Limit the wait for the batch in progress, or else for the next one, to two seconds (``SyncTimeout``)."""
        if not self.closed:
            self._group.interrupt()

    @property
    def remote_workers(self) -> Sequence[WorkerHandle]:
        """The current workers, by index: ``worker_idx``, and ``process`` of one that this process has started."""
        return sorted(self._group.pool.workers, key=lambda worker: worker.worker_idx)

    def _seed_from(self, first: int) -> int:
        return self._group.seed(first)

    def _resume(self) -> None:
        self._group.resume(self.frames)

    def _refuse_restart(self, options: Mapping[str, Any], why: str) -> None:
        if options.get("on_worker_failure") == "restart":
            raise ValueError(f"{type(self).__name__} cannot restart these workers: {why}")

    def _close(self) -> None:
        with ExitStack() as steps:  # last in, first called; all are called, and an error is raised then
            for scheme in self.weight_sync_schemes.values():
                steps.callback(scheme.shutdown)
            steps.callback(self._group.close)
        self._finalizer.cancel()  # not after Ctrl-C, which may have left workers alive


def _finalize(reference: weakref.ref[WorkerCollector], pool: WorkerPool) -> None:
    collector = reference()
    if collector is not None:
        collector.shutdown()
    else:  # the schemes were garbage as well, and their connections are closed
        pool.close()


class MultiCollector(WorkerCollector):
    """Collects batches in worker processes on this machine; batches are in shared memory.

    ``MultiCollector(sync=True)`` is a ``MultiSyncCollector``: a batch has a share of every worker, and all wait for new
    weights. ``sync=False`` is a ``MultiAsyncCollector``: a batch is one worker's.

    The other arguments, and the errors, are those of ``WorkerCollector``. TypeError: ``sync`` is missing, or
    contradicts the class.
    """

    _sync: ClassVar[bool]

    def __new__(cls, *_: Any, sync: bool | None = None, **__: Any) -> MultiCollector:
        """Choose the class by ``sync``."""
        if cls is not MultiCollector:
            return super().__new__(cls)
        if sync is None:
            raise TypeError("MultiCollector needs sync=True or sync=False")
        chosen: Any = MultiSyncCollector if sync else MultiAsyncCollector
        return super().__new__(chosen)

    def __init__(self, create_env_fn: Any, policy: Any = None, *, sync: bool | None = None, **options: Any) -> None:
        if sync not in (None, self._sync):
            raise TypeError(f"{type(self).__name__} has sync={self._sync}; MultiCollector takes either")
        super().__init__(create_env_fn, policy, sync=self._sync, start=WorkerPool, **options)


class MultiSyncCollector(MultiCollector):
    """A batch has a share of every worker, with one version unless another thread updates the weights meanwhile."""

    _sync = True


class MultiAsyncCollector(MultiCollector):
    """Workers collect while the trainer learns; a batch is the next one that any worker has completed.

    A worker runs ahead of the trainer by ``run_ahead`` batches (1 by default): see ``WorkerCollector``.
    """

    _sync = False
