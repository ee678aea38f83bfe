"""A store that the ranks of a sharded trainer write together: each some files of a version, over gloo."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import reader, trainer
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import wsync
from wsync.testing import WorkerPool
from wsync.testing.commands import WorkerState
from wsync.weights.tensors import same_bits


class Policy(nn.Module):
    """Tied weights, of which the last of four ranks has no row; buffers; two dtypes; a size that two do not divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(5, 6), nn.Linear(6, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.half = nn.Linear(3, 7).bfloat16()


def begin(state: WorkerState, rank: int, count: int, folder: Path, kind: str, broken: str = "") -> None:
    """Join the group of ranks, and initialise a scheme with a model of ``kind``; rank 1 is ``broken``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=count)
    model: Any = Policy()
    if kind == "tp":
        parallelize_module(model, init_device_mesh("cpu", (count,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in (model.half, model) if kind == "fsdp" else ():
        fully_shard(module, mesh=init_device_mesh("cpu", (count,)))
    model = nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model
    model.get_submodule("module.norm" if kind == "ddp" else "norm").running_mean.fill_(rank)  # as each has it

    def transform(weights: Any) -> Any:
        if broken == "dies":
            os._exit(1)
        assert broken != "raises", "no weights today"
        return weights

    if rank == 1 and broken == "cannot write":
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
    scheme = wsync.StoreWeightSyncScheme(folder / "run", layout="hf", send_transform=transform if rank == 1 else None)
    scheme.init_on_sender("policy", model=model)
    state.schemes["policy"] = scheme


def send(state: WorkerState) -> int | str:
    """Send a version; return its number, or the error."""
    try:
        return state.schemes["policy"].send_shards().version  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def in_ranks(pool: WorkerPool, folder: Path, count: int, kind: str, broken: str = "") -> list[Any]:
    """Send two versions from new processes; return what each rank has got."""
    with pool.group(count) as workers:
        try:
            for rank, worker in enumerate(workers):
                worker.start(begin, rank, count, folder, kind, broken)
            workers.results()
            results = []
            for worker in workers:
                worker.start(send)
            return workers.results() 
        finally:
            for worker in workers:
                worker.kill()  # a process group is not for another test
