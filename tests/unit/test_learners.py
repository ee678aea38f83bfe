"""What PPO and IMPALA have in common, and what each has alone."""

import copy
import math
from typing import Any

import pytest
import torch
from bandit import CHOICE, TORQUES, batch_of, four_numbers, learner_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from collectors.environments.specs import Spec, SpecTree
from learning import CNN, IMPALA, MLP, PPO, gae, make_actor_critic, vtrace
from learning.actor_critic import UnusableBatch
from learning.ppo import Frames

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
    for compiled, stopping in ((False, False), (True, False), (True, True)):
        torch.manual_seed(0)
        learner = PPO(*make_actor_critic(Branching, NUMBERS, CHOICE), minibatch_size=32, compile=compiled)
        learner.stopping = stopping  # the signal may have ended the compiler: then nothing is said
        stats.append([learner.update(batch_of(learner.policy, 8, 16, seed=i)) for i in range(2)])
    assert stats[0] == stats[1] == stats[2]
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


# --- PPO alone ---


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
    learner = learner_of(PPO, spec, seed, entropy_coef=entropy_coef, max_grad_norm=torch.inf)
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
    older = learner_of(PPO)
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
    learner = learner_of(PPO, **schedules, epochs_final=1, anneal_frames=64, minibatch_size=16)
    rows = [learner.update(batch_of(learner.policy, 32, 1)) for _ in range(4)]
    assert [row["lr"] for row in rows] == [1e-2, 5e-3, 0.0, 0.0]
    assert [round(row["clip"], 6) for row in rows] == [0.3, 0.2, 0.1, 0.1]
    assert [row["epochs"] for row in rows] == [3.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["epochs", "epochs_final", "minibatch_size", "anneal_frames"])
def test_invalid_counts_are_errors(name: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        learner_of(PPO, CHOICE, 0, **{name: 0})


@pytest.mark.parametrize(("key", "what"), [(("next", "reward"), "next.reward"), ("observation", "observation")])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_input_that_is_not_finite_is_named_and_changes_nothing(key: Any, what: str, number: float) -> None:
    learner = learner_of(PPO)
    batch = batch_of(learner.policy, 2, 8)
    batch["next", "terminated"][0, 3] = batch["next", "done"][0, 3] = False
    batch[key][0, 3] = number
    before = [p.clone() for p in learner.parameters]
    with pytest.raises(UnusableBatch, match=rf"^{what} is not finite at \[0, 3\] of the batch"):
        learner.update(batch)
    assert all(torch.equal(p, q) for p, q in zip(before, learner.parameters, strict=True))


# --- advantages against their definitions: GAE, and V-trace ---


def experience(*shape: int, seed: int, p_end: float = 0.3) -> tuple[Tensor, ...]:
    """What ``vtrace`` takes; ``gae`` takes all but the first, the log-ratio of the policies."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4))
    terminated, truncated = (torch.rand(shape, generator=generator) < p_end / 2 for _ in range(2))
    return *drawn, terminated, terminated | truncated


def gae_of_one(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, gamma: float, lmbda: float
) -> Tensor:
    """One trajectory [T], from the definition: a sum of discounted one-step errors, up to the episode's end."""
    advantage = torch.zeros_like(reward)
    for start in range(len(reward)):
        weight = 1.0
        for t in range(start, len(reward)):
            future = 0.0 if terminated[t] else gamma * next_value[t]
            advantage[start] += weight * (reward[t] + future - value[t])
            if done[t]:
                break
            weight *= gamma * lmbda
    return advantage


@settings(max_examples=60, deadline=None)
@given(
    leading=st.lists(st.integers(1, 3), max_size=2),
    length=st.integers(1, 12),
    gamma=st.floats(0.0, 1.0),
    lmbda=st.floats(0.0, 1.0),
    p_end=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_gae_equals_the_definition_on_every_trajectory(
    leading: list[int], length: int, gamma: float, lmbda: float, p_end: float, seed: int
) -> None:
    _, *tensors = experience(*leading, length, seed=seed, p_end=p_end)
    advantage = gae(*tensors, gamma=gamma, lmbda=lmbda)
    assert advantage.shape == (*leading, length)
    rows = zip(*(x.reshape(-1, length) for x in tensors), strict=True)
    expected = torch.stack([gae_of_one(r, v, n, t, d, gamma, lmbda) for r, v, n, t, d in rows]).view_as(advantage)
    torch.testing.assert_close(advantage, expected)


def test_a_slice_is_as_good_as_a_copy() -> None:
    _, *tensors = experience(4, 3, 6, seed=0)
    reward, value, next_value, terminated, done = (x.transpose(0, 1) for x in tensors)
    transposed = gae(reward, value, next_value, terminated, done, gamma=0.9, lmbda=0.9)
    torch.testing.assert_close(transposed.transpose(0, 1), gae(*tensors, gamma=0.9, lmbda=0.9))


def vtrace_of_one(
    log_ratio: Tensor, reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor,
    gamma: float, lmbda: float, clip_rho: float, clip_c: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One trajectory [T] by the sum and the product in equation 1 of the paper."""
    ratio, length = log_ratio.exp(), len(reward)
    rho, c = ratio.clamp(max=clip_rho), lmbda * ratio.clamp(max=clip_c)
    future = torch.where(terminated, 0.0, next_value)
    target, advantage = value.clone(), torch.zeros_like(value)
    for s in range(length):
        for t in range(s, length):
            product = math.prod(c[i].item() for i in range(s, t))
            target[s] += gamma ** (t - s) * product * rho[t] * (reward[t] + gamma * future[t] - value[t])
            if done[t]:
                break
    for s in range(length):
        following = future[s] if done[s] or s == length - 1 else target[s + 1]
        advantage[s] = rho[s] * (reward[s] + gamma * following - value[s])
    return target, advantage


@settings(max_examples=60, deadline=None)
@given(
    leading=st.lists(st.integers(1, 3), max_size=2),
    length=st.integers(1, 10),
    gamma=st.floats(0.0, 1.0),
    lmbda=st.floats(0.0, 1.0),
    clips=st.sampled_from([(1.0, 1.0), (2.0, 0.5), (math.inf, 1.0), (0.1, 0.0)]),
    p_end=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_vtrace_equals_the_papers_definition_on_every_trajectory(
    leading: list[int], length: int, gamma: float, lmbda: float, clips: tuple[float, float], p_end: float, seed: int
) -> None:
    tensors = experience(*leading, length, seed=seed, p_end=p_end)
    options: dict[str, Any] = {"gamma": gamma, "lmbda": lmbda, "clip_rho": clips[0], "clip_c": clips[1]}
    found = vtrace(*tensors, **options)
    rows = [vtrace_of_one(*row, **options) for row in zip(*(x.reshape(-1, length) for x in tensors), strict=True)]
    for one, expected in zip(found, zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(expected).view_as(one))


def test_an_action_that_the_policy_never_takes_changes_nothing_before_it() -> None:
    log_ratio, reward, value, *rest = experience(4, 6, seed=0, p_end=0.0)
    log_ratio[:, 3] = -math.inf
    first = vtrace(log_ratio, reward, value, *rest, gamma=0.9)
    reward[:, 3:] += 100.0
    second = vtrace(log_ratio, reward, value, *rest, gamma=0.9)
    assert torch.equal(first[0][:, :4], second[0][:, :4])
    assert torch.equal(first[0][:, 3], value[:, 3]) and (first[1][:, 3] == 0).all()
    assert not torch.allclose(first[0][:, 4:], second[0][:, 4:])


@pytest.mark.parametrize("unknown", [math.nan, math.inf, -math.inf])
def test_where_an_episode_has_no_future_its_value_does_not_matter(unknown: float) -> None:
    log_ratio, *rest = experience(4, 10, seed=0)

    def found() -> Tensor:
        return torch.stack([gae(*rest, gamma=0.9, lmbda=0.9), *vtrace(log_ratio, *rest, gamma=0.9)])

    expected, terminated = found(), rest[3]
    rest[2][terminated] = unknown
    assert torch.equal(found(), expected)


def test_the_targets_are_constants_for_the_gradient() -> None:
    tensors = [x.requires_grad_() if x.is_floating_point() else x for x in experience(2, 5, seed=0)]
    assert not any(x.requires_grad for x in vtrace(*tensors, gamma=0.9))
