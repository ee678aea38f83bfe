"""A policy used in parts gives the same results as a policy that is called."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from collectors import GymEnv
from collectors.rollouts.rollout import Rollout
from learning import Policy, make_policy

ENVS = ["CartPole-v1", "Acrobot-v1", "Pendulum-v1"]


def policy_for(env: GymEnv) -> Policy:
    """A policy with opinions, which a fresh one has not."""
    torch.manual_seed(0)
    policy = make_policy(env.observation_spec["observation"], env.action_spec, (16,))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return policy


def collected(rollout: Rollout, *steps: int) -> TensorDict:
    return torch.cat([rollout.collect(rollout.buffer(count)) for count in steps], dim=-1)  # type: ignore[call-overload]


def log_probs(policy: Policy, batch: TensorDict) -> torch.Tensor:
    return policy.distribution(batch["observation"]).log_prob(batch["action"]).detach()


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("env_id", ENVS)
def test_log_probs_are_those_of_the_weights_that_acted(env_id: str) -> None:
    """Weights may change within a batch; what a later version would have thought of an action is another matter."""
    env = GymEnv(env_id, 2, seed=0)
    policy = policy_for(env)
    steps, kept = 0, []

    def version() -> int:
        nonlocal steps
        steps += 1
        if steps % 4 == 0:  # as an update between two steps does
            kept.append({key: value.clone() for key, value in policy.state_dict().items()})
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(0.2 * torch.randn_like(parameter))
        return (steps - 1) // 4

    batch = collected(Rollout(env, policy, version=version), 12)
    assert batch["policy_version"][0].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for number, weights in enumerate(kept):
        policy.load_state_dict(weights)
        part = batch[:, 4 * number : 4 * number + 4]
        same(part["action_log_prob"], log_probs(policy, part))
