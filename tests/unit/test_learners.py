"""What PPO and IMPALA have in common."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from bandit import CHOICE, TORQUES, batch_of, learner_of

from collectors.environments.specs import Spec
from learning import IMPALA, PPO

every_learner = pytest.mark.parametrize(
    ("kind", "options"), [(PPO, {"epochs": 2, "minibatch_size": 32}), (IMPALA, {"minibatch_size": 32})]
)
every_spec = pytest.mark.parametrize("spec", [CHOICE, TORQUES], ids=["discrete", "continuous"])


@every_spec
@pytest.mark.parametrize(
    ("kind", "behind", "options", "batch", "updates", "own"),
    [
        (PPO, 0, {"epochs": 4}, (2, 4, 32), 15, {"clip", "kl_acted"}),
        (IMPALA, 0, {}, (4, 64), 25, set()),
        (IMPALA, 4, {}, (4, 64), 25, set()),
    ],
)
def test_learns_a_bandit_also_from_a_policy_several_versions_behind(
    kind: Any, spec: Spec, behind: int, options: dict[str, Any], batch: tuple[int, ...], updates: int, own: set[str]
) -> None:
    learner = learner_of(kind, spec, minibatch_size=64, lr=1e-2, **options)
    versions, rewards, stats = [copy.deepcopy(learner.policy)] * (behind + 1), [], {}
    for i in range(updates):
        experience = batch_of(versions[-behind - 1], *batch, seed=i)
        rewards.append(experience["next", "reward"].mean().item())
        stats = learner.update(experience)
        versions.append(copy.deepcopy(learner.policy))
    assert rewards[-1] > rewards[0] + 0.5
    assert set(stats) == own | {
        *("loss_policy", "loss_value", "entropy", "kl", "clip_fraction", "grad_norm"),
        *("explained_variance", "value", "epochs", "lr"),
    }
    assert all(type(x) is float for x in stats.values())


@every_learner
def test_resumes_where_it_was(kind: Any, options: dict[str, Any], tmp_path: Any) -> None:
    schedule: dict[str, Any] = {"lr_end_factor": 0.0, "anneal_frames": 512, **options}
    first = learner_of(kind, **schedule)
    first.update(batch_of(first.policy, 8, 16))
    torch.save(first.state_dict(), tmp_path / "learner.pt")
    other = learner_of(kind, **schedule, adam_eps=1e-3)
    other.load_state_dict(first.state_dict())
    assert other.optimizer.param_groups[0]["eps"] == 1e-3
    second = learner_of(kind, **schedule, seed=1)
    second.load_state_dict(torch.load(tmp_path / "learner.pt", weights_only=True))
    batch, stats = batch_of(first.policy, 8, 16, seed=3), []
    for learner in (first, second):
        torch.manual_seed(7)
        stats.append(learner.update(copy.deepcopy(batch)))
    assert stats[0] == stats[1] and stats[0]["lr"] == 0.75 * learner_of(kind).lr
    for p, q in zip(first.parameters, second.parameters, strict=True):
        assert torch.equal(p, q)
