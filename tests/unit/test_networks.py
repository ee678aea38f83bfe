from __future__ import annotations

from typing import Any

import pytest
import torch
from bandit import CHOICE, TORQUES
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type

from collectors import Collector, GymEnv
from collectors.environments.specs import Spec
from learning import PPO, RNN, Policy, make_actor_critic, make_policy
from learning.normalization import ObservationNormalizer

both = pytest.mark.parametrize("spec", [CHOICE, TORQUES], ids=["discrete", "continuous"])


def policy_of(spec: Spec, seed: int = 0) -> Policy:
    """A policy that is not indifferent, as a fresh one is."""
    torch.manual_seed(seed)
    policy = make_policy(4, spec, (16, 16))
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return policy


@torch.no_grad()
def act(policy: Policy, *batch: int, observation: torch.Tensor | None = None) -> TensorDict:
    observation = torch.randn(*batch, 4) if observation is None else observation
    result = policy(TensorDict({"observation": observation}, batch_size=observation.shape[:-1]))
    assert isinstance(result, TensorDict)
    return result


@both
@pytest.mark.parametrize("batch", [(), (5,), (2, 3, 5)], ids=str)
def test_shapes_and_dtypes(spec: Spec, batch: tuple[int, ...]) -> None:
    td = act(policy_of(spec), *batch)
    discrete = spec is CHOICE
    assert td["action"].shape == (batch if discrete else (*batch, 2))
    assert td["action"].dtype == (torch.int64 if discrete else torch.float32)
    assert td["action_log_prob"].shape == batch
    assert td["action_log_prob"].dtype == torch.float32


@both
def test_samples_follow_the_distribution(spec: Spec) -> None:
    policy = policy_of(spec)
    observation = torch.randn(4).expand(40_000, 4)
    action = act(policy, observation=observation)["action"]
    distribution = policy.distribution(observation[0])
    if isinstance(distribution, torch.distributions.Categorical):
        share = torch.bincount(action, minlength=3) / len(action)
        torch.testing.assert_close(share, distribution.probs, atol=0.02, rtol=0.0)
    else:
        torch.testing.assert_close(action.mean(0), distribution.mean, atol=0.1, rtol=0.02)
        torch.testing.assert_close(action.std(0), distribution.stddev, atol=0.1, rtol=0.02)


@both
def test_greedy_acting_takes_the_mode(spec: Spec) -> None:
    policy = policy_of(spec)
    with set_interaction_type(InteractionType.DETERMINISTIC):
        td = act(policy, 50)
    distribution = policy.distribution(td["observation"])
    torch.testing.assert_close(td["action"], distribution.mode)
    torch.testing.assert_close(td["action_log_prob"], distribution.log_prob(distribution.mode), rtol=1e-4, atol=1e-4)


@both
@torch.no_grad()
def test_a_worker_acts_with_the_network_and_its_hooks_and_what_a_class_overrides(spec: Spec) -> None:
    policy, observation, calls = policy_of(spec), torch.randn(5, 4), []
    network: Any = policy.network
    network.normalizer = ObservationNormalizer(Spec(torch.Size([4]), torch.float32))
    network.normalizer.update(3 * torch.randn(100, 4) + 1)
    network.trunk.layers[3] = network.trunk.layers[1]  # one activation, used twice

    def require_same(act: Any) -> None:
        parameters = policy.distribution_parameters(observation)
        noise = policy.noise(parameters)
        torch.testing.assert_close(act(observation, noise), (policy.choose(parameters, noise), parameters))

    require_same(prepared := policy.prepare())
    for i, weight in enumerate([*policy.parameters(), *policy.buffers()]):  # versions are written and bound
        weight.data = weight + 1 if i % 2 else weight.data.add_(1)
    require_same(prepared)
    network.trunk.layers[2].register_forward_hook(lambda *arguments: calls.append(1) or 2 * arguments[-1])
    require_same(policy.prepare())
    assert len(calls) == 2
    policy.__class__ = type("Sharp", (type(policy),), {"distribution_parameters": lambda self, x: 1 + self.network(x)})
    if spec is CHOICE:
        require_same(policy.prepare())


def test_networks_are_of_the_observations_dtype_whatever_the_default_is() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        env = GymEnv("CartPole-v1", 2)
        policy, critic = make_actor_critic(RNN, env.observation_spec["observation"], env.action_spec)
        with Collector(env, policy, frames_per_batch=64) as collector:
            PPO(policy, critic, minibatch_size=32).update(next(collector))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {weight.dtype for one in (policy, critic) for weight in one.parameters()} == {torch.float32}
