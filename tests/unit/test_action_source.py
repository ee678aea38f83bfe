"""A policy used in parts gives the same results as a policy that is called."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

import wsync
from collectors import GymEnv
from collectors.rollouts.action_source import CalledPolicy, PolicyInParts
from collectors.rollouts.rollout import Rollout
from learning import CategoricalPolicy, Policy, make_policy
from wsync.gate import process_gate

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


class Scores(nn.Module):
    """The same for every observation, and a view of its weights: all are the number of its version."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return self.weights.expand(*observation.shape[:-1], 2)


class Told(CategoricalPolicy):
    """Its log-probability is its score."""

    def log_prob(self, parameters: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return parameters[..., 0]


class UpdatedAtOnce:
    """A hook with a next version that is there as soon as the gate is open."""

    def __init__(self, weights: nn.Parameter) -> None:
        self.weights = weights

    def poll_update(self) -> bool:
        return False

    def leaving_gate(self) -> None:
        with torch.no_grad():
            self.weights += 1


@pytest.mark.parametrize("called", [False, True])
def test_outputs_that_are_views_of_weights_are_of_the_version_that_acted(called: bool) -> None:
    scores = Scores()
    policy = Told(scores)

    def call(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", scores(td["observation"])).set("action_log_prob", scores.weights[0].expand(2))

    hook = UpdatedAtOnce(scores.weights)
    rollout = Rollout(
        GymEnv("CartPole-v1", 2, seed=0),
        call if called else policy,
        gate=wsync.gated,
        version=lambda: int(scores.weights[0]),
    )
    batch = rollout.buffer(5)
    process_gate().attach(hook)
    try:
        rollout.collect(batch)
    finally:
        process_gate().detach(hook)
    assert isinstance(rollout._source, CalledPolicy if called else PolicyInParts)
    assert batch["policy_version"].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert torch.equal(batch["action_log_prob"], batch["policy_version"].float())
    assert not called or torch.equal(batch["action"][..., 0], batch["action_log_prob"])
