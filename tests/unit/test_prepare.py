"""``prepare_weights``: the weights that a send would deliver, without sending them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from small_models import linear
from tensordict import TensorDict
from torch import nn

import wsync
from wsync import WeightStrategy


def test_prepared_weights_have_the_format_of_the_strategy() -> None:
    with wsync.SharedMemWeightSyncScheme() as scheme:
        with pytest.raises(wsync.NotConnected):
            scheme.prepare_weights(None, "policy")
        scheme.init_on_sender("policy", model=linear(1), num_workers=2)
        assert scheme.prepare_weights(None, "policy")["bias"].tolist() == [1, 1]
        prepared = scheme.prepare_weights(linear(2), "policy", WeightStrategy("state_dict"))
        assert isinstance(prepared, dict) and prepared["bias"].tolist() == [2, 2]
        nested = nn.Sequential(linear(4))
        prepared = scheme.prepare_weights(nested, "policy")
        assert isinstance(prepared, TensorDict) and prepared["0", "bias"].tolist() == [4, 4]
        prepared = scheme.prepare_weights(nested, "policy", WeightStrategy("state_dict"))
        assert isinstance(prepared, dict) and prepared["0.bias"].tolist() == [4, 4]
        context = nn.ModuleDict({"policy": linear(3)})
        assert scheme.prepare_weights(None, "policy", context=context)["bias"].tolist() == [3, 3]
        assert scheme.version == 0 and torch.equal(scheme.weights["bias"], torch.ones(2))


def biases(by_worker: dict[int, Any]) -> dict[int, list[float]]:
    return {worker: weights["bias"].tolist() for worker, weights in by_worker.items()}


def test_prepared_weights_per_worker() -> None:
    with wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", params_map={np.int64(0): linear(1), np.int64(1): linear(2)})
        prepared = scheme.prepare_weights(None, "policy")
        assert biases(prepared) == biases(scheme.weights) == {0: [1, 1], 1: [2, 2]}
        prepared = scheme.prepare_weights({0: linear(3).state_dict(), 1: linear(4).state_dict()}, "policy")
        assert biases(prepared) == {0: [3, 3], 1: [4, 4]}
