"""The hot loop: what it stores, when it calls what, and that it carries on."""

import copy
import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from torch import nn

from collectors import GymEnv
from collectors.rollouts.rollout import NO_VERSION, Rollout
from learning import Policy, make_policy


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


def test_without_a_policy_actions_are_random() -> None:
    for env_id, num_envs in (("CartPole-v1", 1), ("CartPole-v1", 8), ("Pendulum-v1", 3)):
        env = GymEnv(env_id, num_envs, seed=0)
        batch = collected(Rollout(env), 40)
        assert set(batch.keys()) == {"observation", "action", "policy_version", "next"}
        assert batch["action"].float().std() > 0.3
        assert bool((batch["policy_version"] == NO_VERSION).all())


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


def in_parts(env: GymEnv) -> Policy:
    torch.manual_seed(0)
    return make_policy(env.observation_spec["observation"], env.action_spec, (16,))


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1", "Pendulum-v1"])
def test_log_probs_are_those_of_the_weights_that_acted(env_id: str) -> None:
    """Weights may change within a batch; what a later version would have thought of an action is another matter."""
    env, steps, kept = GymEnv(env_id, 2, seed=0), itertools.count(), list[dict[str, Any]]()
    policy = in_parts(env)

    def learn() -> None:
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))

    def version() -> int:
        step = next(steps)
        if step % 4 == 3:  # as an update between two steps does
            kept.append(copy.deepcopy(policy.state_dict()))
            learn()
        return step // 4

    learn()
    batch = collected(Rollout(env, policy, version=version), 12)
    assert batch["policy_version"][0].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    for number, weights in enumerate(kept):
        policy.load_state_dict(weights)
        part = batch[:, 4 * number : 4 * number + 4]
        log_prob = policy.distribution(part["observation"]).log_prob(part["action"]).detach()
        torch.testing.assert_close(part["action_log_prob"], log_prob, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("draw", [torch.rand, np.random.rand, lambda n: [random.random() for _ in range(n)]])
def test_the_same_seed_gives_the_same_batch_whatever_a_policy_draws_from(draw: Callable[[int], Any]) -> None:
    def policy(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", (torch.as_tensor(draw(2)) < 0.5).long())

    rollout = Rollout(GymEnv("CartPole-v1", 2), policy)
    batches = []
    for seed in (0, 0, 1):  # the first of them probes the policy after it is seeded
        rollout.seed(seed)
        batches.append(collected(rollout, 20))
    assert bool((batches[0] == batches[1]).all()) and not torch.equal(batches[1]["action"], batches[2]["action"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_policy_on_another_device() -> None:
    env = GymEnv("CartPole-v1", 2)
    policy: Any = Categorical(env)
    policy.linear.cuda()
    batch = collected(Rollout(env, policy, device="cuda"), 10)
    assert batch["action"].device.type == "cpu"
    torch.testing.assert_close(batch["hidden"], policy.linear(batch["observation"].cuda()).cpu(), rtol=0.02, atol=0.02)
