"""What ``scripts/compare_editions.py`` measures in one checkout: only public names, which both checkouts have.

Every call is timed with two workers, after new values were written into the model. After each call all workers forward,
and must have seen exactly these values.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import multiprocessing
import os
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torch.distributed import rpc

import wsync

WORKERS = 2
PAYLOADS = {"64 KiB": (2**16, 4, 200), "1 MiB": (2**20, 20, 100), "64 MiB": (2**26, 100, 15)}
"""By name: bytes, tensors, and the number of calls."""
SECONDS, MINIMUM = 1.0, 5  # after so many seconds there is no further call, if there were so many
WARM = 5  # first calls, which do not count
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # a store there: a disk would differ from call to call
GLOO = {"shared_memory": False, "inline_bytes": 0}
SENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "shared_mem, published": ("shared_mem", {"acknowledge": "published"}),
    "shared_mem, installed": ("shared_mem", {"acknowledge": "installed"}),
    "multiprocess": ("multiprocess", {}),
    "distributed": ("distributed", {}),
    "distributed, gloo": ("distributed", GLOO),
    "rpc": ("rpc", {}),
    "ray": ("ray", {}),
    "store": ("store", {}),
    "http": ("http", {}),
}
"""By name of the group: the backend, and the options of its scheme."""
COLLECTORS = {
    "shared_mem": ("collectors", "MultiSyncCollector"),
    "multiprocess": ("collectors", "MultiSyncCollector"),
    "distributed": ("collectors.distributed", "DistributedCollector"),
    "rpc": ("collectors.distributed", "RPCCollector"),
    "ray": ("collectors.distributed", "RayCollector"),
}


CELLS: dict[str, list[str]] = {
    **{f"send {name}": [f"send {name}, {payload}" for payload in PAYLOADS] for name in SENDS},
    **{f"update {name}": [f"update {name}, 18 KiB"] for name in COLLECTORS},
    "gate": ["a forward: gated less ungated"],
}
"""By subject: its cells."""
PROCESSES = (
    ("send shared_mem, published", "send shared_mem, installed", "update shared_mem", "gate"),
    ("send multiprocess", "update multiprocess", "send store", "send http"),
    ("send distributed", "send distributed, gloo", "update distributed"),
    ("send rpc",),
    ("update rpc",),  # in a group of its own: torch has one for each process
    ("send ray", "update ray"),
)
"""The subjects that are measured in one process, because most of the time is that of starting it."""


def measure(subject: str, cells: list[str]) -> dict[str, float]:
    """Return the time in µs of each of ``cells``, which are of one subject."""
    kind, _, name = subject.partition(" ")
    if kind == "send":
        return dict(zip(cells, measure_sends(name, [cell.rpartition(", ")[2] for cell in cells]), strict=True))
    return {cells[0]: measure_update(name) if kind == "update" else measure_gate()}


def p50(
    call: Callable[[], object], write: Callable[[int], None], seen: Callable[[int], list[Any]], calls: int
) -> float:
    """Return the median time of ``call`` in µs. Each call delivers a value that ``write`` has written before.

    Raises:
        RuntimeError: a worker has seen another value.
    """
    times, began = list[float](), time.monotonic()
    for value in range(1, WARM + calls + 1):
        write(value)
        before = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - before))
        if wrong := [one for one in seen(value) if tuple(one) != (value, value)]:
            raise RuntimeError(f"workers saw {wrong} after an update to {value}")
        if len(times) >= WARM + MINIMUM and time.monotonic() - began > SECONDS:
            break
    return statistics.median(times[WARM:])


# --- models ---


def extremes(model: nn.Module) -> torch.Tensor:
    """Return the smallest and the largest of all parameters."""
    with torch.no_grad():
        low, high = zip(*(torch.aminmax(one) for one in model.parameters()), strict=True)
        return torch.stack([torch.stack(low).min(), torch.stack(high).max()])


@torch.no_grad()
def fill(model: nn.Module, value: float) -> None:
    """Write ``value`` into all parameters."""
    for parameter in model.parameters():
        parameter.fill_(value)


class Network(nn.Module):
    """Parameters of one size; a forward returns their extremes, or returns at once if it is ``idle``."""

    def __init__(self, size: int, tensors: int) -> None:
        super().__init__()
        shape = (size // 4 // tensors,)
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for _ in range(tensors))

    def forward(self, idle: bool = False) -> Any:
        """Forward."""
        return None if idle else extremes(self).tolist()


class CartPolePolicy(nn.Module):
    """A policy of 18 KiB in 6 tensors, which returns the action, the extremes of its parameters and the process id."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Act."""
        return self.layers(observation).argmax(-1), extremes(self), torch.tensor(os.getpid())


# --- standalone schemes ---


def measure_sends(name: str, payloads: list[str]) -> Iterator[float]:
    """Yield the time of ``scheme.send(model)`` with each payload."""
    backend, options = SENDS[name]
    workers = Actors() if backend == "ray" else Processes(backend)
    with contextlib.closing(workers), tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        for payload in payloads:
            size, tensors, calls = PAYLOADS[payload]
            model = Network(size, tensors)
            where = {"url": f"{folder}/{tensors}"} if backend == "store" else {}
            with workers.connect({**options, **where}, model, size, tensors) as scheme:
                base = scheme.version
                seen = lambda value, base=base: workers.look(base + value)  # noqa: E731
                yield p50(partial(scheme.send, model), partial(fill, model), seen, calls)
                workers.leave()


def measure_gate() -> float:
    """Return what the gate adds to a forward of a synchronised model, in a worker."""
    with contextlib.closing(Processes("shared_mem")) as workers, workers.connect({}, Network(2**16, 4), 2**16, 4):
        cost = statistics.median(workers.ask("gate"))
        workers.leave()
    return cost


def gate_cost(gated: nn.Module) -> float:
    """Return how many µs a call of ``gated`` takes more than that of its like without a gate."""
    turns: dict[nn.Module, list[float]] = {gated: [], Network(2**16, 4): []}
    for _ in range(50):
        for model, times in turns.items():
            before = time.perf_counter()
            for _ in range(1000):
                model(True)
            times.append((time.perf_counter() - before) * 1000)
    with_gate, without = map(min, turns.values())
    return with_gate - without


class Processes:
    """Worker processes with pipes, for schemes of one backend after another."""

    def __init__(self, backend: str) -> None:
        context, port = multiprocessing.get_context("forkserver"), free_port()
        self._backend = backend
        self._channels, self._processes = list[Connection](), list[Any]()
        for worker in range(WORKERS):
            mine, theirs = context.Pipe()
            process = context.Process(target=run_worker, args=(theirs, worker, backend, port), daemon=True)
            process.start()
            theirs.close()
            self._channels.append(mine)
            self._processes.append(process)
        if backend == "rpc":
            join_rpc("trainer", 0, port)

    def ask(self, message: Any) -> list[Any]:
        """Send a message to every worker, and return the answers."""
        for channel in self._channels:
            channel.send(message)
        return [channel.recv() for channel in self._channels]

    def connect(self, options: dict[str, Any], model: nn.Module, size: int, tensors: int) -> wsync.WeightSyncScheme:
        """Return a scheme that has models of this size in all workers."""
        urls = self.ask((size, tensors))
        served = self._backend == "http"
        scheme = wsync.WeightSyncScheme.from_backend(self._backend, **({"urls": urls} if served else options))
        scheme.init_on_sender("policy", model=model, num_workers=WORKERS)
        for channel in self._channels:
            channel.send(None if served else scheme)
        scheme.connect()
        for channel in self._channels:
            channel.recv()
        return scheme

    def look(self, version: int) -> list[Any]:
        """Return what a forward sees in each worker."""
        return self.ask(version)

    def leave(self) -> None:
        """Let the workers disconnect."""
        self.ask(None)

    def close(self) -> None:
        """End the processes."""
        for channel in self._channels:
            channel.close()
        if self._backend == "rpc":
            rpc.shutdown()
        for process in self._processes:
            process.join(10)


def run_worker(channel: Connection, worker: int, backend: str, port: int) -> None:
    """Be a worker of one scheme after another, until the trainer closes the pipe."""
    torch.set_num_threads(1)
    if backend == "rpc":
        join_rpc(f"worker{worker}", worker + 1, port)
    with contextlib.suppress(EOFError):
        while True:
            model = Network(*channel.recv())
            with (serving if backend == "http" else receiving)(channel, worker, model) as scheme:
                channel.send("connected")
                while (message := channel.recv()) is not None:
                    if backend == "store":
                        wait_for(scheme, message)
                    channel.send(gate_cost(model) if message == "gate" else model())
            channel.send("left")
    if backend == "rpc":
        rpc.shutdown()


@contextlib.contextmanager
def receiving(channel: Connection, worker: int, model: nn.Module) -> Iterator[wsync.WeightSyncScheme]:
    """Connect ``model`` to the scheme that the trainer sends."""
    channel.send("ready")
    scheme = channel.recv()
    scheme.init_on_receiver("policy", model=model, worker_idx=worker)
    scheme.connect()
    yield scheme
    scheme.shutdown()


@contextlib.contextmanager
def serving(channel: Connection, _worker: int, model: nn.Module) -> Iterator[None]:
    """Serve ``model`` as an engine, and send its URL."""
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


def wait_for(scheme: wsync.WeightSyncScheme, version: int) -> None:
    """Wait until a reader of a store has ``version``: a finished ``send`` says only that it can be read."""
    until = time.monotonic() + 60.0
    while scheme.version < version and time.monotonic() < until:
        scheme.receive(1.0)


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


def join_rpc(name: str, rank: int, port: int) -> None:
    """Join the RPC group that has its store at ``port``."""
    os.environ.update(TP_SOCKET_IFNAME="lo", GLOO_SOCKET_IFNAME="lo")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(name, rank=rank, world_size=WORKERS + 1, rpc_backend_options=options)


class Actor:
    """A Ray actor with a model, which the scheme's sender connects."""

    policy: nn.Module

    def prepare(self, size: int, tensors: int) -> None:
        """Make the model."""
        torch.set_num_threads(1)
        self.policy = Network(size, tensors)

    def look(self) -> Any:
        """Return what a forward sees."""
        return self.policy()


class Actors:
    """Ray actors, in place of ``Processes``."""

    def __init__(self) -> None:
        import ray

        ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, logging_level="error")
        self._ray: Any = ray
        make = ray.remote(Actor).options(num_cpus=0)  # pyright: ignore[reportAttributeAccessIssue]
        self._actors: Any = [make.remote() for _ in range(WORKERS)]

    def connect(self, options: dict[str, Any], model: nn.Module, size: int, tensors: int) -> wsync.WeightSyncScheme:
        """Return a scheme that has models of this size in all actors."""
        self._ray.get([actor.prepare.remote(size, tensors) for actor in self._actors])
        scheme = wsync.RayWeightSyncScheme(**options)
        scheme.init_on_sender("policy", model=model, actors=self._actors)
        scheme.connect()
        return scheme

    def look(self, _version: int) -> list[Any]:
        """Return what a forward sees in each actor."""
        return self._ray.get([actor.look.remote() for actor in self._actors])

    def leave(self) -> None:
        """Leave it to the scheme's end."""

    def close(self) -> None:
        """End the cluster."""
        self._ray.shutdown()


# --- collectors ---


def measure_update(name: str) -> float:
    """Return the time of ``collector.update_policy_weights_()`` between two batches of synchronous collection."""
    from collectors import GymEnv

    module, collector_name = COLLECTORS[name]
    make: Any = getattr(importlib.import_module(module), collector_name)
    policy = TensorDictModule(CartPolePolicy(), ["observation"], ["action", "seen", "process"])
    learner = copy.deepcopy(policy)  # so that nothing but an update can reach the workers
    schemes = {"policy": wsync.WeightSyncScheme.from_backend(name)}
    options = {"frames_per_batch": 16 * WORKERS, "total_frames": -1, "weight_sync_schemes": schemes}
    with make([partial(GymEnv, "CartPole-v1")] * WORKERS, policy, **options) as collector:

        def seen(_: int) -> list[Any]:
            batch = next(collector)
            if len(torch.unique(batch["process"])) != WORKERS:
                raise RuntimeError("the batch does not have frames of all workers")
            return batch["seen"].reshape(-1, 2).tolist()

        return p50(lambda: collector.update_policy_weights_(learner), partial(fill, learner), seen, 100)
