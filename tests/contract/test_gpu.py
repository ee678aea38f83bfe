"""Models on a GPU at both ends. Skipped where there is none."""

import gc
from pathlib import Path

import pytest
import torch
from backends import Cuda, DistributedNccl
from rpc_workers import RpcNccl
from torch import Tensor, nn
from workers_here import both_ends

import wsync
from wsync.testing import BackendContract, BackendHooks
from wsync.testing.models import Small, fill

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TIMEOUT = 20.0


def on_gpu() -> Small:
    return Small().cuda()


def test_updates_between_gpus(backend: BackendHooks) -> None:
    with backend.connected(make=on_gpu) as session:
        for value in (2.0, 3.0):
            session.send(value)
            assert session.outputs() == [value] * len(session.workers)


class OnOneGpu(BackendHooks):
    def test_models_on_the_gpu(self) -> None:
        test_updates_between_gpus(self)


class TestCuda(Cuda, OnOneGpu, BackendContract):
    """The contract suite, with models in main memory at both ends."""


class TestNccl(DistributedNccl, OnOneGpu, BackendContract):
    def test_no_watchdog_can_end_the_process(self) -> None:
        with self.connected(1):
            threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        assert "pt_nccl_watchdg" not in threads


class TestRpcNccl(RpcNccl, OnOneGpu):
    """The same transport, between members of an RPC group."""


class Slow(nn.Module):
    """Its kernels read one weight, and the other one long after Python has left the forward."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.full((64,), value)) for _ in range(2))

    def forward(self) -> Tensor:
        first = self.first + 0
        torch.cuda._sleep(300_000_000)  # cycles: a tenth of a second and more
        return torch.cat([first, self.second])


def test_an_update_waits_for_the_kernels_of_a_forward_on_any_stream() -> None:
    sent, received = Slow(1.0).cuda(), Slow(0.0).cuda()
    with both_ends(sent, model=received, kind=wsync.MultiProcessWeightSyncScheme) as (sender, _), torch.no_grad():
        received()
        for value in (2.0, 3.0):
            with torch.cuda.stream(torch.cuda.Stream()):
                seen = received()
            fill(sent, value)
            sender.send()
            assert seen.unique().tolist() == [value - 1]
        assert received().unique().tolist() == [3.0]


def test_memory_of_ended_schemes_can_be_used_again() -> None:
    for value in range(20):
        sent, received = fill(on_gpu(), value), fill(on_gpu(), -1)
        with both_ends(sent, model=received, kind=wsync.MultiProcessWeightSyncScheme) as (sender, _):
            sender.send()
            assert all((parameter == value).all() for parameter in received.parameters())
        gc.collect()
