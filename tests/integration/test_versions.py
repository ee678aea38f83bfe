"""Versions of the policy on a collector and its frames, its counters, and a run that is resumed from its state."""

import pytest
import torch
from small_models import policy_of
from stepping import Quiet
from tensordict.nn import TensorDictModule
from torch import nn

from collectors import Collector, GymEnv, MultiAsyncCollector, MultiSyncCollector
from collectors.distributed import DistributedCollector, RPCCollector
from wsync.testing.models import fill

EVERY = [Collector, MultiSyncCollector, MultiAsyncCollector]


def policy(value: float = 0.0) -> TensorDictModule:
    return TensorDictModule(policy_of(value), in_keys=["observation"], out_keys=["action"])


def value_of(batch) -> float:
    """The weight that acted, where the observations are 0."""
    (value,) = batch["action"].unique().tolist()
    return value


def collect_with(cls, trained=None, **options):
    makers = [lambda: GymEnv(Quiet, 2)] * (1 if cls is Collector else 2)
    return cls(makers, policy() if trained is None else trained, frames_per_batch=8, **options)


@pytest.mark.parametrize("cls", [*EVERY, DistributedCollector])
def test_policy_version_is_the_newest_that_was_sent(cls):
    with collect_with(cls) as collector:
        for version in range(1, 5):
            assert collector.policy_version == version
            batch = next(b for b in collector if (b["policy_version"] == version).all())
            assert torch.equal(batch["next", "policy_version"], batch["policy_version"])
            assert batch["next", "policy_version"].data_ptr() != batch["policy_version"].data_ptr()
            collector.update_policy_weights_()
    assert collector.policy_version == 5, "it is kept when the collector is shut down"


@pytest.mark.parametrize("cls", EVERY)
def test_next_returns_batches_and_then_none(cls):
    with collect_with(cls, total_frames=24) as collector:
        batches = [collector.next() for _ in range(5)]
        assert [None if batch is None else batch.numel() for batch in batches] == [8, 8, 8, None, None]
    with pytest.raises(RuntimeError, match="shut down"):
        collector.next()


@pytest.mark.parametrize(
    "cls", [*EVERY, *(pytest.param(cls, marks=pytest.mark.slow) for cls in (DistributedCollector, RPCCollector))]
)
def test_versions_and_weights_go_on_after_a_resume(cls, tmp_path):
    with collect_with(cls, policy(1.0)) as first:
        for value in (2.0, 3.0, 4.0):
            first.update_policy_weights_(policy(value))
            first.next()
        fill(first.policy.module, 4.0)
        torch.save(first.state_dict(), tmp_path / "state")
        nn.init.constant_(first.policy.module.bias, 5.0)
    state = torch.load(tmp_path / "state", weights_only=True)
    assert state["frames"] == 24 and state["policy_version"] == 4
    trained = policy(1.0)
    with collect_with(cls, trained) as second:
        second.load_state_dict(state)
        assert second.frames == 24 and second.policy_version == 4
        assert trained.module.bias.tolist() == [4.0, 4.0]
        batch = second.next()
        assert value_of(batch) == 4.0 and (batch["policy_version"] == 4).all()
        second.update_policy_weights_(policy(6.0))
        assert second.policy_version == 5
        newest = next(b for b in second if (b["policy_version"] == 5).all())
        assert value_of(newest) == 6.0
    assert second.frames >= 40
