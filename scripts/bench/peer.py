"""TorchRL's side of a case: its schemes alone, or its collectors. Imported only when somebody asks for it.

What it is spared: a first update before the rounds (its Ray collector connects then), and being timed while it polls
for a port. What it is denied: the very object that it was given, whose memory some of its schemes share with workers,
so that training it would reach them with no update at all.
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
from tensordict import TensorDict
from torch import multiprocessing, nn
from torchrl import weight_update  # pyright: ignore[reportMissingImports]
from torchrl.collectors import Collector, MultiSyncCollector  # pyright: ignore[reportMissingImports]
from torchrl.envs import GymEnv  # pyright: ignore[reportMissingImports]

from bench.cases import Case
from bench.collecting import Collecting
from bench.crews import started
from bench.meters import MemoryMeter
from bench.models import Revealing, become, revealing_policy
from bench.sides import Side, Standalone, given, named

_ENDLESS = 10**12
_SCHEMES = {
    "shared_mem": weight_update.SharedMemWeightSyncScheme,
    "multiprocess": weight_update.MultiProcessWeightSyncScheme,
    "distributed": weight_update.DistributedWeightSyncScheme,
    "rpc": weight_update.RPCWeightSyncScheme,
    "ray": weight_update.RayWeightSyncScheme,
}


def takes_part(case: Case) -> bool:
    """Whether there is anything to compare: its other schemes work in its collectors only."""
    return case.kind == "update" or case.backend in ("shared_mem", "multiprocess")


def make_side(case: Case, trainer: int, log: Path) -> AbstractContextManager[Side]:
    """A ``MakeSide``; what it and its workers write goes to the end of ``log``."""
    with log.open("a") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    return _update_side(case, trainer) if case.kind == "update" else _send_side(case, trainer)


@contextmanager
def _send_side(case: Case, trainer: int) -> Iterator[Standalone]:
    scheme, model = _SCHEMES[case.backend](), Revealing(case.mib, case.tensors, 0.0)
    first: Any = TensorDict.from_module(copy.deepcopy(model))
    scheme.init_on_sender(
        model_id="policy",
        weights=first.data,
        devices=[torch.device("cpu")] * case.workers,
        num_workers=case.workers,
        ctx=multiprocessing.get_context("forkserver"),
    )
    with started(case, functools.partial(_follow, scheme)) as (lines, _):
        pids = named(lines.hear())
        memory = MemoryMeter({"trainer": trainer, **pids})
        lines.say("follow")
        scheme.connect()
        lines.hear()

        def deliver() -> None:
            scheme.send(weights=given(case, model))

        yield Standalone(model, lines, pids, memory, deliver, dict)
        lines.say("leave")
        lines.hear()
        scheme.shutdown()


def _follow(scheme: Any, line: Connection, model: nn.Module, worker: int) -> Callable[[], None]:
    """A worker's half."""
    line.recv()
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=worker)
    scheme.connect(worker_idx=worker)
    return scheme.shutdown


@contextmanager
def _update_side(case: Case, trainer: int) -> Iterator[Collecting]:
    policy = revealing_policy(case.mib, case.tensors)
    model = copy.deepcopy(policy)
    become(model, 0.0)
    with _collector(case, policy) as collector:

        def deliver() -> None:
            collector.update_policy_weights_(given(case, model))

        deliver()
        batches = iter(collector)
        yield Collecting(case, model, lambda: next(batches), deliver, dict, trainer)


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
    """One of its collectors for remote workers; ``stack`` ends what it needs beside it."""
    from torchrl.collectors import distributed  # pyright: ignore[reportMissingImports]

    if backend == "distributed":
        return functools.partial(distributed.DistributedCollector, launcher="mp", tcp_port=free_port())
    if backend == "rpc":
        os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
        return functools.partial(distributed.RPCCollector, launcher="mp", tcp_port=free_port())
    from bench.ray_crew import importing
    from collectors.distributed.ray_cluster import Cluster

    stack.enter_context(closing(Cluster("local")))
    return functools.partial(distributed.RayCollector, remote_configs={"num_cpus": 0, "runtime_env": importing()})


def free_port() -> str:
    """A port that was free just now."""
    with socket.socket() as door:
        door.bind(("", 0))
        return str(door.getsockname()[1])
