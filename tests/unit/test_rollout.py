"""The hot loop: what it stores, when it calls what, and that it carries on."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from torch import nn

from collectors import GymEnv, ModuleTransform
from collectors.rollouts.rollout import NO_VERSION, Rollout
from learning import CategoricalPolicy, Policy, make_policy


class Categorical:
    """A small sampling policy that also writes other things, and counts its calls."""

    def __init__(self, env: GymEnv, form: str = "index") -> None:
        torch.manual_seed(0)
        self.choices = env.action_spec.shape[-1]
        self.linear = nn.Linear(env.observation_spec["observation"].shape[-1], self.choices)
        self.form = form
        self.calls = 0

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        self.calls += 1
        scores = self.linear(td["observation"])
        index = torch.distributions.Categorical(logits=scores).sample()
        forms = {"index": index, "one-hot": nn.functional.one_hot(index, self.choices), "scores": scores}
        td["action"] = forms[self.form]
        td["action_log_prob"] = scores.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
        td["hidden"] = scores.to(torch.bfloat16)
        td["nested"] = TensorDict({"scores": scores}, td.batch_size)
        return td


def collected(rollout: Rollout, *steps: int) -> TensorDict:
    """Collect batches of so many steps, one after the other, and join them in time."""
    batches = [rollout.collect(rollout.buffer(count)) for count in steps]
    return torch.cat(batches, dim=-1)  # type: ignore[call-overload]


@settings(max_examples=25, deadline=None)
@given(
    env_id=st.sampled_from(["CartPole-v1", "Acrobot-v1"]),
    num_envs=st.integers(1, 4),
    steps=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    limit=st.none() | st.integers(1, 12),
    random=st.integers(0, 50),
)
def test_batches_carry_on_where_the_last_one_ended(
    env_id: str, num_envs: int, steps: list[int], limit: int | None, random: int
) -> None:
    def make() -> Rollout:
        env = GymEnv(env_id, num_envs)
        made = Rollout(env, Categorical(env), init_random_frames=random, max_frames_per_traj=limit)
        made.seed(7)
        return made

    in_parts, whole = collected(make(), *steps), collected(make(), sum(steps))
    assert bool((in_parts == whole).all())
    rows = whole if num_envs > 1 else whole.unsqueeze(0)
    lengths = rows["next", "episode_length"][..., 0]
    assert limit is None or lengths.max() <= limit
    ended = rows["next", "done"][:, :-1, 0]
    assert torch.equal(rows["observation"][:, 1:][~ended], rows["next", "observation"][:, :-1][~ended])
    assert torch.equal(lengths[:, 1:], torch.where(ended, 1, lengths[:, :-1] + 1))
    assert torch.equal(rows["next", "done"], rows["next", "terminated"] | rows["next", "truncated"])


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("form", ["index", "one-hot", "scores"])
def test_what_the_policy_writes_is_stored_as_it_wrote_it(num_envs: int, form: str) -> None:
    env = GymEnv("Acrobot-v1", num_envs)
    policy = Categorical(env, form)
    batch = collected(Rollout(env, policy), 12)
    scores = policy.linear(batch["observation"]).detach()
    torch.testing.assert_close(batch["hidden"], scores, rtol=0.02, atol=0.02)
    assert batch["hidden"].dtype == torch.float32  # numpy has no bfloat16
    assert "nested" not in set(batch.keys())
    if form == "scores":
        torch.testing.assert_close(batch["action"], scores)
        return
    index = batch["action"] if form == "index" else batch["action"].argmax(-1)
    assert batch["action"].shape == (*env.batch_size, 12, *((3,) if form == "one-hot" else ()))
    log_probs = scores.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(batch["action_log_prob"], log_probs)


@pytest.mark.parametrize("form", ["index", "one-hot", "scores"])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_random_frames_come_first_and_say_so(form: str, num_envs: int) -> None:
    env = GymEnv("Acrobot-v1", num_envs)
    policy = Categorical(env, form)
    rollout = Rollout(env, policy, init_random_frames=10 * num_envs, version=lambda: 3)
    batch = collected(rollout, 6, 6)
    assert policy.calls == 1 + 2  # one to see what it writes
    assert rollout.frames == batch.numel()
    random, acted = batch[..., :10], batch[..., 10:]
    assert bool((random["policy_version"] == NO_VERSION).all()) and bool((acted["policy_version"] == 3).all())
    torch.testing.assert_close(random["action_log_prob"], torch.full((*env.batch_size, 10), -math.log(3)))
    assert batch["action"].dtype == {"index": torch.int64, "one-hot": torch.int64, "scores": torch.float32}[form]
    if form != "index":
        assert bool((random["action"].sum(-1) == 1).all()) and random["action"].max() == 1


@pytest.mark.parametrize("num_envs", [1, 2])
def test_random_continuous_frames(num_envs: int) -> None:
    env = GymEnv("Pendulum-v1", num_envs)

    def still(td: TensorDictBase) -> TensorDictBase:
        zeros = torch.zeros(env.batch_size)
        return td.update({"action": zeros.unsqueeze(-1), "action_log_prob": zeros})

    batch = collected(Rollout(env, still, init_random_frames=20 * num_envs), 20)
    assert batch["action"].std() > 0.5 and batch["action"].abs().max() <= 2
    torch.testing.assert_close(batch["action_log_prob"], torch.full((*env.batch_size, 20), -math.log(4)))


class Idle(gymnasium.Env):
    """Does nothing; its action space is the test's."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,))

    def __init__(self, actions: gymnasium.spaces.Box) -> None:
        self.action_space = actions

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), 0.0, False, False, {}


def random_frames(bounds: gymnasium.spaces.Box, steps: int) -> TensorDict:
    """Return frames with random actions of one environment with these actions, and their log-probabilities."""

    def still(td: TensorDictBase) -> TensorDictBase:
        return td.update({"action": torch.zeros(bounds.shape), "action_log_prob": torch.zeros(())})

    env = GymEnv(Idle(bounds), seed=0)
    return collected(Rollout(env, still, init_random_frames=steps), steps)


def test_random_actions_without_bounds_have_a_density() -> None:
    low, high = np.float32([-np.inf, 1, -np.inf, -2]), np.float32([np.inf, np.inf, 3, 6])
    batch = random_frames(gymnasium.spaces.Box(low, high), 50)
    free, above, below, between = batch["action"].unbind(-1)
    one_sided = torch.distributions.Exponential(1.0)
    expected = torch.distributions.Normal(0.0, 1.0).log_prob(free) - math.log(8)
    expected += one_sided.log_prob(above - 1) + one_sided.log_prob(3 - below)
    torch.testing.assert_close(batch["action_log_prob"], expected, atol=1e-5, rtol=1e-5)
    assert between.min() >= -2 and between.max() <= 6


@pytest.mark.parametrize("bounds", [(-1, 2), (4, 4)])
def test_random_integers_are_as_frequent_as_their_probabilities(bounds: tuple[int, int]) -> None:
    batch = random_frames(gymnasium.spaces.Box(*bounds, (1,), np.int64), 2000)
    values, counts = batch["action"].unique(return_counts=True)
    assert torch.equal(values, torch.arange(bounds[0], bounds[1] + 1).float())
    probability = batch["action_log_prob"].exp()
    torch.testing.assert_close(probability, torch.full_like(probability, 1 / len(values)))
    torch.testing.assert_close(counts / 2000, torch.full((len(values),), 1 / len(values)), atol=0.05, rtol=0.0)


def test_random_integers_without_bounds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no random actions .* from Box\(.*int64\), integers without bounds"):
        random_frames(gymnasium.spaces.Box(0, np.inf, (1,), np.int64), 1)


def test_without_a_policy_actions_are_random() -> None:
    for env_id, num_envs in (("CartPole-v1", 1), ("CartPole-v1", 8), ("Pendulum-v1", 3)):
        env = GymEnv(env_id, num_envs, seed=0)
        batch = collected(Rollout(env), 40)
        assert set(batch.keys()) == {"observation", "action", "policy_version", "next"}
        assert batch["action"].float().std() > 0.3
        assert bool((batch["policy_version"] == NO_VERSION).all())


def gate_with(log: list[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A gate that records when it is entered and left."""

    def gated(function: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*arguments: Any) -> Any:
            log.append("enter")
            try:
                return function(*arguments)
            finally:
                log.append("leave")

        return inside

    return gated


def test_the_version_is_read_inside_the_gate_and_the_environment_stepped_outside() -> None:
    log: list[str] = []
    env = GymEnv("CartPole-v1", 2)
    versions = iter(range(100))

    def policy(td: TensorDictBase) -> TensorDictBase:
        log.append("act")
        return td.set("action", torch.zeros(2, dtype=torch.int64))

    def version() -> int:
        log.append("version")
        return next(versions)

    step = env.stepper.step
    env.stepper.step = lambda action: (log.append("step"), step(action))[1]  # type: ignore[method-assign]
    rollout = Rollout(env, policy, gate=gate_with(log), version=version)
    batch = rollout.buffer(3)
    assert log == ["enter", "act", "leave"]
    log.clear()
    rollout.collect(batch)
    assert log == ["enter", "act", "version", "leave", "step"] * 3
    assert batch["policy_version"].tolist() == [[0, 1, 2]] * 2


def test_an_error_comes_out_as_it_is_and_leaves_the_gate() -> None:
    log: list[str] = []
    env = GymEnv("CartPole-v1")
    failing = False

    def policy(td: TensorDictBase) -> TensorDictBase:
        if failing:
            raise KeyboardInterrupt
        return td.set("action", torch.tensor(0))

    rollout = Rollout(env, policy, gate=gate_with(log))
    batch = rollout.buffer(3)
    failing = True
    with pytest.raises(KeyboardInterrupt):
        rollout.collect(batch)
    assert log[-1] == "leave"


class Interrupted:
    """Raises where it is called for the n-th time from now on."""

    left = 0

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class ThreeSteps(gymnasium.Env):
    """Episodes of three steps; an observation says how many were made."""

    observation_space = gymnasium.spaces.Box(0, 3, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, calls: dict[str, Interrupted]) -> None:
        self.calls, self.made = calls, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.calls["reset"]()
        self.made = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.made += 1
        self.calls["step"]()
        return np.full(1, self.made, np.float32), 1.0, self.made == 3, False, {}


class Watched(nn.Module):
    """The number that it is given."""

    def __init__(self, calls: Interrupted) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, number: torch.Tensor) -> torch.Tensor:
        self.calls()
        return number


@pytest.mark.parametrize("num_envs", [1, 2])
@pytest.mark.parametrize("where", ["reset", "step", "encoder", "reward", "policy"])
def test_a_batch_after_an_interrupted_one_is_whole(where: str, num_envs: int) -> None:
    for nth in range(1, 9):
        calls = {name: Interrupted() for name in ("reset", "step", "encoder", "reward", "policy")}
        encoder = ModuleTransform(Watched(calls["encoder"]), ["observation"], ["observation"])
        judge = ModuleTransform(Watched(calls["reward"]), [("next", "reward")], [("next", "reward")])
        env = GymEnv(partial(ThreeSteps, calls), num_envs, transforms=[encoder, judge])

        def policy(td: TensorDictBase, asked: Interrupted = calls["policy"]) -> TensorDictBase:
            asked()
            return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))

        rollout = Rollout(env, policy)
        collected(rollout, 2)
        calls[where].left = nth
        with pytest.raises(KeyboardInterrupt):
            collected(rollout, 25)
        batch = collected(rollout, 10)
        made, number = batch["observation"], batch["next", "observation"]
        assert torch.equal(number, made + 1) and torch.equal(batch["next", "episode_length"].float(), number)
        assert torch.equal(batch["next", "episode_return"], number) and torch.equal(batch["next", "done"], number == 3)
        assert torch.equal(made[..., 1:, :], (number % 3)[..., :-1, :])


def rewrite(td: TensorDictBase, action: torch.Tensor) -> TensorDictBase:
    return td.update({"observation": td["observation"] * 0 + 77, "action": action})


def mutate(td: TensorDictBase, action: torch.Tensor) -> TensorDictBase:
    td["observation"].fill_(77)
    return td.set("action", action)


def answer_apart(td: TensorDictBase, action: torch.Tensor) -> TensorDictBase:
    return TensorDict({"action": action}, td.batch_size)


def unlearnt(td: TensorDictBase, action: torch.Tensor) -> TensorDictBase:
    return td.set("action", action).set("scale", nn.Parameter(torch.ones(td.batch_size)))


@pytest.mark.parametrize("habit", [rewrite, mutate, answer_apart, unlearnt])
@pytest.mark.parametrize("num_envs", [1, 2])
def test_a_policy_cannot_spoil_what_is_stored(
    habit: Callable[[TensorDictBase, torch.Tensor], TensorDictBase], num_envs: int
) -> None:
    seen: list[torch.Tensor] = []

    def run(act: Callable[[TensorDictBase, torch.Tensor], TensorDictBase]) -> TensorDict:
        env = GymEnv("Acrobot-v1", num_envs, seed=0)
        seen.clear()

        def policy(td: TensorDictBase) -> TensorDictBase:
            seen.append(td["observation"].clone())
            return act(td, torch.full(env.batch_size, 2))

        return collected(Rollout(env, policy), 6)

    plain = run(answer_apart).select("observation", "action", "next")
    spoilt = run(habit).select("observation", "action", "next")
    assert bool((plain == spoilt).all())
    assert torch.equal(torch.stack(seen[1:], dim=-2), spoilt["observation"])  # and it sees the truth each time


@pytest.mark.parametrize("num_envs", [1, 2])
def test_what_a_policy_wrote_is_not_handed_to_it_again(num_envs: int) -> None:
    """An earlier output is of the step before; its episode may have ended."""

    def remembering(td: TensorDictBase) -> TensorDictBase:
        td["count"] = td.get("count", torch.zeros(td.batch_size)) + 1
        return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))

    batch = collected(Rollout(GymEnv("CartPole-v1", num_envs), remembering), 12, 3)
    assert bool((batch["count"] == 1).all())


@pytest.mark.parametrize("num_envs", [1, 2])
def test_an_observation_that_a_policy_keeps_stays_what_it_was(num_envs: int) -> None:
    kept: list[torch.Tensor] = []

    def remembering(td: TensorDictBase) -> TensorDictBase:
        kept.append(td["observation"])
        return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))

    batch = collected(Rollout(GymEnv("CartPole-v1", num_envs), remembering), 12)
    assert torch.equal(torch.stack(kept[-12:], dim=-2), batch["observation"])


@pytest.mark.parametrize("in_parts", [True, False])
def test_learning_what_a_policy_writes_leaves_its_statistics_alone(in_parts: bool) -> None:
    network = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    policy = CategoricalPolicy(network)
    if not in_parts:
        policy.register_forward_hook(lambda *_: None)
    rollout = Rollout(GymEnv("CartPole-v1", 3), policy)
    batch = rollout.buffer(5)
    assert isinstance(network[0], nn.BatchNorm1d) and network[0].num_batches_tracked is not None
    assert (network[0].num_batches_tracked.item(), policy.training, network[0].training) == (0, True, True)
    rollout.collect(batch)
    assert network[0].num_batches_tracked.item() == 5


def in_parts(env: GymEnv) -> Policy:
    torch.manual_seed(0)
    return make_policy(env.observation_spec["observation"], env.action_spec, (16,))


@pytest.mark.parametrize(
    ("env_id", "make", "steps"), [("CartPole-v1", Categorical, [30]), ("Pendulum-v1", in_parts, [10, 20])]
)
def test_seeds(env_id: str, make: Callable[[GymEnv], Any], steps: list[int]) -> None:
    def run(seed: int) -> TensorDict:
        env = GymEnv(env_id, 2)
        rollout = Rollout(env, make(env))
        rollout.seed(seed)
        return collected(rollout, *steps)

    assert bool((run(1) == run(1)).all())
    assert not torch.equal(run(1)["action"], run(2)["action"])


def with_dropout(env: GymEnv) -> Policy:
    return CategoricalPolicy(nn.Sequential(nn.Linear(4, 2), nn.Dropout()))


@pytest.mark.parametrize("make", [Categorical, with_dropout])
def test_making_a_buffer_draws_no_random_number(make: Callable[[GymEnv], Any]) -> None:
    env = GymEnv("CartPole-v1", 2)
    rollout = Rollout(env, make(env))
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    rollout.buffer(4)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("num_envs", [1, 3])
def test_a_slice_of_shared_memory_is_filled_in_place(num_envs: int) -> None:
    env = GymEnv("CartPole-v1", num_envs, seed=0)
    rollout = Rollout(env, Categorical(env))
    one = rollout.buffer(5)
    shared = torch.stack([one, one, one]).contiguous().share_memory_()
    before = shared.clone()
    mine = shared[1]
    assert rollout.collect(mine) is mine
    assert bool((shared[1] == mine).all()) and bool((shared[0] == before[0]).all()) and bool((shared[2] == 0).all())
    assert bool((shared[1]["next", "reward"] == 1).all())


def test_batches_are_not_kept_alive() -> None:
    env = GymEnv("CartPole-v1")
    rollout = Rollout(env, Categorical(env))
    gone = [weakref.ref(rollout.collect(rollout.buffer(2))["observation"]) for _ in range(3)]
    assert all(reference() is None for reference in gone)


@pytest.mark.parametrize("draw", [torch.rand, np.random.rand, lambda n: [random.random() for _ in range(n)]])
def test_the_same_seed_gives_the_same_batch_whatever_a_policy_draws_from(draw: Callable[[int], Any]) -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", (torch.as_tensor(draw(2)) < 0.5).long())

    rollout = Rollout(GymEnv("CartPole-v1", 2), policy)
    batches = []
    for _ in range(2):  # the first of them probes the policy after it is seeded
        rollout.seed(0)
        batches.append(collected(rollout, 20))
    assert bool((batches[0] == batches[1]).all())


@pytest.mark.parametrize(("own", "given"), [(3, 8), (8, 3), (3, None), (None, 3)])
def test_of_two_limits_the_smaller_one_counts(own: int | None, given: int | None) -> None:
    rollout = Rollout(GymEnv("CartPole-v1", 2, max_frames_per_traj=own), max_frames_per_traj=given)
    assert collected(rollout, 20)["next", "episode_length"].max() == 3


def test_bad_input_raises_a_clear_error() -> None:
    env = GymEnv("CartPole-v1")
    with pytest.raises(ValueError, match=r"the policy wrote \['logits'\]"):
        Rollout(env, lambda td: td.set("logits", torch.zeros(2))).buffer(2)
    with pytest.raises(ValueError, match='the policy wrote "mask"'):
        Rollout(env, lambda td: td.set("action", torch.zeros(2)).set("mask", torch.ones(2))).buffer(2)
    for key in ("observation", "reward", "done", "episode_return", "policy_version", "is_init"):
        with pytest.raises(ValueError, match=rf'the policy wrote \("next", "{key}"\)'):
            Rollout(env, lambda td, key=key: td.set("action", torch.zeros(2)).set(("next", key), torch.ones(1))).buffer(
                2
            )
    with pytest.raises(TypeError, match="the policy returned a NoneType, not the TensorDict"):
        Rollout(env, lambda td: None).buffer(2)
    with pytest.raises(ValueError, match="at least one step"):
        Rollout(env).buffer(0)
    with pytest.raises(ValueError, match="max_frames_per_traj"):
        Rollout(env, max_frames_per_traj=-1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_policy_on_another_device() -> None:
    env = GymEnv("CartPole-v1", 2)
    policy: Any = Categorical(env)
    policy.linear.cuda()
    batch = collected(Rollout(env, policy, device="cuda"), 10)
    assert batch["action"].device.type == "cpu"
    torch.testing.assert_close(batch["hidden"], policy.linear(batch["observation"].cuda()).cpu(), rtol=0.02, atol=0.02)
