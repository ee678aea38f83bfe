"""TorchRL's side of a case: its schemes alone, or its collectors.

A first update, in which its Ray collector connects, is not timed. The trained model is a copy of the one that TorchRL
was given: some of its schemes share that model's memory with workers, which would see its training without any update.
"""

from __future__ import annotations

import copy
import functools
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from harness.models import RevealingModel, cartpole_policy, fill
from harness.processes import worker_processes
from tensordict import TensorDict
from torch import multiprocessing, nn
from torchrl import weight_update  # pyright: ignore[reportMissingImports]
from torchrl.collectors import Collector, MultiSyncCollector  # pyright: ignore[reportMissingImports]
from torchrl.envs import GymEnv  # pyright: ignore[reportMissingImports]

from bench.config import Case
from bench.measurements import MemoryMeter
from bench.sides import Collecting, Side, Standalone, argument
from bench.workers import named, run_worker, runtime_env

_ENDLESS = 10**12
_SCHEMES = {
    "shared_mem": weight_update.SharedMemWeightSyncScheme,
    "multiprocess": weight_update.MultiProcessWeightSyncScheme,
    "distributed": weight_update.DistributedWeightSyncScheme,
    "rpc": weight_update.RPCWeightSyncScheme,
    "ray": weight_update.RayWeightSyncScheme,
}


def takes_part(case: Case) -> bool:
    """Whether TorchRL supports the case: most of its schemes work in its collectors only."""
    return case.kind == "update" or case.backend in ("shared_mem", "multiprocess")


def make_side(case: Case, trainer: int, log: Path) -> AbstractContextManager[Side]:
    """Make TorchRL's side; its output and its workers' are appended to ``log``. A ``MakeSide``."""
    with log.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    return _update_side(case, trainer) if case.kind == "update" else _send_side(case, trainer)


@contextmanager
def _send_side(case: Case, trainer: int) -> Iterator[Standalone]:
    scheme: Any = _SCHEMES[case.backend]()
    model = RevealingModel(case.mib, case.tensors, 0.0).to(case.device)
    first: Any = TensorDict.from_module(copy.deepcopy(model))
    scheme.init_on_sender(
        model_id="policy",
        weights=first.data,
        devices=[torch.device(case.worker_device)] * case.workers,
        num_workers=case.workers,
        ctx=multiprocessing.get_context("forkserver"),
    )
    follow = functools.partial(_follow, scheme)
    with worker_processes(run_worker, case.workers, case, follow, timeout=case.timeout) as pipes:
        pids = named(pipes.receive())
        memory = MemoryMeter({"trainer": trainer, **pids})
        pipes.send("follow")
        scheme.connect()
        pipes.receive()

        def send() -> None:
            scheme.send(weights=argument(case, model))

        side = Standalone(model, pipes, pids, memory, send)
        yield side
        side.leave()
        scheme.shutdown()


def _follow(scheme: Any, channel: Connection, model: nn.Module, worker: int) -> Callable[[], None]:
    """Connect a worker; a ``Follow``."""
    channel.recv()
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=worker)
    scheme.connect(worker_idx=worker)
    return scheme.shutdown


@contextmanager
def _update_side(case: Case, trainer: int) -> Iterator[Collecting]:
    policy = cartpole_policy(case.mib, case.tensors)
    model = copy.deepcopy(policy)
    fill(model, 0.0)
    with _collector(case, policy) as collector:

        def send() -> None:
            collector.update_policy_weights_(argument(case, model))

        send()
        batches = iter(collector)
        yield Collecting(case, model, lambda: next(batches), send, trainer)


@contextmanager
def _collector(case: Case, policy: nn.Module) -> Iterator[Any]:
    make_envs = [functools.partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)] * case.workers
    options: dict[str, Any] = {
        "frames_per_batch": case.frames * case.workers,
        "total_frames": _ENDLESS,
        "weight_sync_schemes": {"policy": _SCHEMES[case.backend]()},
    }
    with ExitStack() as stack:
        if case.backend in ("shared_mem", "multiprocess"):
            collector = MultiSyncCollector(make_envs, policy, cat_results="stack", **options)
        else:
            options |= {"sync": True, "collector_class": Collector}
            collector = _remote(case.backend, stack)(make_envs, policy, **options)
        stack.callback(collector.shutdown)
        yield collector


def _remote(backend: str, stack: ExitStack) -> Callable[..., Any]:
    """Return one of its collectors for remote workers; ``stack`` ends the cluster that it needs."""
    from torchrl.collectors import distributed  # pyright: ignore[reportMissingImports]

    if backend == "distributed":  # the port: annotated as a number, used as a string
        return functools.partial(distributed.DistributedCollector, launcher="mp", tcp_port=free_port())  # pyright: ignore
    if backend == "rpc":
        os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
        return functools.partial(distributed.RPCCollector, launcher="mp", tcp_port=free_port())
    from collectors.distributed.ray_cluster import Cluster

    stack.enter_context(closing(Cluster("local")))
    return functools.partial(distributed.RayCollector, remote_configs={"num_cpus": 0, "runtime_env": runtime_env()})


def free_port() -> str:
    """Return a port that was free just now."""
    with socket.socket() as server:
        server.bind(("", 0))
        return str(server.getsockname()[1])
