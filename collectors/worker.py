"""The worker's side of a collector: act in environments, fill batches, receive weights."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDict

import wsync
from collectors.arguments import make_env
from collectors.batches import BatchLayout
from collectors.environments.vector import refuse_own_statistics
from collectors.output import keep_output_harmless
from collectors.rollouts.rollout import Actor, policy_scheme
from collectors.rollouts.sampled import check_policy
from collectors.workers.connections import Connection


@dataclass(frozen=True)
class WorkerOptions:
    """Settings of one worker."""

    worker_idx: int
    frames: int  # rows of a batch; rounded up to a multiple of the number of environments
    buffers: int  # batches in flight: 1 for synchronous collection, else one more than the worker may run ahead
    device: str | None = None  # of the policy
    acting: Mapping[str, Any] = field(default_factory=dict)  # options of its ``Rollout``
    threads: int = 1  # of torch, in the worker's process
    log_level: int = logging.WARNING


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is built from; sent as a pickle of its own, so that no memory is shared with the trainer."""

    create_env_fn: Any
    policy: Any
    policy_factory: Any  # makes the policy, if there is one
    schemes: Mapping[str, wsync.WeightSyncScheme]  # by model id; those that the worker receives by


class RolloutWorker:
    """The environments, the policy and the schemes of a worker, made of a pickled ``WorkerSpec``.

    Attributes:
        num_envs: number of environments.
        layout: the layout of a batch.
        buffers: the memory of its batches.
        memory: where the trainer can map it; None: nowhere.
    """

    def __init__(self, spec: bytes, options: WorkerOptions, *, share: bool) -> None:
        unpickled: WorkerSpec = cloudpickle.loads(spec)
        self._worker_idx = options.worker_idx
        self._schemes = dict(unpickled.schemes)
        factory = unpickled.policy_factory
        with ExitStack() as opened:
            env = make_env(unpickled.create_env_fn)
            opened.callback(env.close)
            refuse_own_statistics(env.stepper.driver.env)
            policy = unpickled.policy if factory is None else factory()
            check_policy(policy)
            acting = policy_scheme(self._schemes)
            self._actor = Actor(env, policy, acting, device=options.device, **options.acting)
            for model_id, scheme in self._schemes.items():
                opened.callback(scheme.shutdown)
                scheme.init_on_receiver(model_id, context=self._actor, worker_idx=options.worker_idx)
            self.num_envs: int = env.num_envs
            layout = self.layout = BatchLayout.of(self._actor.rollout.buffer(-(-options.frames // self.num_envs)))
            self.memory = layout.create_memory(options.buffers) if share else None
            self.buffers = layout.buffers(options.buffers, self.memory)
            self._batches: list[TensorDict] = [layout.view(buffer) for buffer in self.buffers]
            self.close = opened.pop_all().close  # shuts the schemes down and closes the environments

    def execute(self, command: str, argument: Any) -> tuple[str, Any]:
        """Execute a command of the trainer.

        ``connect`` (the model ids to connect) comes before ``seed`` (the seed), ``resume`` (frames of an earlier
        run) and ``collect`` (the index of a buffer). ``find`` (a path) is answered by the pickled object there.

        Returns:
            The kind and the value of the answer; ``("", None)``: no answer.
        """
        if command == "find":
            return "found", cloudpickle.dumps(self._actor.find(argument))
        if command == "connect":
            for model_id in argument:
                self._schemes[model_id].connect(worker_idx=self._worker_idx)
            return "connected", None
        if command == "collect":
            index: int = argument
            self._actor.rollout.collect(self._batches[index])
            return "batch", index
        if command == "seed":
            self._actor.rollout.seed(argument)
        elif command == "resume":
            self._actor.rollout.frames = argument
        return "", None


def serve(connection: Connection) -> None:
    """Execute the trainer's commands until it sends ``end`` or closes the connection; the caller closes this end.

    The first command is ``("build", (spec, options))``, and its answer ``("ready", (layout, number of buffers, number
    of environments, memory))``; ``RolloutWorker.execute`` takes the others. An error is reported before the schemes are
    closed: the trainer would otherwise get only their end. An error of closing is printed: then the trainer has closed
    the connection, or has the worker's error.
    """
    try:
        with ExitStack() as opened, suppress(ConnectionError):  # only the connection's: users' errors are sent
            _serve(connection, opened)
    except (Exception, SystemExit):  # noqa: BLE001  environments may raise anything as they close
        traceback.print_exc()


def _serve(connection: Connection, opened: ExitStack) -> None:
    worker: RolloutWorker | None = None
    value: Any
    while True:
        command, argument = connection.receive()
        if command == "end":
            return
        try:
            if worker is None:
                spec, options = argument
                configure_process(options)
                worker = RolloutWorker(spec, options, share=connection.shares_memory)
                opened.callback(worker.close)
                kind, value = "ready", (worker.layout, options.buffers, worker.num_envs, worker.memory)
            else:
                kind, value = worker.execute(command, argument)
        except (Exception, SystemExit):  # noqa: BLE001  raised again in the trainer, with this traceback
            connection.send("error", traceback.format_exc())
            return
        if kind == "batch" and worker is not None:
            connection.send_batch(value, worker.buffers[value])
        elif kind:
            connection.send(kind, value)


def configure_process(options: WorkerOptions) -> None:
    """Set torch's threads, logging and output in a process that runs one worker and nothing else."""
    keep_output_harmless()
    torch.set_num_threads(options.threads)
    name = f"worker {options.worker_idx}"
    logging.basicConfig(level=options.log_level, format=f"[{name}] %(levelname)s %(name)s: %(message)s", force=True)
