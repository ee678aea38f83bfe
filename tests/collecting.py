"""Policies that choose one action always, by the sign of a weight, and a check of every collector with them."""

from __future__ import annotations

import os
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from collectors import GymEnv


class Scores(nn.Module):
    """Chooses action 1 always, or 0 always, by the sign of one weight; unless asked not to, it has a critic."""

    def __init__(self, sign: float = 1.0, *, critic: bool = True) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([0.0, sign]))
        if critic:
            self.critic = nn.Linear(4, 1)

    def forward(self, observation: Tensor) -> Tensor:
        return self.bias.expand(*observation.shape[:-1], 2)


def policy(sign: float = 1.0, *, critic: bool = True) -> TensorDictModule:
    return TensorDictModule(Scores(sign, critic=critic), in_keys=["observation"], out_keys=["action"])


def cartpole() -> GymEnv:
    return GymEnv("CartPole-v1", 2)


def chosen(batch: TensorDictBase) -> float:
    return batch["action"].float().argmax(-1).float().mean().item()


def check_calling_conventions(collector: Any, trained: Any, **others: nn.Module) -> None:
    """Each call of ``update_policy_weights_`` reaches all workers; in the end they choose 0.

    Args:
        collector: it has just been made for the policy.
        trained: this policy, which chooses 1.
        others: weights of other models, for the call that has weights of all models.
    """
    assert chosen(next(collector)) == 1.0
    with torch.no_grad():
        trained.module.bias.neg_()
    assert chosen(next(collector)) == 1.0, "training alone must reach no worker"
    collector.update_policy_weights_()
    assert chosen(next(collector)) == 0.0
    calls = [
        lambda other: collector.update_policy_weights_(other),
        lambda other: collector.update_policy_weights_(other.state_dict()),
        lambda other: collector.update_policy_weights_(TensorDict.from_module(other)),
        lambda other: collector.update_policy_weights_(policy=other),
        lambda other: collector.update_policy_weights_(weights=other.state_dict(), model_id="policy"),
        lambda other: collector.update_policy_weights_(weights_dict={"policy": other, **others}),
    ]
    for number, call in enumerate(calls, start=3):
        action = float(number % 2 == 1)
        with torch.no_grad():  # the collector's own policy has the opposite sign of what is sent
            trained.module.bias.copy_(policy(1.0 - 2.0 * action).module.bias)
        call(policy(2.0 * action - 1.0))
        batch = next(collector)
        assert chosen(batch) == action and batch["policy_version"].unique().tolist() == [number]


class Telling(nn.Module):
    """Its action is 0; it writes down the version that its weight, buffer and extra state are of, and its process."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("mark", torch.zeros(1))
        self.note = 0
        self.critic = nn.Linear(4, 1)

    def become(self, value: int) -> Telling:
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.fill_(value)
        self.note = value
        return self

    def get_extra_state(self) -> int:
        return self.note

    def set_extra_state(self, state: int) -> None:
        if state == -13:
            raise ArithmeticError("-13 is refused")
        self.note = state

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        size = observation.shape[:-1]
        told = torch.tensor([self.weight.item(), self.mark.item(), self.note, os.getpid()], dtype=torch.float64)
        return torch.zeros(size, dtype=torch.int64), told.expand(*size, 4)


def telling() -> TensorDictModule:
    return TensorDictModule(Telling().become(1), in_keys=["observation"], out_keys=["action", "told"])


def update(collector: Any, value: int) -> None:
    """Have all workers' ``Telling`` become another one."""
    collector.policy.module.become(value)
    collector.update_policy_weights_()
