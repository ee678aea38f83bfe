"""Versions of the policy on a collector and its frames, its counters, and a run that is resumed from its state."""

import io

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from collectors import Collector, GymEnv, MultiAsyncCollector, MultiSyncCollector
from collectors.distributed import DistributedCollector, RPCCollector

EVERY = [Collector, MultiSyncCollector, MultiAsyncCollector]


def policy(value: float = 0.0) -> TensorDictModule:
    model = nn.Linear(4, 2)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, value)
    return TensorDictModule(model, in_keys=["observation"], out_keys=["action"])


def value_of(batch) -> float:
    """The weight that acted, where the observations are 0."""
    (value,) = batch["action"].unique().tolist()
    return value


class Still(GymEnv):
    """CartPole's shapes; every observation is 0."""

    def __init__(self, num_envs: int = 2):
        super().__init__("CartPole-v1", num_envs)
        self.stepper.driver = Zeros(self.stepper.driver)


class Zeros:
    def __init__(self, driver):
        self.driver = driver

    def __getattr__(self, name):
        return getattr(vars(self)["driver"], name)

    def reset(self, seed):
        return 0 * self.driver.reset(seed)

    def step(self, action):
        successor, *rest = self.driver.step(action)
        return 0 * successor, *rest

    def reset_rows(self, mask):
        return 0 * self.driver.reset_rows(mask)


def collect_with(cls, trained=None, *, make=Still, **options):
    options.setdefault("frames_per_batch", 8)
    makers = [make] * (1 if cls is Collector else 2)
    return cls(makers, policy() if trained is None else trained, **options)


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


def saved(state):
    """The state by way of a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "cls", [*EVERY, *(pytest.param(cls, marks=pytest.mark.slow) for cls in (DistributedCollector, RPCCollector))]
)
def test_versions_and_weights_go_on_after_a_resume(cls):
    with collect_with(cls, policy(1.0)) as first:
        for value in (2.0, 3.0, 4.0):
            first.update_policy_weights_(policy(value))
            first.next()
        nn.init.constant_(first.policy.module.weight, 4.0)
        nn.init.constant_(first.policy.module.bias, 4.0)
        state = saved(first.state_dict())
        nn.init.constant_(first.policy.module.bias, 5.0)
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
