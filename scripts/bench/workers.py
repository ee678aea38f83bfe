"""The workers of a standalone send: their end, and the trainer's end for processes, RPC groups and Ray actors."""

from __future__ import annotations

import os
import select
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from harness.models import RevealingModel
from harness.processes import WorkerPipes, worker_processes
from torch import nn

import wsync
from bench.config import BenchError, Case
from bench.measurements import Pauses

Follow = Callable[[Connection, nn.Module, int], Callable[[], None]]
"""Waits for the trainer's message, connects the worker's model to the trainer; returns a function that disconnects."""
_QUIET = 0.2  # seconds of forwards without an update, to measure the usual time
_POLL_INTERVAL = 10_000_000  # ns between two polls of the pipe: a poll lets other threads run
_CHUNK = 1000  # forwards with unread outputs: reading one lets other threads run
_GRACE = 5.0  # seconds in which a group has to shut down


# --- the worker's end ---


def run_worker(channel: Connection, worker: int, case: Case, follow: Follow, group: Any = None) -> None:
    """Run a worker process until the trainer says ``leave``, or closes the pipe."""
    torch.set_num_threads(1)
    share_gpu(case)
    with _membership(worker, case, group), suppress(EOFError, ConnectionError):
        model = RevealingModel(case.mib, case.tensors, -1.0).to(case.worker_device)
        channel.send(os.getpid())
        disconnect = follow(channel, model, worker)
        channel.send("connected")
        execute(channel, model)
        disconnect()
        channel.send("left")


def share_gpu(case: Case) -> None:
    """Let this process use a GPU that others of the benchmark use.

    NCCL refuses two processes of one machine on one GPU: each is then taken for a machine of its own.
    """
    if case.nccl and torch.cuda.device_count() == 1:
        os.environ["NCCL_HOSTID"] = f"bench {os.getpid()}"


@contextmanager
def _membership(worker: int, case: Case, group: Any) -> Iterator[None]:
    """Be a member of the RPC group at the address ``group``, if there is one."""
    if group is None:
        yield
        return
    from collectors.distributed.rpc_group import join_group, rpc

    join_group(f"worker{worker}", worker + 1, case.workers + 1, group, case.timeout)
    yield
    rpc.shutdown(timeout=_GRACE)  # if the trainer does not take part, this process is killed


def follow_scheme(channel: Connection, model: nn.Module, worker: int) -> Callable[[], None]:
    """Connect by the scheme that the trainer sends; a ``Follow``."""
    scheme = cloudpickle.loads(channel.recv_bytes())
    scheme.init_on_receiver("policy", model=model, worker_idx=worker)
    scheme.connect()
    return scheme.shutdown


def execute(channel: Connection, model: nn.Module) -> None:
    """Execute ``look`` (send what a forward reads) and ``act`` (see ``act``) until ``leave``."""
    while (command := channel.recv()) != "leave":
        if command == "look":
            low, high = model().tolist()
            channel.send((low, high))
        else:
            act(channel, model)


def act(channel: Connection, model: nn.Module) -> None:
    """Forward in a tight loop, first without updates, then with them until the next message; send ``Pauses``."""
    poller = select.poll()
    poller.register(channel.fileno(), select.POLLIN)
    next_poll = 0

    def has_message(now: int) -> bool:
        nonlocal next_poll
        if now < next_poll:
            return False
        next_poll = now + _POLL_INTERVAL
        return bool(poller.poll(0))

    def forwards(ended: Callable[[int], bool]) -> tuple[list[int], list[list[float]]]:
        gaps, seen, last = [], [torch.empty(0, 2)], time.perf_counter_ns()
        while not ended(last):
            seen.append(model(False)[None].cpu())
            if len(seen) > _CHUNK:
                seen = [torch.cat(seen)]
            now = time.perf_counter_ns()
            gaps.append(now - last)
            last = now
        return gaps, torch.cat(seen).tolist()

    until = time.perf_counter_ns() + int(_QUIET * 1e9)
    quiet, _ = forwards(lambda now: has_message(now) or now > until)
    channel.send("acting")
    gaps, seen = forwards(has_message)
    channel.recv()
    steps = list(zip(gaps[1:], seen, seen[1:], strict=False))
    channel.send(
        Pauses(
            usual=statistics.median(quiet) / 1e9,
            usual_longest=max(quiet) / 1e9,
            switches=tuple(gap / 1e9 for gap, (_, before), (_, after) in steps if after != before),
            longest=max(gaps, default=0) / 1e9,
            forwards=len(gaps),
            mixed=sum(low != high for low, high in seen),
            backwards=sum(after < before for _, (before, _), (after, _) in steps),
        )
    )


# --- the trainer's end ---


class Workers:
    """Worker processes that wait for a scheme.

    Args:
        pipes: the pipes to the workers.

    Attributes:
        pids: ``{name: process id}``.
    """

    def __init__(self, pipes: WorkerPipes) -> None:
        self.pipes = pipes
        self.pids: Mapping[str, int] = named(pipes.receive())

    def connect(self, scheme: wsync.WeightSyncScheme, model: nn.Module) -> WorkerPipes:
        """Initialise ``scheme`` for ``model``, and connect all workers; return the pipes for further commands."""
        scheme.init_on_sender("policy", model=model, num_workers=len(self.pids))
        pickled = cloudpickle.dumps(scheme)
        for pipe in self.pipes.pipes:
            pipe.send_bytes(pickled)
        scheme.connect()
        self.pipes.receive()
        return self.pipes


def named(pids: Any) -> dict[str, int]:
    """Return ``{"worker 0": pid, …}``."""
    return {f"worker {worker}": pid for worker, pid in enumerate(pids)}


def workers_of(case: Case) -> AbstractContextManager[Workers]:
    """Start the workers of a case; they end with the context."""
    return {"rpc": rpc_workers, "ray": ray_workers}.get(case.backend, process_workers)(case)


@contextmanager
def process_workers(case: Case) -> Iterator[Workers]:
    """Plain processes."""
    with worker_processes(run_worker, case.workers, case, follow_scheme, timeout=case.timeout) as pipes:
        yield Workers(pipes)


@contextmanager
def rpc_workers(case: Case) -> Iterator[Workers]:
    """Processes in an RPC group with this one."""
    from collectors.distributed.rpc_group import host_store, join_or_end, leave_group, rpc

    store, address = host_store("127.0.0.1")
    with worker_processes(run_worker, case.workers, case, follow_scheme, address, timeout=case.timeout) as pipes:
        if join_or_end(case.workers + 1, address, pipes.sentinels, case.timeout) is not None:
            raise BenchError("a worker ended before it had joined the RPC group")
        try:
            yield Workers(pipes)
        except BaseException:  # also Ctrl-C: leaving together would wait for the workers
            leave_group()  # without waiting for the workers
            raise
        rpc.shutdown(timeout=_GRACE)  # together with the workers
    del store


class RayActor:
    """An actor with a model, which the scheme's sender connects.

    Args:
        case: what is measured.
    """

    def __init__(self, case: Case) -> None:
        torch.set_num_threads(1)
        share_gpu(case)
        self.policy = RevealingModel(case.mib, case.tensors, -1.0).to(case.worker_device)

    def pid(self) -> int:
        """Return the process id."""
        return os.getpid()

    def serve(self, path: str) -> None:
        """Connect to the trainer's socket at ``path``, and execute its commands."""
        with Client(path) as channel, suppress(EOFError, ConnectionError):
            execute(channel, self.policy)
            channel.send("left")


class RayWorkers(Workers):
    """Ray actors that wait for a scheme.

    Args:
        actors: by worker index.
        timeout: seconds of every wait.
        stack: closes the sockets.
    """

    def __init__(self, actors: list[Any], timeout: float, stack: ExitStack) -> None:
        import ray

        self._actors, self._timeout, self._stack = actors, timeout, stack
        self.pids = named(ray.get([actor.pid.remote() for actor in actors], timeout=timeout))

    def connect(self, scheme: wsync.WeightSyncScheme, model: nn.Module) -> WorkerPipes:
        """See Workers. The scheme's own calls to the actors must come before the call of ``serve``."""
        assert isinstance(scheme, wsync.RayWeightSyncScheme)
        scheme.init_on_sender("policy", model=model, actors=self._actors)
        scheme.connect()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        pipes = []
        for actor in self._actors:
            path = str(Path(folder) / str(len(pipes)))
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(path)
                server.listen(1)
                server.settimeout(self._timeout)
                actor.serve.remote(path)
                accepted, _ = server.accept()
            accepted.setblocking(True)
            pipes.append(self._stack.enter_context(closing(Connection(accepted.detach()))))
        return WorkerPipes(pipes, self._timeout)


@contextmanager
def ray_workers(case: Case) -> Iterator[Workers]:
    """Actors of a cluster that is started for them."""
    import ray

    from collectors.distributed.ray_cluster import Cluster

    with closing(Cluster("local")), ExitStack() as stack:
        remote: Any = ray.remote(RayActor).options(num_cpus=0, runtime_env=runtime_env())
        actors = [remote.remote(case) for _ in range(case.workers)]
        yield RayWorkers(actors, case.timeout, stack)
        for actor in actors:
            ray.kill(actor)


def runtime_env() -> dict[str, Any]:
    """Return the environment of actors that import the modules of this process."""
    return {"env_vars": {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}}
