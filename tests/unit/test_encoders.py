"""Policies for observations and actions of every space: their shapes, masks and distributions."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from collectors import ActionMask, GymEnv
from collectors.environments.actions import action_codec
from collectors.environments.specs import observation_codec
from collectors.environments.stepper import sample_allowed
from collectors.rollouts.rollout import Rollout
from learning import CNN, IMPALA, MLP, PPO, RNN, make_actor_critic
from learning.encoders import feature_size
from learning.networks import Network

IMAGE = spaces.Box(0, 255, (4, 40, 44), "uint8")
ARM = spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Discrete(3)))
MIXED = spaces.Dict({"pixels": spaces.Box(0, 255, (40, 44, 3), "uint8"), "arm": ARM})


class Bandit(gym.Env):
    """Two choices at once; a mask in its info allows one option of the first. Ends after one step."""

    action_space = spaces.MultiDiscrete([3, 2])

    def __init__(self, space: spaces.Space = MIXED) -> None:
        self.observation_space = space
        self.allowed = 0

    def _info(self) -> dict[str, Any]:
        self.allowed = int(self.np_random.integers(3))
        first = [int(i == self.allowed) for i in range(3)]
        return {"action_mask": (first, [1, 1])}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        right = action[0] == self.allowed
        return self.observation_space.sample(), float(right), True, False, self._info()


@pytest.mark.parametrize(
    ("make", "space", "size"),
    [(MLP, spaces.Box(-1, 1, (5,)), 64), (MLP, MIXED, 64), (MLP, IMAGE, 64), (CNN, IMAGE, 512), (CNN, MIXED, 512 + 5)],
    ids=str,
)
def test_features_of_every_space_for_every_batch_shape(make: Any, space: spaces.Space, size: int) -> None:
    env = GymEnv(lambda: Bandit(space), 3)
    network = make(env.observation_spec["observation"])
    assert feature_size(network, env.observation_spec["observation"]) == size
    batch = env.rollout(4)
    features = network(batch["observation"])
    assert features.shape == (3, 4, size)
    torch.testing.assert_close(network(batch["observation"][1, 2]), features[1, 2], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (spaces.Box(-1, 1, (5,)), "policy=mlp takes observations"),
        (spaces.Box(0, 255, (20, 20, 3), "uint8"), "at least 36 × 36: policy=mlp"),
    ],
)
def test_convolutions_need_images_that_are_large_enough(space: spaces.Space, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CNN(observation_codec(space).spec)


@pytest.mark.parametrize(("make", "shape"), [(MLP, (5,)), (CNN, (4, 40, 44))])
@pytest.mark.parametrize(("high", "divisor"), [(255, 255), (4, 4), (0, 1)])
def test_uint8_is_divided_by_its_upper_bound(make: Any, shape: tuple[int, ...], high: int, divisor: int) -> None:
    network = make(observation_codec(spaces.Box(0, high, shape, "uint8")).spec)
    observation = torch.randint(0, high + 1, shape, dtype=torch.uint8)
    torch.testing.assert_close(network(observation), network(observation.float() / divisor))


class DropsDimensions(MLP):
    def forward(self, observation: Any) -> Any:
        return super().forward(observation.reshape(-1, observation.shape[-1]))


def test_a_network_that_drops_the_leading_dimensions_is_refused_at_the_start() -> None:
    spec = observation_codec(spaces.Box(-1, 1, (5,))).spec
    with pytest.raises(ValueError, match=r"\[2, 3, F\]; it gave \[6, 64\]"):
        make_actor_critic(DropsDimensions, spec, GymEnv(Bandit).action_spec)


@pytest.mark.parametrize("shared", [True, False])
def test_a_network_may_be_shared_with_the_critic(shared: bool) -> None:
    env = GymEnv(Bandit)
    policy, critic = make_actor_critic(MLP, env.observation_spec["observation"], env.action_spec, shared=shared)
    assert isinstance(policy.network, Network) and isinstance(critic.network, Network)
    assert (policy.network.trunk is critic.network.trunk) == shared


def test_several_choices_are_distributed_as_torch_says_and_a_mask_is_kept() -> None:
    env = GymEnv(lambda: ActionMask(Bandit()), 4, seed=0)
    torch.manual_seed(0)
    policy, critic = make_actor_critic(MLP, env.observation_spec["observation"], env.action_spec)
    batch = env.rollout(64, policy)
    assert batch["observation", "action_mask"].shape == (4, 64, 5)
    assert batch["action"].shape == (4, 64, 2) and batch["next", "reward"].min() == 1.0  # the first choice is allowed
    assert critic(batch["observation"]).shape == (4, 64)
    distribution = policy.distribution(batch["observation"])
    torch.testing.assert_close(distribution.log_prob(batch["action"]), batch["action_log_prob"], atol=1e-5, rtol=1e-4)
    assert bool((distribution.entropy() < torch.tensor(2.0).log() + 1e-3).all())  # only the second is open
    free = policy.from_parameters(torch.zeros(5))
    assert free.entropy().item() == pytest.approx(torch.tensor(6.0).log().item())
    share = (free.sample((20_000,)) == 0).float().mean(0)
    torch.testing.assert_close(share, torch.tensor([1 / 3, 1 / 2]), atol=0.02, rtol=0.0)
    assert free.mode.shape == (2,)
    scores = torch.zeros(5, requires_grad=True)
    uneven = policy.from_parameters(scores)  # of three options and of two
    (uneven.entropy() + uneven.log_prob(torch.tensor([2, 1]))).backward()
    torch.testing.assert_close(scores.grad, torch.tensor([-1 / 3, -1 / 3, 2 / 3, -1 / 2, 1 / 2]))


def test_random_actions_are_of_the_choices_that_the_mask_allows() -> None:
    env = GymEnv(lambda: ActionMask(Bandit()), 4, seed=0)
    policy, _ = make_actor_critic(MLP, env.observation_spec["observation"], env.action_spec)
    rollout = Rollout(env, policy, init_random_frames=4 * 64)
    batch = rollout.collect(rollout.buffer(64))
    assert batch["policy_version"].max() == -1 and batch["next", "reward"].min() == 1.0
    assert set(batch["action"][..., 1].unique().tolist()) == {0, 1}
    torch.testing.assert_close(batch["action_log_prob"], torch.full((4, 64), 0.5).log())
    nothing = sample_allowed([3], np.zeros((2, 3), np.bool_), np.random.default_rng(0))
    assert nothing[1] == pytest.approx(-np.log(3)) and nothing[0].shape == (2, 1)


@pytest.mark.parametrize("learner", [PPO, IMPALA])
@pytest.mark.parametrize(("network", "space"), [(MLP, MIXED), (CNN, MIXED), (CNN, IMAGE)])
def test_learners_take_images_and_observations_of_several_parts(learner: Any, network: Any, space: Any) -> None:
    env = GymEnv(lambda: ActionMask(Bandit(space)), 2, seed=0)
    policy, critic = make_actor_critic(network, env.observation_spec["observation"], env.action_spec)
    before = [parameter.clone() for parameter in policy.parameters()]
    stats = learner(policy, critic, epochs=1, minibatch_size=8).update(env.rollout(16, policy))
    assert all(np.isfinite(value) for value in stats.values())
    assert all(not torch.equal(*pair) for pair in zip(before, policy.parameters(), strict=True))


@pytest.mark.parametrize(("learner", "network"), [(PPO, MLP), (PPO, RNN), (IMPALA, MLP)])
def test_learners_refuse_a_mask_without_a_possible_action(learner: Any, network: Any) -> None:
    env = GymEnv(lambda: ActionMask(Bandit()), 2, seed=0)
    policy, critic = make_actor_critic(network, env.observation_spec["observation"], env.action_spec)
    batch = env.rollout(16, policy)
    batch["observation", "action_mask"][1, 3, 3:] = 0
    with pytest.raises(ValueError, match=r"the action mask allows no action in 1 frames"):
        learner(policy, critic, epochs=1, minibatch_size=8).update(batch)
    batch["mask"] = torch.ones(2, 16, dtype=torch.bool).index_put(
        (torch.tensor(1), torch.tensor(3)), torch.tensor(False)
    )
    learner(policy, critic, epochs=1, minibatch_size=8).update(batch)


def test_a_mask_has_an_element_for_each_option() -> None:
    env = GymEnv(lambda: ActionMask(Bandit()))
    wrong = action_codec(spaces.Discrete(2)).spec
    with pytest.raises(ValueError, match="action_mask has 5 elements, and the action has 2 options"):
        make_actor_critic(MLP, env.observation_spec["observation"], wrong)


def test_a_mask_belongs_to_choices_and_has_to_be_there() -> None:
    with pytest.raises(TypeError, match="an action mask is for Discrete and MultiDiscrete actions"):
        ActionMask(gym.make("Pendulum-v1"))
    with pytest.raises(ValueError, match="no 'action_mask' in its info"):
        ActionMask(gym.make("CartPole-v1")).reset()
