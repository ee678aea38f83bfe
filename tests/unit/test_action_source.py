"""A policy used in parts gives the same results as a policy that is called."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from torch import nn

import wsync
from collectors import Collector, GymEnv
from collectors.rollouts.action_source import CalledPolicy, PolicyInParts
from collectors.rollouts.rollout import NO_VERSION, Rollout
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


@settings(max_examples=25, deadline=None)
@given(
    env_id=st.sampled_from(ENVS),
    num_envs=st.integers(1, 3),
    steps=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    random=st.integers(0, 20),
)
def test_what_is_stored_is_what_the_policy_did(env_id: str, num_envs: int, steps: list[int], random: int) -> None:
    env = GymEnv(env_id, num_envs, seed=0)
    policy = policy_for(env)
    rollout = Rollout(env, policy, init_random_frames=random)
    batch = collected(rollout, *steps)
    assert isinstance(rollout._source, PolicyInParts)
    first = min(-(-random // num_envs), sum(steps))
    chance, acted = batch[..., :first], batch[..., first:]
    assert bool((chance["policy_version"] == NO_VERSION).all()) and bool((acted["policy_version"] == 0).all())
    if acted.batch_size.numel():
        same(acted["action_log_prob"], log_probs(policy, acted))
    n = env.action_spec.n
    same(chance["action_log_prob"], torch.full(chance.batch_size, -math.log(n if n else 4.0)))


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("env_id", ENVS)
def test_called_or_asked_the_batches_are_alike(env_id: str, num_envs: int) -> None:
    env = GymEnv(env_id, num_envs, seed=0)
    policy = policy_for(env)
    asked, called = (
        {key: (value.shape, value.dtype) for key, value in Rollout(env, one).buffer(5).items(True, True)}
        for one in (policy, lambda td: policy(td))
    )
    assert asked == called


@pytest.mark.parametrize("env_id", ENVS)
def test_called_or_asked_the_most_likely_action_is_the_same(env_id: str) -> None:
    def run(called: bool) -> TensorDict:
        env = GymEnv(env_id, 2, seed=3)
        policy = policy_for(env)
        with set_interaction_type(InteractionType.DETERMINISTIC):
            return collected(Rollout(env, (lambda td: policy(td)) if called else policy), 20)

    asked, called = run(called=False), run(called=True)
    for key in ("observation", "action", "action_log_prob"):
        same(asked[key], called[key])


@pytest.mark.parametrize("env_id", ENVS)
def test_asked_samples_follow_the_distribution(env_id: str) -> None:
    env = GymEnv(env_id, 4, seed=0)
    policy = policy_for(env)
    batch = collected(Rollout(env, policy, max_frames_per_traj=20), 2000)
    distribution: Any = policy.distribution(batch["observation"])
    if isinstance(distribution, torch.distributions.Categorical):
        share = torch.bincount(batch["action"].flatten(), minlength=distribution.probs.shape[-1]) / batch.numel()
        torch.testing.assert_close(share, distribution.probs.mean((0, 1)).detach(), atol=0.02, rtol=0.0)
    else:
        noise = (batch["action"] - distribution.base_dist.mean) / distribution.base_dist.stddev
        torch.testing.assert_close(noise.mean(), torch.tensor(0.0), atol=0.05, rtol=0.0)
        torch.testing.assert_close(noise.std(), torch.tensor(1.0), atol=0.05, rtol=0.0)


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


class FirstTwo(nn.Module):
    """Its output is the environment's memory."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return observation[..., :2]


def test_parameters_are_kept_though_the_environment_goes_on() -> None:
    env = GymEnv("CartPole-v1", 3, seed=0)
    policy = CategoricalPolicy(FirstTwo())
    batch = collected(Rollout(env, policy), 10)
    same(batch["action_log_prob"], log_probs(policy, batch))


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


class Held(nn.Module):
    """Scores, and whether the gate was held when they were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.held: list[bool] = []

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.held.append(process_gate().held_here)
        return self.linear(observation)


def test_a_synchronised_policy_acts_inside_the_gate() -> None:
    policy, env = CategoricalPolicy(Held()), GymEnv("CartPole-v1", 2, seed=0)
    with wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_in_process("policy", policy, CategoricalPolicy(Held()))
        env.rollout(5, policy)
        assert isinstance(Rollout(env, policy)._action_source(), PolicyInParts)
    assert isinstance(policy.network, Held) and len(policy.network.held) >= 6 and all(policy.network.held)


def test_a_policy_without_a_scheme_does_not_hold_the_gate() -> None:
    """It may wait for another thread that needs the gate."""
    held: list[bool] = []

    def act(observation: TensorDictBase) -> TensorDictBase:
        held.append(process_gate().held_here)
        return observation.set("action", torch.zeros(observation.batch_size, dtype=torch.int64))

    with Collector(lambda: GymEnv("CartPole-v1", 2), policy_factory=lambda: act, frames_per_batch=8) as collector:
        next(collector)
    assert held and not any(held)


def test_scores_of_low_precision_are_sampled_as_they_are_stated() -> None:
    policy = CategoricalPolicy(nn.Identity())
    scores = torch.tensor([100.0, 100.5], dtype=torch.bfloat16).expand(100_000, 2)
    torch.manual_seed(0)
    share = policy.choose(scores, policy.noise(scores)).float().mean()
    stated = policy.log_prob(scores[:1], torch.tensor([1])).exp().float()[0]
    torch.testing.assert_close(share, stated, atol=0.01, rtol=0.0)


class Loud(CategoricalPolicy):
    """A forward of its own, which writes one thing more."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super().forward(tensordict).set("loud", torch.ones(tensordict.batch_size))


def test_a_forward_of_its_own_is_called() -> None:
    env = GymEnv("CartPole-v1", 3, seed=0)
    batch = collected(Rollout(env, Loud(policy_for(env).network)), 4)
    assert bool((batch["loud"] == 1).all())


class Zealous(CategoricalPolicy):
    """Always the same, by a call of its own."""

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super().__call__(tensordict).set("action", torch.ones(tensordict.batch_size, dtype=torch.int64))


def with_a_forward_of_its_own(network: nn.Module) -> Policy:
    policy = CategoricalPolicy(network)
    whole = policy.forward
    policy.forward = lambda td: whole(td).set("action", torch.ones(td.batch_size, dtype=torch.int64))
    return policy


@pytest.mark.parametrize("make", [Zealous, with_a_forward_of_its_own])
def test_whatever_is_wrapped_around_a_policy_counts(make: Callable[[nn.Module], Policy]) -> None:
    env = GymEnv("CartPole-v1", 3, seed=0)
    assert bool((collected(Rollout(env, make(policy_for(env).network)), 20)["action"] == 1).all())


class PerStep(CategoricalPolicy):
    """Draws for each step alone, which is asked for nothing when there is no step."""

    def noise(self, parameters: torch.Tensor, *steps: int) -> torch.Tensor:
        return torch.stack([super(PerStep, self).noise(parameters) for _ in range(*steps)]) if steps else parameters


def test_a_batch_of_random_frames_asks_for_nothing() -> None:
    env = GymEnv("CartPole-v1", 2, seed=0)
    rollout = Rollout(env, PerStep(policy_for(env).network), init_random_frames=8)
    batch = collected(rollout, 4, 2)
    assert batch["policy_version"].tolist() == [[-1] * 4 + [0] * 2] * 2


class Wordless(CategoricalPolicy):
    """Its noise is for one step."""

    def noise(self, parameters: torch.Tensor, *steps: int) -> torch.Tensor:
        return torch.zeros_like(parameters)


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_noise_of_a_wrong_form_is_named(steps: int) -> None:
    env = GymEnv("CartPole-v1", 3, seed=0)
    with pytest.raises(
        ValueError, match=rf"Wordless.noise\(parameters, {steps}\) has shape \[3, 2\]: .*\[{steps}, 3\]"
    ):
        collected(Rollout(env, Wordless(policy_for(env).network)), steps)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_are_called(kind: str, late: bool) -> None:
    env = GymEnv("CartPole-v1", 3, seed=0)
    policy, calls = policy_for(env), []
    rollout = Rollout(env, policy)
    batch = rollout.buffer(4) if late else None
    assert batch is None or isinstance(rollout._source, PolicyInParts)

    def hook(module: Policy, inputs: Any, output: TensorDictBase | None = None) -> None:
        calls.append(module)
        inputs[0].set("hooked", torch.ones(inputs[0].batch_size))  # buffers that there are already have no place for it

    getattr(policy, kind)(hook)
    batch = rollout.buffer(4) if batch is None else batch
    calls.clear()
    rollout.collect(batch)
    assert isinstance(rollout._source, CalledPolicy)
    assert len(calls) >= 4
    assert ("hooked" in set(batch.keys())) == (not late)
    same(batch["action_log_prob"], log_probs(policy, batch))


def test_an_error_in_the_network_comes_out_and_the_next_batch_is_whole() -> None:
    env = GymEnv("CartPole-v1", 2, seed=0)
    policy = policy_for(env)
    rollout = Rollout(env, policy)
    batch = rollout.buffer(6)
    handle = policy.network.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        rollout.collect(batch)
    handle.remove()
    rollout.collect(batch)
    same(batch["action_log_prob"], log_probs(policy, batch))


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_module_over_tensors_acts_as_one_over_tensordicts_does(num_envs: int) -> None:
    network = nn.Linear(4, 2)

    def run(policy: Any) -> TensorDict:
        return collected(Rollout(GymEnv("CartPole-v1", num_envs, seed=0), policy), 10)

    bare, wrapped = (run(one) for one in (network, TensorDictModule(network, ["observation"], ["action"])))
    assert (bare == wrapped).all()


class Doubled(nn.Module):
    """A TensorDict can be multiplied, too: what comes of that is no action."""

    def forward(self, given: Any) -> Any:
        return 2 * given[..., :2]


class Documented(nn.Module):
    """Takes a TensorDict, as it declares in some way."""

    def _act(self, given: TensorDictBase) -> TensorDictBase:
        assert isinstance(given, TensorDictBase), "it was called with something else"
        return given.set("action", given["observation"][..., :2])


class Typed(Documented):
    def forward(self, given: TensorDictBase) -> TensorDictBase:
        return self._act(given)


class Named(Documented):
    def forward(self, tensordict):  # type: ignore[no-untyped-def]
        return self._act(tensordict)


class WithKeys(Documented):
    in_keys, out_keys = ("observation",), ("action",)

    def forward(self, given):  # type: ignore[no-untyped-def]
        return self._act(given)


class Undeclared(nn.Module):
    def forward(self, given):  # type: ignore[no-untyped-def]
        return given.set("action", given["observation"][..., :2])


@pytest.mark.parametrize("kind", [Doubled, Typed, Named, WithKeys, Undeclared])
def test_what_a_module_takes_is_found_out(kind: type[nn.Module]) -> None:
    batch = collected(Rollout(GymEnv("CartPole-v1", 2), kind()), 5)
    factor = 2 if kind is Doubled else 1
    assert torch.equal(batch["action"], factor * batch["observation"][..., :2])
