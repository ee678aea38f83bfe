"""TorchRL's side of a case of ``bench_sync.py``: its schemes alone, or its collectors.

A first update, in which its Ray collector connects, is not timed. The trained model is a copy of the one that TorchRL
was given: some of its schemes share that model's memory with workers, which would see its training without any update.
"""

from __future__ import annotations

import copy
import functools
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from tensordict import TensorDict
from torch import multiprocessing
from torchrl import weight_update  # pyright: ignore[reportMissingImports]
from torchrl.collectors import Collector, MultiSyncCollector  # pyright: ignore[reportMissingImports]
from torchrl.envs import GymEnv  # pyright: ignore[reportMissingImports]

from harness.models import RevealingModel, revealing_policy
from harness.processes import worker_processes
from harness.sides import Case, Side, collector_side

_SCHEMES = {
    "shared_mem": weight_update.SharedMemWeightSyncScheme,
    "multiprocess": weight_update.MultiProcessWeightSyncScheme,
    "distributed": weight_update.DistributedWeightSyncScheme,
    "rpc": weight_update.RPCWeightSyncScheme,
    "ray": weight_update.RayWeightSyncScheme,
}


@contextmanager
def sending(case: Case) -> Iterator[Side]:
    """Send by a scheme alone; only those of ``shared_mem`` and ``multiprocess`` work outside a collector."""
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
    with worker_processes(_receive, case.workers, scheme, case) as pipes:
        scheme.connect()
        pipes.receive()
        yield Side(model, lambda: scheme.send(weights=model), lambda: pipes.ask("look"))
        pipes.ask(None)
        scheme.shutdown()


def _receive(channel: Connection, worker: int, scheme: Any, case: Case) -> None:
    """Receive updates, and send what a forward sees; a target of ``worker_processes``."""
    model = RevealingModel(case.mib, case.tensors, -1.0).to(case.worker_device)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=worker)
    scheme.connect(worker_idx=worker)
    channel.send("connected")
    with suppress(EOFError):
        while channel.recv() is not None:
            channel.send(model().tolist())
        scheme.shutdown()
        channel.send("left")


@contextmanager
def collecting(case: Case) -> Iterator[Side]:
    """Update the workers of a collector between two batches."""
    policy = revealing_policy(case.mib, case.tensors)
    make_envs = [functools.partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)] * case.workers
    options: dict[str, Any] = {
        "frames_per_batch": 16 * case.workers,
        "total_frames": 10**12,
        "weight_sync_schemes": {"policy": _SCHEMES[case.backend]()},
    }
    if case.backend in ("shared_mem", "multiprocess"):
        collector = MultiSyncCollector(make_envs, policy, cat_results="stack", **options)
    else:
        collector = _remote(case.backend, make_envs, policy, {**options, "sync": True, "collector_class": Collector})
    batches = iter(collector)
    try:
        yield collector_side(collector, policy, lambda: next(batches), case.workers)
    finally:
        collector.shutdown()


def _remote(backend: str, make_envs: list[Any], policy: Any, options: dict[str, Any]) -> Any:
    """Return one of its collectors for remote workers."""
    from torchrl.collectors import distributed  # pyright: ignore[reportMissingImports]

    if backend == "ray":
        environment = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
        remote = {"num_cpus": 0, "runtime_env": environment}
        return distributed.RayCollector(make_envs, policy, remote_configs=remote, **options)
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    with socket.create_server(("", 0)) as free:
        options["tcp_port"] = str(free.getsockname()[1])  # annotated as a number, used as a string
    make: Any = distributed.DistributedCollector if backend == "distributed" else distributed.RPCCollector
    return make(make_envs, policy, launcher="mp", **options)
