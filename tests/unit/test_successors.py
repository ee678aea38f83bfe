"""The value of each frame's successor, as both learners compute it: seen through the loss of the critic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bandit import batch_of, learner_of
from tensordict import TensorDict

from learning import IMPALA, PPO, gae


def trajectories(acting: Any, *, rows: int = 3, length: int = 9) -> TensorDict:
    """Experience in which a frame's successor is the next frame's observation, except where an episode ends."""
    batch = batch_of(acting, rows, length)
    step, generator = batch["next"], torch.Generator().manual_seed(1)
    terminated, truncated = (torch.rand(rows, length, 1, generator=generator) < 0.15 for _ in range(2))
    step["terminated"], step["truncated"], step["done"] = terminated, truncated, terminated | truncated
    going_on = ~step["done"][:, :-1]
    step["observation"][:, :-1] = torch.where(going_on, batch["observation"][:, 1:], step["observation"][:, :-1])
    assert truncated.any() and terminated.any() and going_on.any()
    return batch


@pytest.mark.parametrize("kind", [PPO, IMPALA])
def test_a_truncated_episode_and_the_last_column_have_the_value_of_their_own_successor(kind: Any) -> None:
    at_once: Any = {"epochs": 1, "minibatch_size": 64, "gamma": 0.9}  # one gradient step
    learner = learner_of(kind, **at_once, **({"gae_lambda": 1.0} if kind is PPO else {}))
    batch = trajectories(learner.policy)
    step = batch["next"]
    with torch.no_grad():
        value, next_value = learner.critic(batch["observation"]), learner.critic(step["observation"])
    reward, terminated, done = (step[key].squeeze(-1) for key in ("reward", "terminated", "done"))
    error = gae(reward, value, next_value, terminated, done, gamma=0.9, lmbda=1.0)
    stats = learner.update(batch)
    assert stats["loss_value"] == pytest.approx(0.5 * error.square().mean().item(), rel=1e-4)
