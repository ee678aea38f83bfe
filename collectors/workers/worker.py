"""What a worker does, whoever brings it the commands: act, gather batches, and let its weights be updated."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDict

import wsync
from collectors.making import make_env
from collectors.rollouts.acting import Actor, policy_scheme
from collectors.workers.shared_batch import BatchPlan


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker needs to know besides what it acts with.

    Attributes:
        worker_idx: its index.
        frames: in a batch, rounded up to a multiple of the environments.
        buffers: batches that can be underway: 1 for synchronous collection, 2 so that it need not wait.
        device: where the policy acts.
        threads: for torch; workers must not fight over cores.
        log_level: of the root logger.
    """

    worker_idx: int
    frames: int
    buffers: int
    device: str | None = None
    init_random_frames: int = 0
    max_frames_per_traj: int | None = None
    threads: int = 1
    log_level: int = logging.WARNING


@dataclass(frozen=True)
class Parts:
    """What a worker acts with, pickled by the trainer into bytes of its own: nothing is shared."""

    create_env_fn: Any
    policy: Any
    policy_factory: Any
    schemes: Mapping[str, wsync.WeightSyncScheme]


class Core:
    """A worker's environment, policy and schemes, and the batches that it fills.

    The trainer's commands are ``connect``, then any number of ``seed`` (a number), ``resume`` (the frames of an earlier
    run) and ``collect`` (a buffer's index).

    Args:
        parts: pickled ``Parts``.
        options: see there.
    """

    def __init__(self, parts: bytes, options: WorkerOptions) -> None:
        unpickled: Parts = cloudpickle.loads(parts)
        self._worker_idx = options.worker_idx
        self._schemes = dict(unpickled.schemes)
        factory = unpickled.policy_factory
        with ExitStack() as opened:
            env = make_env(unpickled.create_env_fn)
            opened.callback(env.close)
            self._actor = Actor(
                env,
                unpickled.policy if factory is None else factory(),
                device=options.device,
                init_random_frames=options.init_random_frames,
                max_frames_per_traj=options.max_frames_per_traj,
            )
            for model_id, scheme in self._schemes.items():
                opened.callback(scheme.shutdown)
                scheme.init_on_receiver(model_id, context=self._actor, worker_idx=options.worker_idx)
            self.num_envs: int = env.num_envs
            self.plan = BatchPlan.of(self._actor.rollout.buffer(-(-options.frames // self.num_envs)))
            self._opened = opened.pop_all()
        self._batches: list[TensorDict] = []

    def fill(self, buffers: Sequence[torch.Tensor]) -> None:
        """Use ``buffers`` for the batches from now on; they are laid out as ``plan`` says."""
        self._batches = [self.plan.view(buffer) for buffer in buffers]

    def obey(self, command: str, argument: Any) -> tuple[str, Any] | None:
        """Do what the trainer says; the answer, if there is one: ``connected``, or ``batch`` and its buffer's index."""
        if command == "connect":
            self._connect()
            return "connected", None
        if command == "seed":
            self._actor.rollout.seed(argument)
            return None
        if command == "resume":
            self._actor.rollout.frames = argument
            return None
        index: int = argument
        self._actor.rollout.collect(self._batches[index])
        return "batch", index

    def _connect(self) -> None:
        for scheme in self._schemes.values():
            scheme.connect(worker_idx=self._worker_idx)
        followed = policy_scheme(self._schemes)
        if followed is not None:
            self._actor.follow(followed)

    def close(self) -> None:
        """Let schemes and environments go."""
        self._opened.close()


def be_a_worker(options: WorkerOptions) -> None:
    """Settings of a process that is nothing but a worker."""
    torch.set_num_threads(options.threads)
    name = f"worker {options.worker_idx}"
    logging.basicConfig(level=options.log_level, format=f"[{name}] %(levelname)s %(name)s: %(message)s", force=True)


def leave_signals_to_the_trainer() -> None:
    """Ctrl-C reaches the whole process group: the trainer ends its workers then, in order."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def end_with_process(trainer: int) -> None:
    """End this process when the trainer's dies, whatever it is doing."""
    try:
        end_with(os.pidfd_open(trainer))
    except ProcessLookupError:
        os._exit(1)


def end_with(descriptor: int) -> Callable[[], None]:
    """End this process when ``descriptor`` is readable or closed by its other end, whatever it is doing.

    Returns:
        A function that ends the watch instead.
    """
    enough = os.eventfd(0, os.EFD_CLOEXEC)

    def wait() -> None:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.register(enough, select.POLLIN)
        if enough not in (ready for ready, _ in poller.poll()):
            os._exit(1)

    thread = threading.Thread(target=wait, name="trainer-watch", daemon=True)
    thread.start()

    def stop() -> None:
        os.eventfd_write(enough, 1)
        thread.join()
        os.close(enough)

    return stop
