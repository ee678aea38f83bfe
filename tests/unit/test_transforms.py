"""Modules inside an environment: what they read and write, on every row, and what they refuse."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from torch import Tensor, nn

from collectors import GymEnv, ModuleTransform
from collectors.environments.transforms import Key

REWARD: list[Key] = [("next", "reward")]
ALL: list[Key] = ["observation", "action", ("next", "observation"), ("next", "reward")]


class Counter(gym.Env):
    """Observes how many steps it has taken in all its life, which restarts at 100 × the episode; ends after three."""

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = spaces.Discrete(3)
    episode, count = -1, 0

    def seen(self) -> np.ndarray:
        return np.array([100.0 * self.episode, self.count])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self.seen(), float(self.count), self.count == 3, False, {}


class Judge(nn.Module):
    """A reward model that remembers what it was given."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.flat = flat
        self.calls: list[tuple[Tensor, ...]] = []

    def forward(self, observation: Tensor, action: Tensor, successor: Tensor, reward: Tensor) -> Tensor:
        assert all(one.dtype is torch.float32 for one in (observation, action, successor, reward))
        self.calls.append((observation, action, successor, reward))
        judged = 10 * reward + successor[:, 1:] - observation[:, 1:]
        return judged[:, 0] if self.flat else judged


def rows(batch: TensorDictBase, *key: str) -> Tensor:
    """``[E, T, ...]``, also of one environment."""
    value = batch.get(key)
    return value if batch.ndim == 2 else value.unsqueeze(0)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("flat", [False, True])
def test_a_reward_model_reads_the_step_and_the_episode_counts_the_environments_own(num_envs: int, flat: bool) -> None:
    judge = Judge(flat)
    env = GymEnv(Counter, num_envs, transforms=[ModuleTransform(judge, ALL, REWARD)])
    batch = env.rollout(7)
    own = torch.tensor([1.0, 2, 3, 1, 2, 3, 1]).expand(num_envs, 7)
    assert torch.equal(rows(batch, "next", "reward")[..., 0], 10 * own + 1)
    sums = torch.tensor([1.0, 3, 6, 1, 3, 6, 1]).expand(num_envs, 7)
    assert torch.equal(rows(batch, "next", "episode_return")[..., 0], sums)
    given = [torch.stack(column, 1) for column in zip(*judge.calls, strict=True)]
    assert torch.equal(given[0], rows(batch, "observation"))
    assert torch.equal(given[1], nn.functional.one_hot(rows(batch, "action"), 3).float())
    assert torch.equal(given[2], rows(batch, "next", "observation"))
    assert torch.equal(given[3][..., 0], own)
