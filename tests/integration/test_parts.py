"""A policy in worker processes, asked for its parts or called, while updates come without a pause."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
import stepping
import torch
from stepping import Quiet
from tensordict import TensorDictBase
from torch import nn

import wsync
from collectors import MultiAsyncCollector, MultiSyncCollector, SampledPolicy
from collectors.distributed import DistributedCollector
from learning.networks import GaussianPolicy

for module in (sys.modules[__name__], stepping):
    cloudpickle.register_pickle_by_value(module)  # no worker has these files in its path
LAYERS, SEEN = 8, 16


class Floor(Quiet):
    """Takes any 16 numbers."""

    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (SEEN,), np.float32)


class Telling(SampledPolicy):
    """Does what it sees: the least and the greatest weight of each layer. Its log-probability is their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.ones(8192)) for _ in range(LAYERS))

    def become(self, version: int) -> Telling:
        with torch.no_grad():
            for layer in self.layers:
                layer.fill_(version)
        return self

    def distribution_parameters(self, observation: torch.Tensor) -> torch.Tensor:
        seen = torch.stack([extreme for layer in self.layers for extreme in layer.aminmax()])
        return seen.expand(*observation.shape[:-1], SEEN)

    def noise(self, parameters: torch.Tensor, *steps: int) -> torch.Tensor:
        return parameters.new_zeros((*steps, *parameters.shape))

    def choose(self, parameters: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
        return parameters if noise is None else parameters + noise

    def log_prob(self, parameters: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return (parameters + action).mean(-1) / 2

    def check(self, batch: TensorDictBase) -> None:
        version = batch["policy_version"].float()
        assert torch.equal(batch["action"], version.unsqueeze(-1).expand_as(batch["action"]))
        assert torch.equal(batch["action_log_prob"], version)


class Showing(Telling):
    """Is called, and shows weights: what it writes are views of them."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        first, last = self.layers[0], self.layers[-1]
        tensordict.set("action", first[:SEEN].expand(*tensordict.batch_size, SEEN))
        return tensordict.set("action_log_prob", last[-1].expand(tensordict.batch_size))


class Layered(GaussianPolicy):
    """Acts by numpy. What it does depends on the weights of all layers."""

    def __init__(self) -> None:
        sizes = pairwise([4, 256, 256, SEEN])
        unbounded = torch.full((SEEN,), torch.inf)
        super().__init__(nn.Sequential(*(nn.Linear(*size) for size in sizes)), -unbounded, unbounded, 1e-9)

    def become(self, version: int) -> Layered:
        with torch.no_grad():
            for weight in self.network.parameters():
                weight.fill_(version)
        return self

    @torch.no_grad()
    def check(self, batch: TensorDictBase) -> None:
        for version in batch["policy_version"].unique().tolist():
            own = batch[batch["policy_version"] == version]
            expected = Layered().become(version).network(own["observation"])
            torch.testing.assert_close(own["action"], expected, rtol=1e-5, atol=0.0)


CASES: dict[str, tuple[Callable[..., Any], Callable[[], wsync.WeightSyncScheme], Callable[[], Any]]] = {
    "installed": (MultiAsyncCollector, partial(wsync.SharedMemWeightSyncScheme, acknowledge="installed"), Telling),
    "published": (MultiAsyncCollector, wsync.SharedMemWeightSyncScheme, Telling),
    "published, in step": (MultiSyncCollector, wsync.SharedMemWeightSyncScheme, Telling),
    "published, views": (MultiAsyncCollector, wsync.SharedMemWeightSyncScheme, Showing),
    "published, by numpy": (MultiAsyncCollector, wsync.SharedMemWeightSyncScheme, lambda: Layered().become(1)),
    "multiprocess": (MultiAsyncCollector, wsync.MultiProcessWeightSyncScheme, Telling),
    "multiprocess, views": (MultiAsyncCollector, wsync.MultiProcessWeightSyncScheme, Showing),
    "tcp": (DistributedCollector, wsync.DistributedWeightSyncScheme, Telling),
}


QUICK = {"published", "published, by numpy", "multiprocess, views", "tcp"}
"""The others combine what these have otherwise."""


@pytest.mark.parametrize("case", [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in CASES])
def test_every_step_is_of_the_version_that_it_is_said_to_be_of(case: str) -> None:
    kind, make_scheme, make_policy = CASES[case]
    scheme, over, versions = make_scheme(), threading.Event(), set()
    learned = make_policy()
    with kind([Floor] * 2, make_policy(), frames_per_batch=200, weight_sync_schemes={"policy": scheme}) as collector:

        def learn() -> None:
            while not over.is_set():
                collector.update_policy_weights_(learned.become(scheme.version + 1))

        learning = threading.Thread(target=learn)
        learning.start()
        try:
            while len(versions) < 50:
                batch = next(collector)
                version = batch["policy_version"]
                assert (version.diff() >= 0).all()
                learned.check(batch)
                versions |= set(version.flatten().tolist())
        finally:
            over.set()
            learning.join()
