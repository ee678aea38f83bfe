"""What strangers hit in ``wsync`` and is open: points of issues 57 and 59, by their inputs, expected to fail."""

from __future__ import annotations

import pytest
from torch import nn


def issue(number: str) -> pytest.MarkDecorator:
    """An expected failure, until the rebuilt core takes it."""
    return pytest.mark.xfail(strict=False, reason=f"issue {number}")


def linear() -> nn.Module:
    return nn.Linear(2, 2)


@issue("57.19")
def test_19_a_lazy_policy_is_initialised_by_an_observation() -> None:
    from collectors import Collector, GymEnv

    policy = nn.LazyLinear(2)
    with Collector(lambda: GymEnv("CartPole-v1"), policy, frames_per_batch=4) as collector:
        collector.update_policy_weights_()
        assert next(collector).numel() == 4 and policy.in_features == 4
