"""The worker's side of a collector: act in environments, fill batches, receive weights."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import cloudpickle
import torch
from tensordict import TensorDict

import wsync
from collectors.arguments import check_policy, has_weights
from collectors.batch_layout import BatchLayout
from collectors.exploration import warn_if_greedy
from collectors.factories import make_env
from collectors.rollouts.acting import Actor, policy_scheme
from collectors.rollouts.wrapping import UnusablePolicy
from collectors.workers.connections import WorkerConnection


@dataclass(frozen=True)
class WorkerOptions:
    """Settings of one worker.

    Attributes:
        worker_idx: its index.
        frames: the number of rows of a batch; rounded up to a multiple of the number of environments.
        buffers: batches in flight: 1 for synchronous collection, else one more than the worker may run ahead.
        device: the device of the policy.
        init_random_frames: number of first frames with random actions.
        max_frames_per_traj: episodes are truncated after this number of steps.
        threads: torch's number of threads in the worker's process.
        log_level: the log level of the root logger in the worker's process.
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
class WorkerSpec:
    """What a worker is built from; sent as a pickle of its own, so that no memory is shared with the trainer.

    Attributes:
        create_env_fn: makes the environment.
        policy: the policy that acts, unless there is a factory.
        policy_factory: makes it.
        schemes: by model id; those that the worker receives by.
        scheme_is_assumed: whether to leave the schemes out if the policy has no weights.
    """

    create_env_fn: Any
    policy: Any
    policy_factory: Any
    schemes: Mapping[str, wsync.WeightSyncScheme]
    scheme_is_assumed: bool = False


class RolloutWorker:
    """The environments, the policy and the schemes of a worker.

    Args:
        spec: a pickled ``WorkerSpec``.
        options: settings.

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
        self._batches: list[TensorDict] = []

    def use_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        """Write batches into ``buffers``, ``uint8[layout.nbytes]`` each. Called once, before the first command."""
        self._batches = [self.layout.view(buffer) for buffer in buffers]

    def execute(self, command: str, argument: Any) -> tuple[str, Any] | None:
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
            if question == "has_weights":
                return "answer", self._has_weights
            return "answer", cloudpickle.dumps(self._actor.find(path))
        if command == "connect":
            for model_id in argument:
                self._schemes[model_id].connect(worker_idx=self._worker_idx)
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

    def close(self) -> None:
        """Shut the schemes down and close the environments."""
        self._opened.close()


def serve(connection: WorkerConnection) -> None:
    """Execute the trainer's commands until it closes the connection; then close this end.

    The first command is ``("build", (spec, options))``; ``RolloutWorker.execute`` takes the others. The answer to
    ``build`` is ``("ready", (layout, number of buffers, number of environments))``. After ``("error", traceback)`` or
    ``("unusable", traceback)`` the worker ends.
    """
    connection.remove_time_limits()
    # Inside, an error is reported before the schemes are closed: the trainer would otherwise get only their end.
    # An error of closing is printed: then the trainer has closed the connection, or has the worker's error.
    try:
        with closing(connection), ExitStack() as opened, _reported_errors(connection):
            _serve(connection, opened)
    except (Exception, SystemExit):  # noqa: BLE001  environments may raise anything as they close
        traceback.print_exc()


def _serve(connection: WorkerConnection, opened: ExitStack) -> None:
    with _ended_by_trainer():
        _, (spec, options), _ = connection.receive()
    configure_process(options)
    worker = RolloutWorker(spec, options)
    opened.callback(worker.close)
    with _ended_by_trainer():
        buffers = connection.send_ready(worker.layout, options.buffers, worker.num_envs)
    worker.use_buffers(buffers)
    while True:
        with _ended_by_trainer():
            command, argument, _ = connection.receive()
        answer = worker.execute(command, argument)
        if answer is not None:
            with _ended_by_trainer():
                kind, value = answer
                if kind == "batch":
                    connection.send_batch(value, buffers[value])
                else:
                    connection.send(kind, value)


class _ConnectionClosed(Exception):
    """The trainer closed the connection. A connection error of an environment is another matter: it is reported."""


@contextmanager
def _ended_by_trainer() -> Iterator[None]:
    try:
        yield
    except (EOFError, ConnectionError, wsync.NotConnected) as error:
        raise _ConnectionClosed from error


@contextmanager
def _reported_errors(connection: WorkerConnection) -> Iterator[None]:
    try:
        yield
    except _ConnectionClosed:
        return
    except (Exception, SystemExit) as error:  # noqa: BLE001  raised again in the trainer, with this traceback
        with suppress(ConnectionError):  # the trainer may have ended already, because another worker failed
            connection.send_error(error_kind(error), traceback.format_exc())


def error_kind(error: BaseException) -> Literal["error", "unusable"]:
    """Return the kind of the event that reports ``error``: see ``collectors.workers.pool.Event``."""
    return "unusable" if isinstance(error, UnusablePolicy) else "error"


def configure_process(options: WorkerOptions) -> None:
    """Set torch's threads and logging in a process that runs one worker and nothing else."""
    torch.set_num_threads(options.threads)
    name = f"worker {options.worker_idx}"
    logging.basicConfig(level=options.log_level, format=f"[{name}] %(levelname)s %(name)s: %(message)s", force=True)


def set_worker_signals() -> None:
    """Ignore SIGINT, which Ctrl-C sends to the whole process group: the trainer ends its workers in order.

    Let SIGTERM end the process, whatever handler it had.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def exit_when_process_ends(pid: int) -> None:
    """Start a thread that ends this process when the process ``pid`` ends."""
    try:
        exit_when_readable(os.pidfd_open(pid))
    except ProcessLookupError:
        os._exit(1)


def exit_when_readable(*descriptors: int, status: Callable[[], int] = lambda: 1) -> Callable[[], None]:
    """Start a thread that ends this process when one of ``descriptors`` is readable or its other end is closed.

    Args:
        descriptors: are polled.
        status: is called then for the exit status.

    Returns:
        A function that ends the thread.
    """
    stopped = os.eventfd(0, os.EFD_CLOEXEC)

    def wait() -> None:
        poller = select.poll()
        for descriptor in (*descriptors, stopped):
            poller.register(descriptor, select.POLLIN)
        if stopped not in (ready for ready, _ in poller.poll()):
            os._exit(status())

    thread = threading.Thread(target=wait, name="trainer-watch", daemon=True)
    thread.start()

    def stop() -> None:
        os.eventfd_write(stopped, 1)
        thread.join()
        os.close(stopped)

    return stop
