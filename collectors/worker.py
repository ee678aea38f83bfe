"""The worker's side of a collector: act in environments, fill batches, receive weights."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDict

import wsync
from collectors.arguments import has_weights, make_env
from collectors.batch_layout import BatchLayout
from collectors.exploration import warn_if_greedy
from collectors.rollouts.acting import Actor, policy_scheme
from collectors.rollouts.sampled import UnusablePolicy, check_policy
from collectors.workers.connections import Connection, Disconnected

RAISED = ("error", "unusable")  # what a worker answers that has raised, and ends; the second for UnusablePolicy
Configure = Callable[["WorkerOptions"], object]
"""Applies the options to this process; called before anything is built."""

Answer = tuple[str, Any]
"""A kind and a value: see ``RolloutWorker.execute``."""


@dataclass(frozen=True)
class WorkerOptions:
    """Settings of one worker."""

    worker_idx: int
    frames: int  # rows of a batch; rounded up to a multiple of the number of environments
    buffers: int  # batches in flight: 1 for synchronous collection, else one more than the worker may run ahead
    device: str | None = None  # of the policy
    init_random_frames: int = 0
    max_frames_per_traj: int | None = None
    threads: int = 1  # of torch, in the worker's process
    log_level: int = logging.WARNING


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is built from; sent as a pickle of its own, so that no memory is shared with the trainer."""

    create_env_fn: Any
    policy: Any
    policy_factory: Any  # makes the policy, if there is one
    schemes: Mapping[str, wsync.WeightSyncScheme]  # by model id; those that the worker receives by
    scheme_is_assumed: bool = False  # whether to leave the schemes out if the policy has no weights


class RolloutWorker:
    """The environments, the policy and the schemes of a worker.

    Attributes:
        num_envs: number of environments.
        layout: the layout of a batch.
    """

    def __init__(self, spec: bytes, options: WorkerOptions) -> None:
        unpickled: WorkerSpec = cloudpickle.loads(spec)
        self._worker_idx = options.worker_idx
        self._schemes = dict(unpickled.schemes)
        factory = unpickled.policy_factory
        with ExitStack() as opened:
            env = make_env(unpickled.create_env_fn)
            opened.callback(env.close)
            policy = unpickled.policy if factory is None else factory()
            check_policy(policy)
            if factory is not None and options.worker_idx == 0:  # one warning, not one of each worker
                warn_if_greedy(policy, same_process=True)
            self._has_weights = has_weights(policy)
            if unpickled.scheme_is_assumed and not self._has_weights:
                self._schemes = {}
            self._actor = Actor(
                env,
                policy,
                policy_scheme(self._schemes),
                device=options.device,
                init_random_frames=options.init_random_frames,
                max_frames_per_traj=options.max_frames_per_traj,
            )
            for model_id, scheme in self._schemes.items():
                opened.callback(scheme.shutdown)
                scheme.init_on_receiver(model_id, context=self._actor, worker_idx=options.worker_idx)
            self.num_envs: int = env.num_envs
            self.layout = BatchLayout.of(self._actor.rollout.buffer(-(-options.frames // self.num_envs)))
            self._opened = opened.pop_all()
        self.batches: list[TensorDict] = []  # that ``collect`` fills

    def execute(self, command: str, argument: Any) -> Answer | None:
        """Execute a command of the trainer.

        ``connect`` (the model ids to connect) comes before ``seed`` (the seed), ``resume`` (frames of an earlier
        run) and ``collect`` (the index of a buffer) in any order. ``ask`` may come at any time, with one of
        ``("has_weights", None)``, whether the policy is a module that has any, and ``("find", path)``, the pickled
        object at ``path``.

        Returns:
            ``("connected", None)``, ``("batch", index)``, ``("answer", answer)``, or None for a command without one.
        """
        if command == "ask":
            question, path = argument
            found = self._has_weights if question == "has_weights" else cloudpickle.dumps(self._actor.find(path))
            return "answer", found
        if command == "connect":
            for model_id in argument:
                self._schemes[model_id].connect(worker_idx=self._worker_idx)
            return "connected", None
        if command == "collect":
            self._actor.rollout.collect(self.batches[argument])
            return "batch", argument
        if command == "seed":
            self._actor.rollout.seed(argument)
        elif command == "resume":
            self._actor.rollout.frames = argument
        return None

    def close(self) -> None:
        """Shut the schemes down and close the environments."""
        self._opened.close()


class CommandExecutor:
    """Executes a trainer's commands; an error is the answer, after which all commands are ignored.

    Attributes:
        buffers: the memory of the batches.
        failed: whether a command has raised.
    """

    def __init__(self, configure: Configure, *, share: bool = False) -> None:
        self._configure, self._share = configure, share
        self._worker: RolloutWorker | None = None
        self.buffers: list[torch.Tensor] = []
        self.failed = False

    def execute(self, command: str, argument: Any) -> Answer | None:
        """Execute ``build`` (spec, options), then the commands of ``RolloutWorker.execute``.

        Returns:
            The answer; to ``build`` it is ``("ready", (layout, number of buffers, number of environments, memory))``.
            After an error it is ``("error", traceback)`` or ``("unusable", traceback)``.
        """
        if self.failed:
            return None
        try:
            if self._worker is None:
                return "ready", self._build(*argument)
            return self._worker.execute(command, argument)
        except (Exception, SystemExit) as error:  # noqa: BLE001  raised again in the trainer, with this traceback
            self.failed = True
            return "unusable" if isinstance(error, UnusablePolicy) else "error", traceback.format_exc()

    def _build(self, spec: bytes, options: WorkerOptions) -> tuple[BatchLayout, int, int, str | None]:
        self._configure(options)
        self._worker = worker = RolloutWorker(spec, options)
        memory = worker.layout.create_memory(options.buffers) if self._share else None
        count, layout = options.buffers, worker.layout
        self.buffers = layout.allocate(count) if memory is None else layout.open(memory, count)
        worker.batches = [layout.view(buffer) for buffer in self.buffers]
        return layout, count, worker.num_envs, memory

    def close(self) -> None:
        """Shut the schemes down and close the environments. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


def serve(connection: Connection, configure: Configure | None = None) -> None:
    """Execute the trainer's commands until it sends ``end`` or closes the connection; the caller closes this end.

    An error is reported before the schemes are closed: the trainer would otherwise get only their end. An error of
    closing is printed: then the trainer has closed the connection, or has the worker's error.
    """
    executor = CommandExecutor(configure or configure_process, share=connection.shares_memory)
    try:
        with closing(executor):
            while not executor.failed:
                command, argument = connection.receive()
                if command == "end":
                    return
                kind, value = executor.execute(command, argument) or ("", None)
                if kind == "batch":
                    connection.send_batch(value, executor.buffers[value])
                elif kind:
                    connection.send(kind, value, wait=kind in RAISED)
    except Disconnected:
        pass
    except (Exception, SystemExit):  # noqa: BLE001  environments may raise anything as they close
        traceback.print_exc()


def configure_process(options: WorkerOptions) -> None:
    """Set torch's threads and logging in a process that runs one worker and nothing else."""
    torch.set_num_threads(options.threads)
    name = f"worker {options.worker_idx}"
    logging.basicConfig(level=options.log_level, format=f"[{name}] %(levelname)s %(name)s: %(message)s", force=True)
