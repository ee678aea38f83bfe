"""Recurrent policies: a collector hands the state back, and PPO learns from whole sequences of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from collectors import GymEnv
from collectors.environments.specs import Spec
from collectors.rollouts.rollout import Rollout
from learning import PPO, RNN, RecurrentNetwork, make_actor_critic

SPEC, CHOICE = Spec(torch.Size([4]), torch.float32), Spec(torch.Size([2]), torch.int64, n=2)


def counting(td: TensorDictBase) -> TensorDictBase:
    """Its state is the number of steps since the start of the episode."""
    before = td.get("count", torch.zeros(*td.batch_size, 1))
    td.set("action", torch.randint(2, td.batch_size))
    return td.set(("next", "count"), before + 1)


@pytest.mark.parametrize(("num_envs", "mode"), [(1, None), (3, "sync"), (3, "vector_entry_point")])
def test_a_state_is_handed_back_and_starts_anew_with_each_episode(num_envs: int, mode: str | None) -> None:
    kwargs: dict[str, Any] = {} if mode is None else {"vectorization_mode": mode}
    rollout = Rollout(GymEnv("CartPole-v1", num_envs, seed=0, **kwargs), counting)
    batches = [rollout.collect(rollout.buffer(60)) for _ in range(3)]
    batch = torch.cat(batches, -1)  # episodes continue from batch to batch
    mask = batch.get("mask", torch.ones(batch.batch_size, dtype=torch.bool))
    expected = batch["next", "episode_length"].squeeze(-1)
    assert bool((batch["next", "count"].squeeze(-1) == expected)[mask].all())
    assert bool((batch["count"].squeeze(-1) == expected - 1)[mask].all())
    assert bool((batch["is_init"].squeeze(-1) == (expected == 1))[mask].all())
    assert bool(batch["next", "done"].any())


class Stepwise(RecurrentNetwork):
    """Uses the sequence that every recurrent network has, a loop."""

    def __init__(self, inner: RNN) -> None:
        super().__init__()
        self.inner, self.state_size = inner, inner.state_size

    def forward(self, observation: Any, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(observation, state)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_sequence_is_what_its_steps_are(cell: str) -> None:
    torch.manual_seed(0)
    network = RNN(SPEC, cell, 8, (6,))
    observation, state = torch.randn(5, 9, 4), torch.randn(5, 9, network.state_size)
    is_init = torch.rand(5, 9) < 0.3
    expected = Stepwise(network).sequence(observation, state, is_init)
    torch.testing.assert_close(network.sequence(observation, state, is_init), expected, atol=1e-5, rtol=1e-4)
    gradient = torch.autograd.grad(expected.sum(), network.cell.weight_hh_l0)[0]
    other = torch.autograd.grad(network.sequence(observation, state, is_init).sum(), network.cell.weight_hh_l0)[0]
    torch.testing.assert_close(gradient, other, atol=1e-4, rtol=1e-3)
    with pytest.raises(ValueError, match="one of lstm, gru"):
        RNN(SPEC, "elman")


@pytest.mark.parametrize(("mode", "shared"), [("sync", True), ("sync", False), ("vector_entry_point", True)])
def test_before_learning_the_probabilities_are_those_of_acting(mode: str, shared: bool) -> None:
    torch.manual_seed(0)
    policy, critic = make_actor_critic(lambda spec: RNN(spec, "lstm", 16), SPEC, CHOICE, shared=shared)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.3 * torch.randn_like(p))
    rollout = Rollout(GymEnv("CartPole-v1", 4, seed=0, vectorization_mode=mode), policy)
    learner = PPO(policy, critic, epochs=1, minibatch_size=1000, decoupled=False)
    for _ in range(2):
        batch = rollout.collect(rollout.buffer(40))
        stats = learner.update(batch)
        assert stats["kl"] == pytest.approx(0.0, abs=1e-6) and stats["clip_fraction"] == 0.0
    mask = batch.get("mask", torch.ones(4, 40, dtype=torch.bool))
    assert learner.frames <= 320 and int(mask.sum()) <= 160


def test_ppo_learns_to_remember() -> None:
    """The reward is 1 for repeating the observation before the current one, which only a state can tell."""
    torch.manual_seed(0)
    policy, critic = make_actor_critic(
        lambda spec: RNN(spec, "gru", 16, (16,)), Spec(torch.Size([2]), torch.float32), CHOICE
    )
    learner, rewards = PPO(policy, critic, lr=5e-3, epochs=4, minibatch_size=160), []
    for _ in range(30):
        signs = torch.randint(2, (40, 8))
        observation, state, steps = torch.nn.functional.one_hot(signs, 2).float(), None, []
        for t in range(8):
            td = TensorDict({"observation": observation[:, t]}, [40])
            td = td if state is None else td.set("recurrent_state", state)
            with torch.no_grad():
                td = policy(td)
            steps.append(
                td if state is not None else td.set("recurrent_state", torch.zeros_like(td["next", "recurrent_state"]))
            )
            state = td["next", "recurrent_state"]
        batch = torch.stack(steps, 1)
        batch["is_init"] = torch.zeros(40, 8, 1, dtype=torch.bool)
        batch["is_init"][:, 0] = True
        last = torch.full((40, 8, 1), False)
        last[:, -1] = True
        right = (batch["action"][:, 1:] == signs[:, :-1]).float()
        batch["next", "reward"] = torch.cat([torch.zeros(40, 1), right], 1).unsqueeze(-1)
        batch["next", "observation"] = observation
        batch["next", "done"] = batch["next", "terminated"] = last
        rewards.append(right.mean().item())
        learner.update(batch)
    assert rewards[0] < 0.65 and rewards[-1] > 0.9
