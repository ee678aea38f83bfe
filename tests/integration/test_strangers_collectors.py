"""What strangers hit in collectors: points of issue 57, each by its input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from collecting import Scores, cartpole
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import nn

from collectors import Collector, MultiSyncCollector

EVERY = [Collector, MultiSyncCollector]


def actor() -> TensorDictSequential:
    """What TorchRL's ``ProbabilisticActor`` is: logits, and a distribution that samples if it is asked to."""
    logits = TensorDictModule(Scores(), in_keys=["observation"], out_keys=["logits"])
    drawn = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=torch.distributions.Categorical)
    parts: Any = (logits, drawn)
    return TensorDictSequential(*parts)


@pytest.mark.parametrize("cls", EVERY)
def test_57_2_a_policy_with_a_distribution_samples_unless_told_otherwise(cls: Any) -> None:
    makers: list[Any] = [cartpole]
    with cls(makers, actor(), frames_per_batch=128) as collector:
        assert next(collector)["action"].unique().numel() == 2
    with cls(makers, actor(), frames_per_batch=128, exploration_type=InteractionType.DETERMINISTIC) as collector:
        assert next(collector)["action"].unique().tolist() == [1]


@pytest.mark.parametrize("cls", EVERY)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_57_19_a_lazy_policy_is_initialised_by_an_observation(cls: Any) -> None:
    policy, makers = nn.LazyLinear(2), [cartpole]
    with cls(makers, policy, frames_per_batch=4) as collector:
        collector.update_policy_weights_()
        assert next(collector)["policy_version"].min() >= 1 and policy.in_features == 4
