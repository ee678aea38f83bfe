"""A trainer with its workers, of a standalone scheme or in a collector, and the rounds that are timed with it.

Uses only public names of wsync and collectors: ``compare_editions.py`` runs this file against other checkouts.
"""

from __future__ import annotations

import copy
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.distributed import rpc

import wsync
from harness.backends import collector_class, ray_cluster
from harness.models import RevealingModel, fill, revealing_policy
from harness.processes import WorkerPipes, worker_processes

MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a store there: a disk is fast at one time, slow at another
_WARM = 5  # first rounds of a side, which do not count


@dataclass(frozen=True)
class Case:
    """What is measured: the backend, MiB of all weights together, options of our scheme and what those are called."""

    kind: str  # "send" of a standalone scheme, or a collector's "update"
    backend: str
    mib: float
    tensors: int
    workers: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""
    device: str = "cpu"
    worker_device: str = "cpu"

    @property
    def label(self) -> str:
        """The backend and its variant."""
        return f"{self.backend}, {self.variant}" if self.variant else self.backend

    @property
    def title(self) -> str:
        """The case in one line."""
        return f"{self.kind} {self.label}, {self.mib:g} MiB in {self.tensors} tensors to {self.workers}"


@dataclass(frozen=True)
class Round:
    """One update: seconds of the call, of a plain copy of as many bytes, and what workers saw if it was wrong."""

    seconds: float
    copy: float
    wrong: str


@dataclass
class Side:
    """One implementation in a case."""

    model: nn.Module  # the trainer's
    send: Callable[[], object]  # updates the workers with it: the call that is timed
    look: Callable[[], list[list[float]]]  # after each `send`: the extremes of the weights that forwards use then
    value: int = 0  # of all weights of the newest update

    def rounds(self, count: int, seconds: float, copied: int = 0) -> list[Round]:
        """Make up to ``count`` rounds, none after ``seconds``; the first call makes some more, which do not count.

        ``copied``: bytes of the plain copy; 0 for none.
        """
        first = not self.value
        source, target = torch.zeros(copied // 4), torch.zeros(copied // 4)
        done, until = list[Round](), time.monotonic() + seconds
        while len(done) < count + first * _WARM and (not done or time.monotonic() < until):
            self.value += 1
            fill(self.model, self.value)
            began = time.perf_counter()
            self.send()
            ended = time.perf_counter()
            source.fill_(self.value)
            copying = time.perf_counter()
            target.copy_(source)
            copied_for = time.perf_counter() - copying
            bad = [one for one in self.look() if one != [self.value, self.value]]
            wrong = f"workers saw {bad[0]} after an update to {self.value}" if bad else ""
            done.append(Round(ended - began, copied_for, wrong))
        if first:
            wrong = [one for one in done[:_WARM] if one.wrong]
            done = wrong + done[min(_WARM, len(done) - 1) :]
        return done


# --- a standalone scheme ---


@contextmanager
def workers_of(backend: str, count: int) -> Iterator[Any]:
    """Start workers for schemes of ``backend``: they join one after another, by ``standalone``."""
    if backend == "ray":
        import ray

        with ray_cluster():
            remote: Any = ray.remote(Actor)
            yield [remote.options(num_cpus=0).remote() for _ in range(count)]
        return
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    in_group = _rpc_member("trainer", 0, port, count) if backend == "rpc" else nullcontext()
    with worker_processes(run_worker, count, backend, port, count) as pipes, in_group:
        yield pipes
        for channel in pipes.pipes:
            channel.close()


def standalone(case: Case, workers: Any) -> AbstractContextManager[Side]:
    """Connect a scheme with ``workers``."""
    return (_with_actors if case.backend == "ray" else _with_processes)(case, workers)


@contextmanager
def _with_processes(case: Case, workers: WorkerPipes) -> Iterator[Side]:
    model = RevealingModel(case.mib, case.tensors, 0.0).to(case.device)
    urls = workers.ask(case)
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        where = {"store": {"url": folder}, "http": {"urls": urls}}.get(case.backend, {})
        with wsync.WeightSyncScheme.from_backend(case.backend, **{**case.options, **where}) as scheme:
            scheme.init_on_sender("policy", model=model, num_workers=case.workers)
            workers.send(cloudpickle.dumps(None if case.backend == "http" else scheme))
            scheme.connect()
            workers.receive()
            yield Side(model, lambda: scheme.send(model), lambda: workers.ask(scheme.version))
            workers.ask(None)


def run_worker(channel: Connection, worker: int, backend: str, port: int, count: int) -> None:
    """Join one scheme after another, until the trainer closes the pipe; a target of ``worker_processes``."""
    in_group = _rpc_member(f"worker{worker}", worker + 1, port, count) if backend == "rpc" else nullcontext()
    with in_group, suppress(EOFError, ConnectionError):
        while True:
            case: Case = channel.recv()
            _share_gpu(case)
            model = RevealingModel(case.mib, case.tensors, -1.0).to(case.worker_device)
            with (_serving if backend == "http" else _receiving)(channel, worker, model) as scheme:
                channel.send("connected")
                while (message := channel.recv()) is not None:
                    if scheme is not None and backend == "store":  # its send says only that the version can be read
                        until = time.monotonic() + 60.0
                        while scheme.version < message and time.monotonic() < until:
                            scheme.receive(1.0)
                    channel.send(gate_cost(model) if message == "gate" else model().tolist())
            channel.send("left")


@contextmanager
def _receiving(channel: Connection, worker: int, model: nn.Module) -> Iterator[wsync.WeightSyncScheme]:
    """Connect ``model`` to the scheme that the trainer sends."""
    channel.send("ready")
    scheme = cloudpickle.loads(channel.recv())
    scheme.init_on_receiver("policy", model=model, worker_idx=worker)
    scheme.connect()
    yield scheme
    scheme.shutdown()


@contextmanager
def _serving(channel: Connection, _worker: int, model: nn.Module) -> Iterator[None]:
    """Serve ``model`` as an engine on the loopback interface, and send its URL."""
    import uvicorn

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(wsync.engine_app(model, token=None), log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        channel.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
        channel.recv()
        yield
        server.should_exit = True
        thread.join()


def gate_cost(gated: nn.Module) -> float:
    """Return how many seconds a call of a synchronised model takes more than that of one without a gate."""
    bare = RevealingModel(0.01, 1)
    turns: dict[nn.Module, list[float]] = {gated: [], bare: []}
    for model in turns:
        vars(model)["idle"] = True
    for _ in range(50):
        for model, times in turns.items():
            began = time.perf_counter()
            for _ in range(1000):
                model()
            times.append((time.perf_counter() - began) / 1000)
    del vars(gated)["idle"]
    return min(turns[gated]) - min(turns[bare])


def _share_gpu(case: Case) -> None:
    """Let this process use a GPU that others use: NCCL takes it for a machine of its own, and does not refuse."""
    if case.options.get("backend") == "nccl" and torch.cuda.device_count() == 1:
        os.environ["NCCL_HOSTID"] = f"bench {os.getpid()}"


@contextmanager
def _rpc_member(name: str, rank: int, port: int, workers: int) -> Iterator[None]:
    """Be a member of an RPC group; there is one for each process."""
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(name, rank=rank, world_size=workers + 1, rpc_backend_options=options)
    yield
    rpc.shutdown(timeout=5)


class Actor:
    """A Ray actor with a model, which the scheme's sender connects."""

    policy: nn.Module

    def prepare(self, case: Case) -> None:
        """Make the model."""
        torch.set_num_threads(1)
        _share_gpu(case)
        self.policy = RevealingModel(case.mib, case.tensors, -1.0).to(case.worker_device)

    def look(self) -> list[float]:
        """Return what a forward sees."""
        return self.policy().tolist()


@contextmanager
def _with_actors(case: Case, actors: list[Any]) -> Iterator[Side]:
    import ray

    ray.get([actor.prepare.remote(case) for actor in actors])
    model = RevealingModel(case.mib, case.tensors, 0.0).to(case.device)
    with wsync.RayWeightSyncScheme(**case.options) as scheme:
        scheme.init_on_sender("policy", model=model, actors=actors)
        scheme.connect()
        yield Side(model, lambda: scheme.send(model), lambda: ray.get([actor.look.remote() for actor in actors]))


# --- a collector ---


@contextmanager
def collecting(case: Case) -> Iterator[Side]:
    """Start a collector of CartPole; its workers act between two updates."""
    from collectors import GymEnv

    policy = revealing_policy(case.mib, case.tensors)
    scheme = wsync.WeightSyncScheme.from_backend(case.backend, **case.options)
    with collector_class(case.backend)(
        [partial(GymEnv, "CartPole-v1")] * case.workers,
        policy,
        frames_per_batch=16 * case.workers,
        total_frames=-1,
        weight_sync_schemes={"policy": scheme},
    ) as collector:
        yield collector_side(collector, policy, lambda: next(collector), case.workers)


def collector_side(collector: Any, policy: nn.Module, next_batch: Callable[[], Any], workers: int) -> Side:
    """Return the side of a collector, after a first update; each frame of the next batch is looked at."""
    model = copy.deepcopy(policy)  # some collectors share the tensors of the policy that they were given
    fill(model, 0.0)

    def look() -> list[list[float]]:
        batch = next_batch()
        missing = len(torch.unique(batch["process"])) < workers  # a worker without a frame has shown nothing
        return batch["reveal"].reshape(-1, 2).tolist() + [[]] * missing

    collector.update_policy_weights_(model)
    return Side(model, lambda: collector.update_policy_weights_(model), look)


@contextmanager
def our_side(case: Case) -> Iterator[Side]:
    """Make our side of a case."""
    if case.kind == "update":
        with collecting(case) as side:
            yield side
        return
    _share_gpu(case)
    with workers_of(case.backend, case.workers) as workers, standalone(case, workers) as side:
        yield side
