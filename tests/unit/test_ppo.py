from __future__ import annotations

import copy
from functools import partial
from typing import Any

import bandit
import pytest
import torch
from bandit import CHOICE, TORQUES, batch_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from collectors.environments.specs import Spec
from learning import PPO
from learning.actor_critic import UnusableBatch
from learning.ppo import Frames

learner_of = partial(bandit.learner_of, PPO)


def textbook_loss(learner: PPO, frames: Frames, clip: float) -> torch.Tensor:
    """The loss as the paper writes it, with the minibatch's advantages normalised as in Stable-Baselines3."""
    distribution = learner.policy.distribution(frames.observation)
    ratio = (distribution.log_prob(frames.action) - frames.log_prob).exp()
    advantage = (frames.advantage - frames.advantage.mean()) / (frames.advantage.std() + 1e-8)
    surrogate = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    surrogate = (surrogate if frames.weight is None else frames.weight * surrogate).mean()
    value = learner.critic(frames.observation)
    error = (value - frames.target).square()
    entropy = distribution.entropy().mean()
    return -surrogate + learner.value_coef * 0.5 * error.mean() - learner.entropy_coef * entropy


@settings(max_examples=40, deadline=None)
@given(
    spec=st.sampled_from([CHOICE, TORQUES]),
    clip=st.sampled_from([0.05, 0.2]),
    entropy_coef=st.sampled_from([0.0, 0.01]),
    weighted=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_a_gradient_step_is_that_of_the_textbook_loss(
    spec: Spec, clip: float, entropy_coef: float, weighted: bool, seed: int
) -> None:
    learner = learner_of(spec, seed, entropy_coef=entropy_coef, max_grad_norm=torch.inf)
    n = 32
    with torch.no_grad():
        td = learner.policy(TensorDict({"observation": torch.randn(n, 4)}, batch_size=[n]))
    old_log_prob = td["action_log_prob"] + 0.3 * torch.randn(n)
    value = learner.critic(td["observation"]).detach() + 0.2 * torch.randn(n)
    frames = Frames(td["observation"], td["action"], old_log_prob, torch.randn(n), torch.randn(n), value)
    frames = frames._replace(weight=torch.rand(n)) if weighted else frames
    expected = torch.autograd.grad(textbook_loss(learner, frames, clip), learner.parameters)

    learner._descend(learner._loss, frames, [n], 1e-3, 1, clip)
    for parameter, gradient in zip(learner.parameters, expected, strict=True):  # a tenth of it is Adam's first moment
        torch.testing.assert_close(10 * learner.optimizer.state[parameter]["exp_avg"], gradient, rtol=1e-3, atol=1e-6)


def test_experience_of_an_older_policy_is_clipped_around_the_newest_one_and_weighted() -> None:
    older = learner_of()
    batch = batch_of(older.policy, 4, 16)
    newer = copy.deepcopy(older.policy)
    with torch.no_grad():
        for parameter in newer.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    coupled, decoupled, without_weight = (
        PPO(copy.deepcopy(newer), copy.deepcopy(older.critic), epochs=1, minibatch_size=64, **options)
        for options in ({"decoupled": False}, {}, {"max_weight": 0.0})
    )
    stale, fresh = coupled.update(batch), decoupled.update(batch)
    assert stale["kl"] > 0.01 and stale["clip_fraction"] > 0.1
    assert fresh["kl"] == pytest.approx(0.0, abs=1e-6) and fresh["clip_fraction"] == 0.0
    assert fresh["kl_acted"] == pytest.approx(stale["kl"], rel=1e-4)
    assert fresh["loss_policy"] != 0.0 and without_weight.update(batch)["loss_policy"] == 0.0


def test_schedules_fall_on_a_line_and_stay() -> None:
    schedules: dict[str, Any] = {"lr": 1e-2, "lr_end_factor": 0.0, "clip": 0.3, "clip_final": 0.1, "epochs": 3}
    learner = learner_of(**schedules, epochs_final=1, anneal_frames=64, minibatch_size=16)
    rows = [learner.update(batch_of(learner.policy, 32, 1)) for _ in range(4)]
    assert [row["lr"] for row in rows] == [1e-2, 5e-3, 0.0, 0.0]
    assert [round(row["clip"], 6) for row in rows] == [0.3, 0.2, 0.1, 0.1]
    assert [row["epochs"] for row in rows] == [3.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["epochs", "epochs_final", "minibatch_size", "anneal_frames"])
def test_invalid_counts_are_errors(name: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        learner_of(CHOICE, 0, **{name: 0})


@pytest.mark.parametrize(("key", "what"), [(("next", "reward"), "next.reward"), ("observation", "observation")])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_input_that_is_not_finite_is_named_and_changes_nothing(key: Any, what: str, number: float) -> None:
    learner = learner_of()
    batch = batch_of(learner.policy, 2, 8)
    batch["next", "terminated"][0, 3] = batch["next", "done"][0, 3] = False
    batch[key][0, 3] = number
    before = [p.clone() for p in learner.parameters]
    with pytest.raises(UnusableBatch, match=rf"^{what} is not finite at \[0, 3\] of the batch"):
        learner.update(batch)
    assert all(torch.equal(p, q) for p, q in zip(before, learner.parameters, strict=True))
