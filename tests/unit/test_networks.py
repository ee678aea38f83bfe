from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from bandit import CHOICE, TORQUES
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, set_interaction_type
from torch import Tensor

from collectors import Collector, GymEnv
from collectors.environments.specs import Spec
from collectors.rollouts.rollout import Rollout
from learning import PPO, RNN, Policy, RecurrentNetwork, make_actor_critic, make_policy
from learning.normalization import Moments, ObservationNormalizer, RewardNormalizer

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
    noise = policy.noise(policy.distribution_parameters(observation), 3)

    def prepare() -> Any:
        return policy.prepare(observation, noise, torch.device("cpu"))

    def require_same(act: Any) -> None:
        observation.normal_()  # the environment writes to this memory
        parameters = policy.distribution_parameters(observation)
        acted = tuple(torch.from_numpy(one) for one in act(2))
        torch.testing.assert_close(acted, (policy.choose(parameters, noise[2]), parameters))

    require_same(prepared := prepare())
    for i, weight in enumerate([*policy.parameters(), *policy.buffers()]):  # versions are written and bound
        weight.data = weight + 1 if i % 2 else weight.data.add_(1)
    require_same(prepared)
    network.trunk.layers[2].register_forward_hook(lambda *arguments: calls.append(1) or 2 * arguments[-1])
    require_same(prepare())
    assert len(calls) == 2
    policy.__class__ = type("Sharp", (type(policy),), {"distribution_parameters": lambda self, x: 1 + self.network(x)})
    if spec is CHOICE:
        require_same(prepare())


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


# --- recurrent policies ---


SPEC, LEFT_OR_RIGHT = Spec(torch.Size([4]), torch.float32), Spec(torch.Size([2]), torch.int64, n=2)


def counting(td: TensorDictBase) -> TensorDictBase:
    """Its state is the number of steps since the start of the episode."""
    before = td.get("count", torch.zeros(*td.batch_size, 1))
    td.set("action", torch.randint(2, td.batch_size))
    return td.set(("next", "count"), before + 1)


@pytest.mark.parametrize(("num_envs", "mode"), [(1, None), (3, "sync"), (3, "vector_entry_point")])
def test_a_state_is_handed_back_and_starts_anew_with_each_episode(num_envs: int, mode: str | None) -> None:
    kwargs: dict[str, Any] = {} if mode is None else {"vectorization_mode": mode}
    rollout = Rollout(GymEnv("CartPole-v1", num_envs, seed=0, **kwargs), counting)
    batches = [rollout.collect(rollout.buffer(60)) for _ in range(3)]
    batch = torch.cat(batches, -1)  # episodes continue from batch to batch
    mask = batch.get("mask", torch.ones(batch.batch_size, dtype=torch.bool))
    expected = batch["next", "episode_length"].squeeze(-1)
    assert bool((batch["next", "count"].squeeze(-1) == expected)[mask].all())
    assert bool((batch["count"].squeeze(-1) == expected - 1)[mask].all())
    assert bool((batch["is_init"].squeeze(-1) == (expected == 1))[mask].all())
    assert bool(batch["next", "done"].any())


class Stepwise(RecurrentNetwork):
    """Uses the sequence that every recurrent network has, a loop."""

    def __init__(self, inner: RNN) -> None:
        super().__init__()
        self.inner, self.state_size = inner, inner.state_size

    def forward(self, observation: Any, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(observation, state)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_sequence_is_what_its_steps_are(cell: str) -> None:
    torch.manual_seed(0)
    network = RNN(SPEC, cell, 8, (6,))
    observation, state = torch.randn(5, 9, 4), torch.randn(5, 9, network.state_size)
    is_init = torch.rand(5, 9) < 0.3
    expected = Stepwise(network).sequence(observation, state, is_init)
    torch.testing.assert_close(network.sequence(observation, state, is_init), expected, atol=1e-5, rtol=1e-4)
    gradient = torch.autograd.grad(expected.sum(), network.cell.weight_hh_l0)[0]
    other = torch.autograd.grad(network.sequence(observation, state, is_init).sum(), network.cell.weight_hh_l0)[0]
    torch.testing.assert_close(gradient, other, atol=1e-4, rtol=1e-3)
    with pytest.raises(ValueError, match="one of lstm, gru"):
        RNN(SPEC, "elman")


@pytest.mark.parametrize(("mode", "shared"), [("sync", True), ("sync", False), ("vector_entry_point", True)])
def test_before_learning_the_probabilities_are_those_of_acting(mode: str, shared: bool) -> None:
    torch.manual_seed(0)
    policy, critic = make_actor_critic(lambda spec: RNN(spec, "lstm", 16), SPEC, LEFT_OR_RIGHT, shared=shared)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.3 * torch.randn_like(p))
    rollout = Rollout(GymEnv("CartPole-v1", 4, seed=0, vectorization_mode=mode), policy)
    learner = PPO(policy, critic, epochs=1, minibatch_size=1000, decoupled=False)
    for _ in range(2):
        batch = rollout.collect(rollout.buffer(40))
        stats = learner.update(batch)
        assert stats["kl"] == pytest.approx(0.0, abs=1e-6) and stats["clip_fraction"] == 0.0
    mask = batch.get("mask", torch.ones(4, 40, dtype=torch.bool))
    assert learner.frames <= 320 and int(mask.sum()) <= 160


def test_ppo_learns_to_remember() -> None:
    """The reward is 1 for repeating the observation before the current one, which only a state can tell."""
    torch.manual_seed(0)
    policy, critic = make_actor_critic(
        lambda spec: RNN(spec, "gru", 16, (16,)), Spec(torch.Size([2]), torch.float32), LEFT_OR_RIGHT
    )
    learner, rewards = PPO(policy, critic, lr=5e-3, epochs=4, minibatch_size=160), []
    for _ in range(30):
        signs = torch.randint(2, (40, 8))
        observation, state, steps = torch.nn.functional.one_hot(signs, 2).float(), None, []
        for t in range(8):
            td = TensorDict({"observation": observation[:, t]}, [40])
            td = td if state is None else td.set("recurrent_state", state)
            with torch.no_grad():
                td = policy(td)
            steps.append(
                td if state is not None else td.set("recurrent_state", torch.zeros_like(td["next", "recurrent_state"]))
            )
            state = td["next", "recurrent_state"]
        batch = torch.stack(steps, 1)
        batch["is_init"] = torch.zeros(40, 8, 1, dtype=torch.bool)
        batch["is_init"][:, 0] = True
        last = torch.full((40, 8, 1), False)
        last[:, -1] = True
        right = (batch["action"][:, 1:] == signs[:, :-1]).float()
        batch["next", "reward"] = torch.cat([torch.zeros(40, 1), right], 1).unsqueeze(-1)
        batch["next", "observation"] = observation
        batch["next", "done"] = batch["next", "terminated"] = last
        rewards.append(right.mean().item())
        learner.update(batch)
    assert rewards[0] < 0.65 and rewards[-1] > 0.9


# --- statistics of observations and rewards are those of all frames ---


THREE = Spec(torch.Size([3]), torch.float32)


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
    normalizer, observation = ObservationNormalizer(THREE), 7 + 3 * torch.randn(4, 500, 3)
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
