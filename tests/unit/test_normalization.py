"""Statistics of observations and rewards are those of all frames, and what is made of them is what it says."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from collectors.environments.specs import Spec
from learning.normalization import Moments, ObservationNormalizer, RewardNormalizer

SPEC = Spec(torch.Size([3]), torch.float32)


def batch_of(reward: torch.Tensor, done: torch.Tensor) -> TensorDict:
    step = TensorDict({"reward": reward.unsqueeze(-1), "done": done.unsqueeze(-1)}, reward.shape)
    return TensorDict({"next": step}, reward.shape)


def test_moments_are_those_of_all_rows_whatever_the_batches() -> None:
    torch.manual_seed(0)
    rows, moments = 1000 + 5 * torch.randn(700, 3), Moments(3)
    for part in rows.split([1, 9, 90, 600]):
        moments.update(part)
    moments.update(rows[:0])
    torch.testing.assert_close(moments.mean, rows.mean(0), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(moments.var, rows.var(0, correction=0), rtol=1e-3, atol=0.0)
    assert moments.count.item() == 700


def test_observations_get_mean_0_and_deviation_1_and_are_clipped() -> None:
    normalizer, observation = ObservationNormalizer(SPEC), 7 + 3 * torch.randn(4, 500, 3)
    assert normalizer.is_new
    mask = torch.ones(4, 500, dtype=torch.bool)
    mask[:, 100] = False
    observation[:, 100] = 1e6
    normalizer.update(observation, mask)
    assert not normalizer.is_new
    result = normalizer(observation)[mask]
    torch.testing.assert_close(result.mean(0), torch.zeros(3), atol=1e-3, rtol=0.0)
    torch.testing.assert_close(result.std(0), torch.ones(3), atol=1e-2, rtol=0.0)
    assert normalizer(torch.full((3,), 1e9)).tolist() == [10.0] * 3


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return_as_gymnasium_does() -> None:
    class Rewarding(gym.Env):
        observation_space, action_space = spaces.Discrete(1), spaces.Discrete(1)

        def reset(self, **_: object) -> tuple[int, dict]:
            return 0, {}

        def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
            self.count = getattr(self, "count", -1) + 1
            return 0, float(rewards[self.count]), bool(done[self.count]), False, {}

    rng = np.random.default_rng(0)
    rewards, done = rng.normal(3, 1, 4000), rng.random(4000) < 0.02
    peer = gym.wrappers.NormalizeReward(Rewarding(), gamma=0.9)
    peer.reset()
    expected = [float(peer.step(0)[1]) for _ in rewards][-1] / rewards[-1]
    normalizer, batch = RewardNormalizer("normalized", 0.9), None
    for part in range(0, 4000, 500):  # the sums continue from batch to batch
        one = torch.from_numpy(rewards[None, part : part + 500]).float()
        batch = normalizer(batch_of(one, torch.from_numpy(done[None, part : part + 500])))
    assert batch is not None
    assert batch["next", "reward"][0, -1].item() / rewards[-1] == pytest.approx(expected, rel=0.05)
    resumed = RewardNormalizer("normalized", 0.9)
    resumed.load_state_dict(normalizer.state_dict())
    assert resumed.moments.var == normalizer.moments.var
