"""A store that the ranks of a sharded trainer write together, over gloo: each some files of a version."""

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import trainer
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

    def __init__(self, tracked: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(5, 6), nn.Linear(6, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.narrow = nn.Linear(3, 7).bfloat16()
        self.norm.num_batches_tracked = torch.tensor(tracked)


def send_twice(_: WorkerState, rank: int, count: int, folder: Path, kind: str, fault: str) -> list[str]:
    """Send from a rank of a trainer, once with the ``fault``; return the numbers of the versions, or the errors."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=count)
    model, mesh, got = Policy(rank), init_device_mesh("cpu", (count,)), list[str]()  # with rank 0's buffer
    if kind == "tp":
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for module in (model.narrow, model) if kind == "fsdp" else ():
        fully_shard(module, mesh=mesh)

    scheme = wsync.StoreWeightSyncScheme(folder, layout="hf", shard_bytes=200)
    scheme.init_on_sender("policy", model=nn.parallel.DistributedDataParallel(model) if kind == "ddp" else model)
    if fault == "dies":
        os._exit(1)
    for now in (fault, ""):
        resource.setrlimit(resource.RLIMIT_FSIZE, (16 if now == "cannot write" else resource.RLIM_INFINITY, -1))
        try:
            got.append(str(scheme.send_shards("no weights" if now == "raises" else None).version))
        except RuntimeError as error:
            got.append(f"{type(error).__name__}: {error}")
    return got


def sent(pool: WorkerPool, folder: Path, kind: str, count: int = 2, fault: str = "") -> list[list[str]]:
    """Return what each rank has got; rank 1 has the fault. If it dies, of the others."""
    with pool.group(count) as workers:
        for rank in range(count):
            workers[rank].start(send_twice, rank, count, folder, kind, fault * (rank == 1))
        got = [workers[rank].result() for rank in range(count) if rank != 1 or fault != "dies"]
        for worker in workers:
            worker.kill()  # a process group is for one test
    return got


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kind", ["fsdp", "tp", "ddp"])
def test_ranks_write_what_one_process_would(pool: WorkerPool, tmp_path: Path, kind: str, count: int) -> None:
    with trainer(tmp_path / "whole", Policy(), layout="hf", shard_bytes=200) as scheme:
        scheme.send()
    assert sent(pool, tmp_path, kind, count) == [["1", "2"]] * count
    one, own = (json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("whole/policy", "policy"))
    assert {**own, "writer": ""} == {**one, "writer": ""}  # also the digest
    received: Any = wsync.StoreTransport(tmp_path / "policy").receive_weights(30.0)
    assert all(same_bits(received.flatten_keys(".")[name], one) for name, one in Policy().state_dict().items())


@pytest.mark.parametrize(("fault", "told"), [("raises", "TypeError"), ("cannot write", "OSError"), ("dies", "")])
def test_a_fault_of_one_rank_is_raised_in_all(pool: WorkerPool, tmp_path: Path, fault: str, told: str) -> None:
    for got, after in sent(pool, tmp_path, "fsdp", fault=fault):
        assert got.startswith(f"WeightSyncError: nothing was published: rank 1: {told}" if told else "RuntimeError: ")
        assert after == "2" or not told, "the ranks are in step"
    assert [path.name[:9] for path in tmp_path.glob("policy/v*")] == ["v00000002"] * (told != "")
