from __future__ import annotations

from functools import partial

import bandit
import pytest
import torch
from bandit import batch_of

from learning import IMPALA

learner_of = partial(bandit.learner_of, IMPALA)


def test_without_staleness_the_policys_gradient_is_that_of_an_actor_critic() -> None:
    learner = learner_of(value_coef=0.0, entropy_coef=0.0, max_grad_norm=torch.inf)
    batch = batch_of(learner.policy, 4, 8)
    advantage = batch["next", "reward"].squeeze(-1) - learner.critic(batch["observation"]).detach()  # all terminated
    log_prob = learner.policy.distribution(batch["observation"]).log_prob(batch["action"])
    own = list(learner.policy.parameters())
    expected = torch.autograd.grad(-(advantage * log_prob).mean(), own)
    stats = learner.update(batch)
    assert stats["kl"] == pytest.approx(0.0, abs=1e-6) and stats["epochs"] == 1.0
    for parameter, gradient in zip(own, expected, strict=True):  # Adam's first moment is a tenth of the first gradient
        torch.testing.assert_close(10 * learner.optimizer.state[parameter]["exp_avg"], gradient, rtol=1e-3, atol=1e-6)


def test_minibatches_are_whole_trajectories() -> None:
    for size, steps in ((1, 6), (10, 6), (20, 3), (10_000, 1)):
        learner = learner_of(minibatch_size=size, epochs=2)
        learner.update(batch_of(learner.policy, 2, 3, 10))
        assert learner.state_dict()["optimizer"]["state"][0]["step"] == 2 * steps
        assert learner.frames == 60
    learner, sizes = learner_of(minibatch_size=50), []
    learner.critic.register_forward_hook(lambda *call: sizes.append(len(call[-1])) if torch.is_grad_enabled() else None)
    learner.update(batch_of(learner.policy, 2, 3, 10))
    assert sizes == [3, 3]
