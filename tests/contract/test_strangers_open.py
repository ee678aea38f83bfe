"""What strangers hit in ``wsync`` and is open: points of issues 57 and 59, by their inputs, expected to fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import wsync


def issue(number: str) -> pytest.MarkDecorator:
    """An expected failure, until the rebuilt core takes it."""
    return pytest.mark.xfail(strict=False, reason=f"issue {number}")


def linear() -> nn.Module:
    return nn.Linear(2, 2)


@issue("57.18")
def test_18_the_transport_of_shared_memory_is_one_object_with_the_registered_buffers() -> None:
    weights = TensorDict({"weight": torch.ones(2)})
    with wsync.SharedMemWeightSyncScheme({"policy": weights}) as scheme:
        transport: Any = scheme.create_transport(None)
        assert scheme.create_transport(None) is transport
        assert [one["weight"].tolist() for one in transport.unique_weights] == [[1.0, 1.0]]


@issue("57.19")
def test_19_a_lazy_policy_is_initialised_by_an_observation() -> None:
    from collectors import Collector, GymEnv

    policy = nn.LazyLinear(2)
    with Collector(lambda: GymEnv("CartPole-v1"), policy, frames_per_batch=4) as collector:
        collector.update_policy_weights_()
        assert next(collector).numel() == 4 and policy.in_features == 4


@issue("57.20")
def test_20_the_newest_pages_order_and_what_exists_before_init() -> None:
    by_position: Any = wsync.SharedMemWeightSyncScheme
    assert by_position("state_dict", False).strategy == "state_dict"
    with pytest.raises(RuntimeError, match="init_on_sender"):
        wsync.NoWeightSyncScheme().get_sender()
