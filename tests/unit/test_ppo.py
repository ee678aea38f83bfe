from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from collectors.environments.specs import Spec
from learning import PPO, make_critic, make_policy
from learning.adam import FlatAdam
from learning.networks import CategoricalPolicy
from learning.ppo import Diverged, Frames

CHOICE = Spec(torch.Size([3]), torch.int64, n=3)
TORQUES = Spec(torch.Size([2]), torch.float32, torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 10.0]))


def learner_of(spec: Spec = CHOICE, seed: int = 0, **options: Any) -> PPO:
    torch.manual_seed(seed)
    return PPO(make_policy(4, spec, (8, 8)), make_critic(4, (8, 8)), **options)


def batch_of(learner: PPO, *batch: int, seed: int = 0) -> TensorDict:
    """Experience of a bandit: the larger the action, the better."""
    torch.manual_seed(seed)
    observation = torch.randn(*batch, 4)
    with torch.no_grad():
        td = learner.policy(TensorDict({"observation": observation}, batch_size=batch))
    reward = td["action"].float().reshape(*batch, -1).sum(-1, keepdim=True)
    end = torch.ones(*batch, 1, dtype=torch.bool)
    outcome = {
        "observation": torch.randn(*batch, 4),
        "reward": reward,
        "terminated": end,
        "truncated": ~end,
        "done": end,
    }
    return td.set("next", TensorDict(outcome, batch_size=batch))


def textbook_loss(learner: PPO, frames: Frames, clip: float) -> torch.Tensor:
    """The loss as the paper writes it."""
    distribution = learner.policy.distribution(frames.observation)
    ratio = (distribution.log_prob(frames.action) - frames.log_prob).exp()
    surrogate = torch.min(ratio * frames.advantage, ratio.clamp(1 - clip, 1 + clip) * frames.advantage).mean()
    value = learner.critic(frames.observation)
    error = (value - frames.target).square()
    if learner.value_clip is not None:
        near = frames.value + (value - frames.value).clamp(-learner.value_clip, learner.value_clip)
        error = torch.max(error, (near - frames.target).square())
    entropy = distribution.entropy().mean()
    return -surrogate + learner.value_coef * 0.5 * error.mean() - learner.entropy_coef * entropy


@settings(max_examples=40, deadline=None)
@given(
    spec=st.sampled_from([CHOICE, TORQUES]),
    clip=st.sampled_from([0.05, 0.2]),
    value_clip=st.sampled_from([None, 0.1]),
    entropy_coef=st.sampled_from([0.0, 0.01]),
    seed=st.integers(0, 2**31),
)
def test_a_gradient_step_is_that_of_the_textbook_loss(
    spec: Spec, clip: float, value_clip: float | None, entropy_coef: float, seed: int
) -> None:
    learner = learner_of(spec, seed, value_clip=value_clip, entropy_coef=entropy_coef)
    n = 32
    with torch.no_grad():
        td = learner.policy(TensorDict({"observation": torch.randn(n, 4)}, batch_size=[n]))
    old_log_prob = td["action_log_prob"] + 0.3 * torch.randn(n)
    value = learner.critic(td["observation"]).detach() + 0.2 * torch.randn(n)
    frames = Frames(td["observation"], td["action"], old_log_prob, torch.randn(n), torch.randn(n), value)
    expected = torch.autograd.grad(textbook_loss(learner, frames, clip), learner.parameters)

    seen: list[torch.Tensor] = []
    learner.optimizer.step = lambda gradients, lr: seen.extend(gradients) or torch.zeros(())  # type: ignore[method-assign]
    learner._step(frames, 1e-3, clip)
    for ours, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("order", [0.05, 0.5])
def test_rounding_takes_no_gradient_from_a_value(order: float) -> None:
    learner, n = learner_of(value_clip=0.2), 5_000
    old, value, target, zeros = *(order * torch.randn(3, n)), torch.zeros(n)
    frames = Frames(torch.zeros(n, 4), zeros.long(), zeros, zeros, target, old)
    _, gradient = learner._loss_gradients(frames, zeros, value, 0.2)

    value.requires_grad_()
    near = old + (value - old).clamp(-0.2, 0.2)
    loss = learner.value_coef * 0.5 * torch.max((value - target).square(), (near - target).square()).mean()
    torch.testing.assert_close(gradient, *torch.autograd.grad(loss, value), rtol=1e-3, atol=1e-9)


def test_flat_adam_is_clip_grad_norm_and_adam() -> None:
    torch.manual_seed(0)
    theirs = [nn.Parameter(torch.randn(*shape)) for shape in [(3, 4), (3,), (1,)]]
    ours = [nn.Parameter(p.detach().clone()) for p in theirs]
    flat = FlatAdam(ours, eps=1e-5, max_grad_norm=1.0)
    adam = torch.optim.Adam(theirs, eps=1e-5)
    for step in range(20):
        gradients = [torch.randn_like(p) * 10.0 ** (step % 3 - 1) for p in theirs]
        norm = flat.step(gradients, lr=0.01 * (step + 1))
        for p, g in zip(theirs, gradients, strict=True):
            p.grad = g.clone()
        adam.param_groups[0]["lr"] = 0.01 * (step + 1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, 1.0))
        adam.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spec", [CHOICE, TORQUES], ids=["discrete", "continuous"])
def test_learns_a_bandit(spec: Spec) -> None:
    learner = learner_of(spec, epochs=4, minibatch_size=64, lr=1e-2)
    rewards, stats = [], {}
    for i in range(15):
        batch = batch_of(learner, 2, 4, 32, seed=i)
        rewards.append(batch["next", "reward"].mean().item())
        stats = learner.update(batch)
    assert rewards[-1] > rewards[0] + 0.5
    assert set(stats) == {
        *("loss_policy", "loss_value", "entropy", "kl", "clip_fraction", "grad_norm"),
        *("explained_variance", "value", "epochs", "lr", "clip"),
    }
    assert all(type(x) is float for x in stats.values())


def test_the_batch_is_left_as_it_was() -> None:
    learner = learner_of(epochs=2, minibatch_size=10)
    batch = batch_of(learner, 4, 8)
    before = batch.clone()
    learner.update(batch)
    assert (batch == before).all()
    assert set(batch.keys(True, True)) == set(before.keys(True, True))


def test_a_trunk_that_policy_and_critic_share_is_moved_once() -> None:
    torch.manual_seed(0)
    trunk = nn.Sequential(nn.Linear(4, 8), nn.Tanh())
    critic = nn.Sequential(trunk, nn.Linear(8, 1), nn.Flatten(0))
    learner = PPO(CategoricalPolicy(nn.Sequential(trunk, nn.Linear(8, 3))), critic)
    before = trunk[0].weight.detach().clone()
    n = 32
    observation, action = torch.randn(n, 4), torch.randint(3, (n,))
    learner._step(Frames(observation, action, *(torch.randn(n) for _ in range(4))), 1e-3, 0.2)
    moved = (trunk[0].weight.detach() - before).abs().max().item()
    assert moved == pytest.approx(1e-3, rel=0.01)  # a first step of Adam is as long as its learning rate


def test_schedules_fall_on_a_line_and_stay() -> None:
    schedules: dict[str, Any] = {"lr": 1e-2, "lr_final": 0.0, "clip": 0.3, "clip_final": 0.1, "epochs": 3}
    learner = learner_of(**schedules, epochs_final=1, anneal_frames=64, minibatch_size=16)
    rows = [learner.update(batch_of(learner, 32, 1)) for _ in range(4)]
    assert [row["lr"] for row in rows] == [1e-2, 5e-3, 0.0, 0.0]
    assert [round(row["clip"], 6) for row in rows] == [0.3, 0.2, 0.1, 0.1]
    assert [row["epochs"] for row in rows] == [3.0, 2.0, 1.0, 1.0]


def test_the_kl_stop_ends_the_passes() -> None:
    options: dict[str, Any] = {"epochs": 10, "minibatch_size": 16, "lr": 5e-2}
    free, stopped = learner_of(**options), learner_of(**options, target_kl=0.01)
    assert free.update(batch_of(free, 8, 16))["epochs"] == 10
    assert stopped.update(batch_of(stopped, 8, 16))["epochs"] < 10


def test_resumes_where_it_was(tmp_path: Any) -> None:
    options: dict[str, Any] = {"lr_final": 0.0, "anneal_frames": 512, "epochs": 2, "minibatch_size": 32}
    first = learner_of(**options)
    first.update(batch_of(first, 8, 16))
    torch.save(first.state_dict(), tmp_path / "learner.pt")
    second = learner_of(**options, seed=1)
    second.load_state_dict(torch.load(tmp_path / "learner.pt", weights_only=True))
    batch = batch_of(first, 8, 16, seed=3)
    stats = []
    for learner in (first, second):
        torch.manual_seed(7)
        stats.append(learner.update(copy.deepcopy(batch)))
    assert stats[0] == stats[1]
    for p, q in zip(first.parameters, second.parameters, strict=True):
        assert torch.equal(p, q)


def test_refuses_what_cannot_be() -> None:
    for name in ("epochs", "epochs_final", "minibatch_size", "anneal_frames"):
        with pytest.raises(ValueError, match="at least 1"):
            learner_of(CHOICE, 0, **{name: 0})
    learner = learner_of()
    batch = batch_of(learner, 4, 4)
    batch["next", "reward"][0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="diverged"):
        learner.update(batch)


@pytest.mark.parametrize(
    ("key", "what"),
    [(("next", "reward"), "rewards"), ("observation", "observations"), (("next", "observation"), "observations")],
)
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_the_environment_gave_is_blamed_before_the_learning_rate(key: Any, what: str, number: float) -> None:
    learner = learner_of()
    batch = batch_of(learner, 2, 8)
    batch["next", "terminated"][0, 3] = batch["next", "done"][0, 3] = False
    batch[key][0, 3] = number
    with pytest.raises(Diverged, match=f"given {what} that are not finite: look to the environment") as told:
        learner.update(batch)
    assert "learning rate" not in str(told.value)


def test_a_learner_that_diverged_by_itself_is_told_to_take_smaller_steps() -> None:
    learner = learner_of(lr=1e30)
    batch = batch_of(learner, 2, 8)
    batch["next", "observation"][0, 3] = float("nan")  # of an episode that has terminated: it does not matter
    with pytest.raises(Diverged, match=r"with a learning rate .* below 1e"):
        learner.update(batch)
