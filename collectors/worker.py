"""A worker process: builds its environment and policy, connects its schemes, and gathers batches on demand."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch

import wsync
from collectors.acting import Actor, policy_scheme
from collectors.base import make_env
from collectors.shared_batch import BatchPlan


@dataclass(frozen=True)
class WorkerOptions:
    """What a worker needs to know besides what it acts with.

    Attributes:
        worker_idx: its index.
        trainer: the trainer's process; when it dies, the worker ends.
        frames: in a batch, rounded up to a multiple of the environments.
        buffers: batches that can be underway: 1 for synchronous collection, 2 so that it need not wait.
        device: where the policy acts.
        threads: for torch; workers must not fight over cores.
        log_level: of the root logger.
    """

    worker_idx: int
    trainer: int
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


def main(line: Connection, parts: bytes, options: WorkerOptions) -> None:
    """Serve the trainer at the other end of ``line`` until it says so, or is gone.

    The trainer says ``connect``, then any number of ``("collect", buffer)`` and ``("seed", n)``, then hangs up.
    Answers are ``("ready", plan)`` with the batches' memory file, ``("connected", None)``, ``("batch", buffer)``, or
    ``("error", traceback)`` and the end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the trainer ends its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_with(options.trainer)
    torch.set_num_threads(options.threads)
    name = f"worker {options.worker_idx}"
    logging.basicConfig(level=options.log_level, format=f"[{name}] %(levelname)s %(name)s: %(message)s", force=True)
    try:
        _Worker(line, cloudpickle.loads(parts), options).serve()
    except (EOFError, ConnectionError):
        return  # the trainer has hung up
    except Exception:  # noqa: BLE001  whatever it is, the trainer raises it again with this traceback
        line.send(("error", traceback.format_exc()))
    finally:
        line.close()


def _end_with(trainer: int) -> None:
    """End this process when the trainer dies, whatever it is doing."""
    try:
        descriptor = os.pidfd_open(trainer)
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.poll()
        os._exit(1)

    threading.Thread(target=wait, name="trainer-watch", daemon=True).start()


class _Worker:
    def __init__(self, line: Connection, parts: Parts, options: WorkerOptions) -> None:
        self._line = line
        self._options = options
        self._schemes = dict(parts.schemes)
        self._actor = Actor(
            make_env(parts.create_env_fn),
            parts.policy if parts.policy_factory is None else parts.policy_factory(),
            device=options.device,
            init_random_frames=options.init_random_frames,
            max_frames_per_traj=options.max_frames_per_traj,
        )

    def serve(self) -> None:
        for model_id, scheme in self._schemes.items():
            scheme.init_on_receiver(model_id, context=self._actor, worker_idx=self._options.worker_idx)
        rollout, options = self._actor.rollout, self._options
        plan = BatchPlan.of(rollout.buffer(-(-options.frames // self._actor.env.num_envs)))
        memory = plan.create(options.buffers)
        self._line.send(("ready", (plan, self._actor.env.num_envs)))
        reduction.send_handle(self._line, memory, options.trainer)  # pyright: ignore[reportAttributeAccessIssue]
        batches = plan.map(memory, options.buffers)
        try:
            while True:
                command, argument = self._line.recv()
                self._obey(command, argument, batches)
        finally:
            for scheme in self._schemes.values():
                scheme.shutdown()
            self._actor.env.close()

    def _obey(self, command: str, argument: int, batches: list[Any]) -> None:
        if command == "connect":
            for scheme in self._schemes.values():
                scheme.connect(worker_idx=self._options.worker_idx)
                if not isinstance(scheme, wsync.NoWeightSyncScheme):
                    scheme.receiver.quiet()  # it acts through the gate alone
            followed = policy_scheme(self._schemes)
            if followed is not None:
                self._actor.follow(followed)
            self._line.send(("connected", None))
        elif command == "seed":
            self._actor.rollout.seed(argument)
        else:
            self._actor.rollout.collect(batches[argument])
            self._line.send(("batch", argument))
