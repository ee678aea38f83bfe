"""Many sends of one model through transforms, while the model changes under them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import wsync
from wsync.testing import WorkerPool, commands
from wsync.transforms import Cast


class Tied(nn.Module):
    """Two layers, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.one.weight


def tied_in_bfloat16() -> Tied:
    return Tied().bfloat16()


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool()
    yield pool
    pool.close()


def scheme_of(backend: str, **options: Any) -> wsync.WeightSyncScheme:
    network = {"shared_memory": False} if backend == "distributed" else {}
    return wsync.WeightSyncScheme.from_backend(backend, timeout=30.0, **network, **options)


@pytest.mark.parametrize("backend", ["shared_mem", "multiprocess", "distributed"])
def test_every_version_is_that_of_the_model_as_it_is(pool: WorkerPool, backend: str) -> None:
    model, cast = Tied(), Cast("bfloat16")

    def expected() -> Any:
        copy = tied_in_bfloat16()
        copy.load_state_dict(model.state_dict())
        return commands.digest_of(copy)

    with pool.group(2) as workers, scheme_of(backend, send_transform=cast) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=2)
        for worker, one in enumerate(workers):
            one.start(commands.join, scheme, tied_in_bfloat16, worker, "policy")
        scheme.connect()
        _ = [one.result() for one in workers]
        for number in range(8):
            for parameter in model.parameters():
                parameter.data.normal_()
            if number == 3:
                model.two.weight = nn.Parameter(torch.randn(6, 6))  # another object in its place
            if number == 5:
                model.two.bias.data = torch.randn(12)[::2]  # other memory, other strides
            report = scheme.send() if number % 2 else scheme.send(model)
            assert report is not None and report.version == number + 2
            assert workers.call(commands.digest) == [expected()] * 2
        scheme.send({name: one + 1 for name, one in model.state_dict().items()})
        scheme.send()
        assert workers.call(commands.digest) == [expected()] * 2
        model.tied.weight = nn.Parameter(torch.randn(6, 6))
        with pytest.raises(wsync.LayoutMismatch, match="tied"):
            scheme.send()
        model.tied.weight = model.one.weight
        model.two = nn.Linear(6, 7)
        with pytest.raises(wsync.LayoutMismatch, match=r"two\.weight"):
            scheme.send()
        model.two = nn.Linear(6, 6)
        scheme.send()
        assert workers.call(commands.digest) == [expected()] * 2
