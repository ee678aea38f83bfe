"""A store that the ranks of a sharded trainer write together, over gloo: each some files of a version."""

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
    """Tied weights, of which the last of four ranks has no row; buffers; two dtypes; sizes that two do not divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(5, 6), nn.Linear(6, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.narrow = nn.Linear(3, 7).bfloat16()


def begin(state: WorkerState, rank: int, count: int, folder: Path, kind: str, fault: str) -> None:
    """Join the ranks, and initialise a scheme with a model of ``kind``; rank 1 has the ``fault``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=count)
    model, mesh = Policy(), init_device_mesh("cpu", (count,))
    model.norm.num_batches_tracked.fill_(rank)  # each rank has its own: that of rank 0 counts
    if kind == "tp":
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in (model.narrow, model) if kind == "fsdp" else ():
        fully_shard(module, mesh=mesh)

    state.kept["fault"] = fault if rank == 1 else ""

    def transform(weights: Any) -> Any:
        assert state.kept["fault"] != "raises", "no weights today"
        if state.kept["fault"] == "dies":
            os._exit(1)
        return weights

    if state.kept["fault"] == "cannot write":
        resource.setrlimit(resource.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
    scheme = wsync.StoreWeightSyncScheme(folder, layout="hf", shard_bytes=200, send_transform=transform)
    scheme.init_on_sender("policy", model=nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model)
    state.schemes["policy"] = scheme


def send(state: WorkerState) -> list[str]:
    """Send a version, and one without the fault; return their numbers, or the errors."""
    got = list[str]()
    for _ in range(2):
        try:
            report = state.schemes["policy"].send_shards()  # pyright: ignore[reportAttributeAccessIssue]
            got.append(str(report.version))
        except RuntimeError as error:
            got.append(f"{type(error).__name__}: {error}")
        state.kept["fault"] = ""
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return got


def sent(pool: WorkerPool, count: int, folder: Path, kind: str, fault: str = "") -> list[list[str]]:
    """Send versions from ``count`` ranks; return what each has got."""
    with pool.group(count) as workers:
        try:
            for rank, worker in enumerate(workers):
                worker.start(begin, rank, count, folder, kind, fault)
            workers.results()
            for worker in workers:
                worker.start(send)
            return [worker.result() for worker in workers if fault != "dies" or worker is not workers[1]]
        finally:
            for worker in workers:
                worker.kill()  # its process group is for no other test


@pytest.mark.parametrize(("kind", "count"), [("fsdp", 2), ("fsdp", 4), ("tp", 2), ("tp", 4), ("ddp", 2), ("ddp", 4)])
def test_ranks_write_what_one_process_would(pool: WorkerPool, tmp_path: Path, kind: str, count: int) -> None:
    whole, received = Policy(), Policy()
    with trainer(tmp_path / "whole", whole, layout="hf", shard_bytes=200) as scheme:
        scheme.send()
        one = json.loads((tmp_path / "whole/policy/manifest.json").read_text())
    assert sent(pool, count, tmp_path, kind) == [["1", "2"]] * count
    own = json.loads((tmp_path / "policy/manifest.json").read_text())
    assert {**own, "writer": ""} == {**one, "writer": ""}  # also the digests
    assert len([*tmp_path.glob("policy/v00000002-*/*.safetensors")]) > count
    nn.init.zeros_(received.embedding.weight)
    with reader(tmp_path, received):
        assert all(map(same_bits, received.state_dict().values(), whole.state_dict().values()))


@pytest.mark.parametrize(("fault", "told"), [("raises", "no weights today"), ("cannot write", "File too large")])
def test_an_error_of_one_rank_is_raised_in_all(pool: WorkerPool, tmp_path: Path, fault: str, told: str) -> None:
    for got, after in sent(pool, 2, tmp_path, "fsdp", fault):
        assert got.startswith("WeightSyncError: nothing was published: rank 1: ") and told in got
        assert after == "2", "the ranks are in step"
    assert [path.name[:9] for path in tmp_path.glob("policy/v*")] == ["v00000002"]


def test_a_rank_that_dies_ends_the_call_of_the_others(pool: WorkerPool, tmp_path: Path) -> None:
    assert sent(pool, 2, tmp_path, "fsdp", "dies")[0][0].startswith("RuntimeError: ")
    assert not [*tmp_path.glob("policy/manifest.json")]
