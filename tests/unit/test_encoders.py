"""Policies for observations and actions of every space: their shapes, masks and distributions."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from collectors import ActionMask, GymEnv, PartialObservation
from collectors.environments.specs import observation_codec
from learning import CNN, IMPALA, MLP, PPO, make_actor_critic
from learning.encoders import feature_size

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
    [
        (MLP, spaces.Box(-1, 1, (5,)), 64),
        (MLP, MIXED, 64),
        (MLP, IMAGE, 64),
        (CNN, IMAGE, 512),
        (CNN, MIXED, 512 + 5),
    ],
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
        (spaces.Box(-1, 1, (5,)), "observations have none: policy=mlp"),
        (
            spaces.Box(0, 255, (20, 20, 3), "uint8"),
            "at least 36 × 36, and observations have one of 20 × 20 × 3: policy=mlp",
        ),
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


@pytest.mark.parametrize("learner", [PPO, IMPALA])
@pytest.mark.parametrize(("network", "space"), [(MLP, MIXED), (CNN, MIXED), (CNN, IMAGE)])
def test_learners_take_images_and_observations_of_several_parts(learner: Any, network: Any, space: Any) -> None:
    env = GymEnv(lambda: ActionMask(Bandit(space)), 2, seed=0)
    policy, critic = make_actor_critic(network, env.observation_spec["observation"], env.action_spec)
    before = [parameter.clone() for parameter in policy.parameters()]
    stats = learner(policy, critic, epochs=1, minibatch_size=8).update(env.rollout(16, policy))
    assert all(np.isfinite(value) for value in stats.values())
    assert all(not torch.equal(*pair) for pair in zip(before, policy.parameters(), strict=True))


def test_a_mask_belongs_to_choices_and_has_to_be_there() -> None:
    with pytest.raises(TypeError, match="an action mask is for Discrete and MultiDiscrete actions"):
        ActionMask(gym.make("Pendulum-v1"))
    with pytest.raises(ValueError, match="no 'action_mask' in its info"):
        ActionMask(gym.make("CartPole-v1")).reset()


def test_a_part_of_an_observation_may_be_hidden() -> None:
    env = PartialObservation(gym.make("CartPole-v1"), keep=[0, 2])
    whole, _ = gym.make("CartPole-v1").reset(seed=3)
    assert env.reset(seed=3)[0].tolist() == [whole[0], whole[2]]
    assert env.observation_space.contains(env.reset()[0])
    with pytest.raises(TypeError, match="vector observations"):
        PartialObservation(gym.make("FrozenLake-v1"), keep=[0])
