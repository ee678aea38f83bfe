from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from collectors.environments.specs import Spec
from learning import IMPALA, make_critic, make_policy
from learning.actor_critic import UnusableBatch

CHOICE = Spec(torch.Size([3]), torch.int64, n=3)
TORQUES = Spec(torch.Size([2]), torch.float32, torch.tensor([-2.0, 0.0]), torch.tensor([2.0, 10.0]))


def learner_of(spec: Spec = CHOICE, seed: int = 0, **options: Any) -> IMPALA:
    torch.manual_seed(seed)
    return IMPALA(make_policy(4, spec, (8, 8)), make_critic(4, (8, 8)), **options)


def batch_of(acting: Any, *batch: int, seed: int = 0) -> TensorDict:
    """Experience of a bandit: the larger the action, the better."""
    torch.manual_seed(seed)
    with torch.no_grad():
        td = acting(TensorDict({"observation": torch.randn(*batch, 4)}, batch_size=batch))
    end = torch.ones(*batch, 1, dtype=torch.bool)
    outcome = {
        "observation": torch.randn(*batch, 4),
        "reward": td["action"].float().reshape(*batch, -1).sum(-1, keepdim=True),
        "terminated": end,
        "truncated": ~end,
        "done": end.clone(),
    }
    return td.set("next", TensorDict(outcome, batch_size=batch))


@pytest.mark.parametrize("spec", [CHOICE, TORQUES], ids=["discrete", "continuous"])
@pytest.mark.parametrize("behind", [0, 4])
def test_learns_a_bandit_from_a_policy_several_versions_behind(spec: Spec, behind: int) -> None:
    learner = learner_of(spec, minibatch_size=64, lr=1e-2)
    versions, rewards, stats = [copy.deepcopy(learner.policy)] * (behind + 1), [], {}
    for i in range(25):
        batch = batch_of(versions[-behind - 1], 4, 64, seed=i)
        rewards.append(batch["next", "reward"].mean().item())
        stats = learner.update(batch)
        versions.append(copy.deepcopy(learner.policy))
    assert rewards[-1] > rewards[0] + 0.5
    assert set(stats) == {
        *("loss_policy", "loss_value", "entropy", "kl", "clip_fraction", "grad_norm"),
        *("explained_variance", "value", "epochs", "lr"),
    }
    assert all(type(x) is float for x in stats.values())


def test_without_staleness_the_policys_gradient_is_that_of_an_actor_critic() -> None:
    learner = learner_of(value_coef=0.0, entropy_coef=0.0, max_grad_norm=torch.inf)
    batch = batch_of(learner.policy, 4, 8)
    advantage = batch["next", "reward"].squeeze(-1) - learner.critic(batch["observation"]).detach()  # all terminated
    log_prob = learner.policy.distribution(batch["observation"]).log_prob(batch["action"])
    own = list(learner.policy.parameters())
    expected = torch.autograd.grad(-(advantage * log_prob).mean(), own)
    stats = learner.update(batch)
    assert stats["kl"] == pytest.approx(0.0, abs=1e-6) and stats["epochs"] == 1.0
    for parameter, gradient in zip(own, expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)


def test_a_constant_error_of_the_critic_leaves_the_variance_explained() -> None:
    learner = learner_of(entropy_coef=0.0, lr=1e-9)
    batch = batch_of(learner.policy, 4, 64)
    with torch.no_grad():
        batch["next", "reward"] = (learner.critic(batch["observation"]) + 5.0).unsqueeze(-1)
    assert learner.update(batch)["explained_variance"] == pytest.approx(1.0, abs=1e-4)


def test_minibatches_are_whole_trajectories() -> None:
    for size, steps in ((1, 6), (10, 6), (20, 3), (10_000, 1)):
        learner, taken = learner_of(minibatch_size=size, epochs=2), []
        learner.optimizer.register_step_post_hook(lambda *_, taken=taken: taken.append(1))
        learner.update(batch_of(learner.policy, 2, 3, 10))
        assert len(taken) == 2 * steps
        assert learner.frames == 60
    learner, sizes = learner_of(minibatch_size=50), []
    learner.critic.register_forward_hook(lambda *call: sizes.append(len(call[-1])) if torch.is_grad_enabled() else None)
    learner.update(batch_of(learner.policy, 2, 3, 10))
    assert sizes == [3, 3]


@pytest.mark.parametrize("spec", [CHOICE, TORQUES], ids=["discrete", "continuous"])
def test_masked_entries_of_a_batch_are_not_learnt_from(spec: Spec) -> None:
    results = []
    for content in (0.0, 1e6, math.nan):
        learner = learner_of(spec)
        batch = batch_of(learner.policy, 4, 8)
        mask = torch.ones(4, 8, dtype=torch.bool)
        mask[:, 3] = False
        batch["mask"] = mask
        batch["next", "reward"][:, 3] = 0.0 if math.isnan(content) else content
        batch["observation"][:, 3] = batch["action_log_prob"][:, 3] = content
        if spec is TORQUES:
            batch["action"][:, 3] = content
        batch["next", "done"][:, 3] = batch["next", "terminated"][:, 3] = False
        torch.manual_seed(1)
        results.append(learner.update(batch))
        assert learner.frames == 28
    assert results[0] == results[1] == results[2]


def test_a_minibatch_without_a_frame_is_left_out() -> None:
    learner = learner_of(minibatch_size=1)
    batch = batch_of(learner.policy, 4, 1)
    batch["mask"] = torch.tensor([[True], [False], [True], [False]])
    assert learner.update(batch)["grad_norm"] > 0 and learner.frames == 2


def test_a_batch_of_one_environment_has_no_leading_dimension() -> None:
    learner = learner_of()
    learner.update(batch_of(learner.policy, 16))
    assert learner.frames == 16


def test_resumes_where_it_was(tmp_path: Any) -> None:
    options: dict[str, Any] = {"lr_end_factor": 0.0, "anneal_frames": 512, "minibatch_size": 32}
    first = learner_of(**options)
    first.update(batch_of(first.policy, 8, 16))
    torch.save(first.state_dict(), tmp_path / "learner.pt")
    second = learner_of(**options, seed=1)
    second.load_state_dict(torch.load(tmp_path / "learner.pt", weights_only=True))
    batch, stats = batch_of(first.policy, 8, 16, seed=3), []
    for learner in (first, second):
        torch.manual_seed(7)
        stats.append(learner.update(copy.deepcopy(batch)))
    assert stats[0] == stats[1] and stats[0]["lr"] == 0.75 * learner_of().lr


def test_a_kl_divergence_without_bound_does_not_end_a_run() -> None:
    """The ratios in the losses are clipped; a version that would never have taken an action may have acted."""
    learner = learner_of()
    batch = batch_of(learner.policy, 2, 8)
    batch["action_log_prob"][0, 3] = -200.0
    assert math.isinf(learner.update(batch)["kl"])


def test_what_is_not_finite_is_named() -> None:
    learner = learner_of()
    batch = batch_of(learner.policy, 2, 8)
    batch["next", "reward"][0, 3] = torch.nan
    with pytest.raises(UnusableBatch, match=r"^reward is not finite at row 0, step 3"):
        learner.update(batch)
