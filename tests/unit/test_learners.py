"""What PPO and IMPALA have in common."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from bandit import CHOICE, TORQUES, batch_of, four_numbers, learner_of
from tensordict import TensorDict

from collectors.environments.specs import Spec, SpecTree
from learning import CNN, IMPALA, MLP, PPO, make_actor_critic

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


def images(*batch: int) -> torch.Tensor:
    return torch.randint(0, 256, (*batch, 1, 36, 36), dtype=torch.uint8)


def masked(*batch: int) -> TensorDict:
    allowed = torch.rand(*batch, 3) < torch.tensor([1.0, 0.5, 0.5])  # the first one always
    return TensorDict({"observation": four_numbers(*batch), "action_mask": allowed.float()}, batch)


NUMBERS = Spec(torch.Size([4]), torch.float32)
SPECS: dict[Any, SpecTree] = {
    four_numbers: NUMBERS,
    masked: {"observation": NUMBERS, "action_mask": Spec(torch.Size([3]), torch.float32)},
    images: Spec(torch.Size([1, 36, 36]), torch.uint8),
}
CASES = [(PPO, four_numbers, TORQUES), *((kind, one, CHOICE) for kind in (PPO, IMPALA) for one in (masked, images))]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "observe", "action"), CASES)
def test_compiled_200_steps_and_a_resumption_in_between_are_what_they_are_without(
    kind: Any, observe: Any, action: Spec, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    learners, network, lr = [], *((CNN, 1e-6) if observe is images else (MLP, 1e-4))
    for compiled in (False, True):
        torch.manual_seed(0)
        networks = make_actor_critic(network, SPECS[observe], action, shared=network is CNN)
        learners.append(kind(*networks, epochs=5, minibatch_size=32, lr=lr, lr_end_factor=0.0, compile=compiled))
    for i in range(10):
        if i in (3, 6):
            learners[i == 3].load_state_dict(copy.deepcopy(learners[i == 6].state_dict()))
        batch, stats = batch_of(learners[0].policy, 8, 16, seed=i, observe=observe), []
        for learner in learners:
            torch.manual_seed(i)
            stats.append(learner.update(batch))
        for name in ("loss_policy", "loss_value", "entropy", "grad_norm", "kl"):
            assert stats[1][name] == pytest.approx(stats[0][name], rel=1e-5, abs=1e-5), (i, name)
    assert learners[1].state_dict()["optimizer"]["state"][0]["step"] == 200
    assert not caplog.messages  # of a step that is not compiled


class Branching(MLP):
    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return super().forward(observation if observation.sum() > 0 else 2 * observation)


def test_a_policy_that_does_not_compile_is_named_once_and_learns_as_without(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING")
    stats = []
    for compiled in (False, True):
        torch.manual_seed(0)
        learner = PPO(*make_actor_critic(Branching, NUMBERS, CHOICE), minibatch_size=32, compile=compiled)
        stats.append([learner.update(batch_of(learner.policy, 8, 16, seed=i)) for i in range(2)])
    assert stats[0] == stats[1]
    (said,) = caplog.messages
    assert said.startswith("the gradient step is not compiled, and runs as it is: ") and "\n" not in said


# --- IMPALA alone ---


def test_without_staleness_the_policys_gradient_is_that_of_an_actor_critic() -> None:
    learner = learner_of(IMPALA, value_coef=0.0, entropy_coef=0.0, max_grad_norm=torch.inf)
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
        learner = learner_of(IMPALA, minibatch_size=size, epochs=2)
        learner.update(batch_of(learner.policy, 2, 3, 10))
        assert learner.state_dict()["optimizer"]["state"][0]["step"] == 2 * steps
        assert learner.frames == 60
    learner, sizes = learner_of(IMPALA, minibatch_size=50), []
    learner.critic.register_forward_hook(lambda *call: sizes.append(len(call[-1])) if torch.is_grad_enabled() else None)
    learner.update(batch_of(learner.policy, 2, 3, 10))
    assert sizes == [3, 3]
