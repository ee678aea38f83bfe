"""GymEnv compared with Gymnasium's own scalar environments: the same episodes, row for row."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from collectors import GymEnv, ModuleTransform
from collectors.environments.transforms import Key

REWARD: list[Key] = [("next", "reward")]
SCALAR_IDS = ["CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCarContinuous-v0", "FrozenLake-v1"]


class Scripted(gym.Env):
    """Counts its steps; ends after four. Spaces, observations and a record of the actions are the test's."""

    def __init__(self, observations: spaces.Space | None = None, actions: spaces.Space | None = None) -> None:
        self.observation_space = observations or spaces.Box(-np.inf, np.inf, (2,), np.float64)
        self.action_space = actions or spaces.Discrete(3)
        self.observation_space.seed(0)
        self.seen: list[Any] = []
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.seen.append(action)
        self.count += 1
        return self.observation_space.sample(), 1.0, self.count == 4, False, {}


def scripted_with(actions: spaces.Space, num_envs: int) -> tuple[GymEnv, list[Scripted]]:
    """An environment with these actions, and those that it is made of."""
    made: list[Scripted] = []

    def make() -> Scripted:
        made.append(Scripted(actions=actions))
        return made[-1]

    return GymEnv(make, num_envs), made


def vector(env_id: str, num_envs: int, mode: AutoresetMode) -> gym.vector.VectorEnv:
    return gym.make_vec(env_id, num_envs, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode})


SOURCES: dict[str, Callable[[str, int], GymEnv]] = {
    "id": lambda env_id, n: GymEnv(env_id, n, vectorization_mode="sync"),
    "function": lambda env_id, n: GymEnv(lambda: gym.make(env_id), n),
    "made, disabled": lambda env_id, n: GymEnv(vector(env_id, n, AutoresetMode.DISABLED)),
    "made, next step": lambda env_id, n: GymEnv(vector(env_id, n, AutoresetMode.NEXT_STEP)),
}


def replay(env_id: str, seed: int, actions: torch.Tensor, limit: int | None, one_hot: int | None) -> TensorDict:
    """Step a scalar Gymnasium environment with `actions` ``[T]``, the way that its documentation shows."""
    env = gym.make(env_id)
    rows: dict[str, list[Any]] = {key: [] for key in ("observation", "successor", "reward", "terminated", "truncated")}
    observation, _ = env.reset(seed=seed)
    length = 0
    for action in actions.numpy():
        rows["observation"].append(np.eye(one_hot)[observation] if one_hot else observation)
        if isinstance(env.action_space, spaces.Box):
            action = np.clip(action, env.action_space.low, env.action_space.high)
        observation, reward, terminated, truncated, _ = env.step(action)
        length += 1
        truncated = truncated or length == limit
        rows["successor"].append(np.eye(one_hot)[observation] if one_hot else observation)
        rows["reward"].append(float(reward))
        rows["terminated"].append(bool(terminated))
        rows["truncated"].append(bool(truncated))
        if terminated or truncated:
            observation, _ = env.reset()
            length = 0
    return TensorDict({key: torch.tensor(np.array(column)) for key, column in rows.items()}, [len(actions)])


@settings(max_examples=40, deadline=None)
@given(
    env_id=st.sampled_from(SCALAR_IDS),
    source=st.sampled_from(sorted(SOURCES)),
    num_envs=st.integers(1, 4),
    steps=st.integers(1, 40),
    limit=st.none() | st.integers(1, 15),
    seed=st.integers(0, 2**31 - 1),
)
def test_rows_are_those_of_scalar_environments(
    env_id: str, source: str, num_envs: int, steps: int, limit: int | None, seed: int
) -> None:
    env = SOURCES[source](env_id, num_envs)
    limit = limit if env.stepper.driver.can_truncate else None
    env.stepper.limit(limit)
    env.set_seed(seed)
    batch = env.rollout(steps)
    env.close()
    rows = batch if num_envs > 1 else batch.unsqueeze(0)
    assert rows.batch_size == (num_envs, steps)
    one_hot = 16 if env_id == "FrozenLake-v1" else None
    for i, row in enumerate(rows.unbind(0)):
        row = row[row["mask"]] if source == "made, next step" else row
        expected = replay(env_id, seed + i, row["action"], limit, one_hot)
        torch.testing.assert_close(row["observation"], expected["observation"].float(), rtol=0, atol=0)
        torch.testing.assert_close(row["next", "observation"], expected["successor"].float(), rtol=0, atol=0)
        torch.testing.assert_close(row["next", "reward"][:, 0], expected["reward"].float(), rtol=0, atol=0)
        assert torch.equal(row["next", "terminated"][:, 0], expected["terminated"])
        assert torch.equal(row["next", "truncated"][:, 0], expected["truncated"])


def test_native_vector_environments_mask_their_reset_steps() -> None:
    env = GymEnv("CartPole-v1", 4, seed=0, vectorization_mode="auto")
    assert isinstance(env.stepper.driver.env, CartPoleVectorEnv)  # type: ignore[attr-defined]
    batch = env.rollout(200)
    mask, done = batch["mask"], batch["next", "done"][..., 0]
    assert torch.equal(mask[:, 1:], ~done[:, :-1]) and bool(mask[:, 0].all()) and bool(done.any())
    assert torch.equal(batch["next", "reward"][..., 0], mask.float())
    frames = batch[0][batch[0]["mask"]]
    assert torch.equal(frames["next", "episode_return"], frames["next", "episode_length"].float())


@pytest.mark.parametrize("num_envs", [1, 2, 3])
def test_an_index_one_hot_and_scores_do_the_same(num_envs: int) -> None:
    env = GymEnv("Acrobot-v1", num_envs)
    index = torch.randint(3, env.batch_size)
    one_hot = torch.nn.functional.one_hot(index, 3)
    results = []
    for action in (index, one_hot, one_hot.bool(), one_hot * 3.0 - 1.0, index.unsqueeze(-1), index.int()):
        td = env.reset(seed=1).set("action", action)
        results.append(env.step(td)["next", "observation"])
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("num_envs", [1, 2])
def test_continuous_actions_are_clipped_on_their_way_only(num_envs: int) -> None:
    bounds = spaces.Box(np.array([-1.0, -np.inf]), np.array([2.0, 0.5]), dtype=np.float64)
    env, made = scripted_with(bounds, num_envs)
    action = torch.tensor([[9.0, 9.0], [-9.0, -9.0], [0.25, 0.25]])
    batch = env.rollout(
        3, lambda td: td.set("action", action[env.stepper.episode_length[0]].expand(*env.batch_size, 2))
    )
    assert torch.equal(batch["action"], action.expand(*env.batch_size, 3, 2))
    assert all(np.array_equal(scripted.seen, [[2.0, 0.5], [-1.0, -9.0], [0.25, 0.25]]) for scripted in made)


@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_discrete_action_space_may_start_anywhere(num_envs: int) -> None:
    env, made = scripted_with(spaces.Discrete(3, start=-1), num_envs)
    assert env.action_spec.shape == (3,) and env.action_spec.n == 3
    for index in range(3):
        env.step(TensorDict({"action": torch.full(env.batch_size, index)}, env.batch_size))
    assert all([int(action) for action in scripted.seen] == [-1, 0, 1] for scripted in made)
    random = env.rollout(50)["action"]
    assert random.min() == 0 and random.max() == 2


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize(
    ("space", "shape", "dtype"),
    [
        (spaces.Box(-1, 1, (2, 3), np.float64), (2, 3), torch.float32),
        (spaces.Box(-5, 5, (4,), np.int64), (4,), torch.float32),
        (spaces.Box(-1, 1, (), np.float32), (1,), torch.float32),
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), (8, 8, 3), torch.uint8),
        (spaces.MultiBinary(5), (5,), torch.float32),
        (spaces.Discrete(4, start=2), (4,), torch.float32),
        (spaces.MultiDiscrete([2, 3, 4]), (9,), torch.float32),
    ],
    ids=str,
)
def test_observation_spaces(num_envs: int, space: spaces.Space, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    env = GymEnv(lambda: Scripted(space), num_envs)
    spec = env.observation_spec["observation"]
    assert (tuple(spec.shape), spec.dtype) == (shape, dtype)
    assert spec.low is not None and spec.high is not None and spec.low.shape == spec.high.shape == shape
    batch = env.rollout(9)
    for observation in (batch["observation"], batch["next", "observation"]):
        assert observation.shape == (*batch.batch_size, *shape) and observation.dtype == dtype
        assert bool(((observation >= spec.low) & (observation <= spec.high)).all())
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        raw = space.sample()
        out = np.ones((1, *shape), np.float32)
        env.stepper._observations.write(np.asarray(raw)[None], out)
        assert np.array_equal(out[0], spaces.flatten(space, raw))


TREE = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
        "goal": spaces.Tuple((spaces.Box(-1, 1, (2,)), spaces.Discrete(3))),
    }
)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_dict_and_tuple_observations_are_nested_tensors(num_envs: int) -> None:
    env = GymEnv(lambda: Scripted(TREE), num_envs)
    batch = env.rollout(9)
    shapes = {"image": (8, 8, 3), ("goal", "0"): (2,), ("goal", "1"): (3,)}
    for part in (batch["observation"], batch["next", "observation"], env.observe()["observation"]):
        assert {*part.keys(True, True)} == {*shapes}
        for key, shape in shapes.items():
            assert part[key].shape == (*part.batch_size, *shape)
            assert part[key].dtype == (torch.uint8 if key == "image" else torch.float32)
    assert bool((batch["next", "observation"][..., 0] == batch["observation"][..., 1]).all())
    ended = batch["next", "done"][..., 3, 0]
    assert bool(ended.all())
    assert not torch.equal(batch["next", "observation", "image"][..., 3, :, :, :], batch["observation", "image"][..., 4, :, :, :])  # fmt: skip  # noqa: E501
    assert bool((batch["observation", "goal", "1"].sum(-1) == 1).all())


REFUSED: dict[str, tuple[Callable[[], GymEnv], type[Exception], str]] = {
    "text": (lambda: GymEnv(Scripted(spaces.Text(3))), TypeError, "TransformObservation"),
    "actions": (lambda: GymEnv(Scripted(actions=spaces.Dict({"a": spaces.Discrete(2)}))), TypeError, "MultiBinary and"),
    "transform": (
        lambda: GymEnv("Blackjack-v1", transforms=[ModuleTransform(nn.Identity(), REWARD, REWARD)]),
        TypeError,
        "FlattenObservation",
    ),
    "id": (lambda: GymEnv("NoSuchEnv-v0"), gym.error.Error, "NoSuchEnv"),
    "none": (lambda: GymEnv("CartPole-v1", 0), ValueError, "at least 1"),
    "width": (lambda: GymEnv(Scripted(), 2), ValueError, "num_envs=2"),
    "arguments": (lambda: GymEnv(Scripted(), render_mode="human"), ValueError, "no further arguments"),
    "native": (lambda: GymEnv("CartPole-v1", 2, vectorization_mode="unknown"), ValueError, "unknown"),
    "no native": (
        lambda: GymEnv("Acrobot-v1", 2, vectorization_mode="vector_entry_point"),
        gym.error.Error,
        "vector entry point",
    ),
    "limit, next step": (
        lambda: GymEnv(CartPoleVectorEnv(2), max_frames_per_traj=5),
        ValueError,
        'vectorization_mode="sync"',
    ),
    "vectors of vectors": (lambda: GymEnv(lambda: CartPoleVectorEnv(2), 2), ValueError, "brings its own num_envs"),
    "a mode and a function": (
        lambda: GymEnv(Scripted, 2, vectorization_mode="sync"),
        ValueError,
        r"a function that makes one, takes no further arguments \(vectorization_mode\)",
    ),
    "a number": (lambda: GymEnv(lambda: 3), TypeError, "not from a int"),
    "a GymEnv": (lambda: GymEnv(GymEnv(Scripted())), TypeError, "not from a GymEnv"),
    "a seed": (lambda: GymEnv("CartPole-v1", seed=1.5), TypeError, "integer"),
    "limit": (lambda: GymEnv("CartPole-v1", max_frames_per_traj=0), ValueError, "at least 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_arguments_raise_a_clear_error(name: str) -> None:
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        make()


WRONG = {
    "too great": ([0, 2], "environment 1 is 2, and an index is 0 to 1"),
    "negative": ([-1, 0], "environment 0 is -1, and an index is 0 to 1"),
    "negative, in few bits": (np.array([0, -1], np.int8), "environment 1 is -1, and an index is 0 to 1"),
    "half": ([1.0, 0.5], "environment 1 is 0.5, and an index is 0 to 1"),
    "unknown": ([torch.nan, 0.0], "environment 0 is nan, and an index is 0 to 1"),
    "unknown scores": ([[0.0, 1.0], [torch.nan] * 2], r"actions 0 to 1 for environment 1 are \[nan, nan\]"),
    "one unknown score": ([[0.0, torch.nan], [0.0, 1.0]], r"actions 0 to 1 for environment 0 are \[0.0, nan\]"),
}


@pytest.mark.parametrize("mode", [None, "sync"])
@pytest.mark.parametrize("name", WRONG)
def test_an_index_out_of_range_or_scores_of_nan_are_an_error(name: str, mode: str | None) -> None:
    action, message = WRONG[name]
    env = GymEnv("CartPole-v1", 2, vectorization_mode=mode)
    with pytest.raises(ValueError, match=message):
        env.step(TensorDict({"action": torch.as_tensor(action)}, [2]))


class Misfit(Scripted):
    """Gives one thing that does not fit, in its first step."""

    def __init__(self, space: spaces.Space, **wrong: Any) -> None:
        super().__init__(space)
        self.wrong = wrong

    def step(self, action: Any) -> Any:
        results = dict(zip(("observation", "reward", "terminated", "truncated"), super().step(action), strict=False))
        return *(results | self.wrong).values(), {}


IMAGE = spaces.Box(0, 255, (3, 4, 4), np.uint8)
MISFITS: list[tuple[spaces.Space, dict[str, Any], str]] = [
    (IMAGE, {"observation": np.zeros((4, 4, 3), np.uint8)}, "an observation of shape"),
    (IMAGE, {"observation": np.full((3, 4, 4), 0.5)}, "dtype float64"),
    (IMAGE, {"observation": np.full((3, 4, 4), -1)}, "dtype int64"),
    (spaces.Discrete(3), {"observation": np.eye(3)[1]}, "an observation of shape"),
    (spaces.Dict(x=spaces.Discrete(3)), {"observation": {"y": 1}}, "part 'x' of the observation"),
    (spaces.Discrete(3), {"reward": None}, "reward is None"),
    (spaces.Discrete(3), {"terminated": "False"}, "terminated is 'False'"),
]


@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize(("space", "wrong", "message"), MISFITS)
def test_what_does_not_fit_its_space_is_refused_by_name(
    num_envs: int, space: spaces.Space, wrong: dict[str, Any], message: str
) -> None:
    env = GymEnv(lambda: Misfit(space, **wrong), num_envs)
    env.reset()
    with pytest.raises(ValueError, match=message):
        env.step(TensorDict({"action": torch.zeros(env.batch_size, dtype=torch.int64)}, env.batch_size))


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
