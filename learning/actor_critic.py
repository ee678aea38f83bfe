"""What learners of a policy and its critic have in common: optimizer, schedules, state, a check for divergence."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from learning.networks import Policy, action_mask
from learning.recurrent import STATE, RecurrentPolicy


class Diverged(FloatingPointError):
    """A loss or a gradient is not finite, and the networks are unusable; or what they would learn from is not."""


class ActorCritic(ABC):
    """Trains a policy and its critic with one Adam optimizer.

    Attributes:
        policy: trained in place.
        critic: observations ``[*B, obs]`` to values ``[*B]``; trained in place.
        frames: learnt from so far; the position in the schedules.
        parameters: those of both networks that are trained, each once.
    """

    def __init__(
        self,
        policy: Policy | RecurrentPolicy,
        critic: nn.Module,
        *,
        epochs: int,
        epochs_final: int | None,
        minibatch_size: int,
        lr: float,
        lr_end_factor: float,
        anneal_frames: int,
        max_grad_norm: float,
        adam_eps: float,
    ) -> None:
        if min(epochs, epochs if epochs_final is None else epochs_final, minibatch_size, anneal_frames) < 1:
            raise ValueError("epochs, epochs_final, minibatch_size and anneal_frames must be at least 1")
        self.policy, self.critic = policy, critic
        self.epochs, self.epochs_final = epochs, epochs if epochs_final is None else epochs_final
        self.minibatch_size = minibatch_size
        self.lr, self.lr_final = lr, lr * lr_end_factor
        self.anneal_frames, self.max_grad_norm = anneal_frames, max_grad_norm
        self.frames = 0
        unique = dict.fromkeys((*policy.parameters(), *critic.parameters()))  # a shared trunk is listed once
        self.parameters = [p for p in unique if p.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, lr=lr, eps=adam_eps, fused=True)

    @abstractmethod
    def update(self, batch: TensorDictBase) -> dict[str, float]:
        """Learn from one batch ``[*B, T]`` of a collector (time last); return statistics.

        Raises:
            Diverged: a loss or the gradient is not finite; the networks are unusable.
            ValueError: an action mask in the batch allows no action.
        """

    def _scheduled(self, first: float, final: float) -> float:
        """Return the value, after ``frames``, that falls linearly from `first` to `final` over ``anneal_frames``."""
        return final + max(0.0, 1.0 - self.frames / self.anneal_frames) * (first - final)

    def _begin_update(self, batch: TensorDictBase) -> tuple[float, int]:
        """Check `batch`; set the scheduled learning rate; return it, and the scheduled number of passes.

        Raises:
            ValueError: an action mask in it allows no action.
        """
        allowed = action_mask(batch.get("observation"))
        if allowed is not None:
            frames, possible = batch.get("mask", None), self.policy.can_act(allowed)
            impossible = int((~possible if frames is None else frames & ~possible).sum())
            if impossible:
                raise ValueError(
                    f"the action mask of {impossible} frame(s) of the batch allows no action: check the environment"
                )
        lr = self._scheduled(self.lr, self.lr_final)
        self.optimizer.param_groups[0]["lr"] = lr
        return lr, round(self._scheduled(self.epochs, self.epochs_final))

    def _minibatch_sizes(self, rows: int, length: int) -> list[int]:
        """Return the sizes of the minibatches of one pass over `rows` sequences of `length` frames.

        There are as few as ``minibatch_size`` allows, with one sequence at least; the sizes differ by one at most.
        """
        count = max(1, math.ceil(rows / max(1, self.minibatch_size // length)))
        return [(rows + i) // count for i in range(count)]

    def _descend(self, loss: Tensor) -> Tensor:
        """Do one gradient step on `loss`; return the norm of the gradient before it is scaled down."""
        for parameter in self.parameters:  # zero_grad() takes twenty times as long
            parameter.grad = None
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        self.optimizer.step()
        return grad_norm

    def _check_finite(self, stats: dict[str, float], batch: TensorDictBase, lr: float) -> None:
        """Raise Diverged if a loss or the norm of the gradient is not finite; the message names the cause."""
        needed = {name: stats[name] for name in ("loss_policy", "loss_value", "grad_norm")}
        wrong = [f"{name} is {value}" for name, value in needed.items() if not math.isfinite(value)]
        if not wrong:
            return
        if inputs := _not_finite(batch):
            advice = f"the batch has {' and '.join(inputs)} that are not finite: check the environment"
        else:
            advice = (
                f"resume from an earlier checkpoint, or start again, with a learning rate (algorithm.lr) below {lr:g}"
            )
        name = type(self).__name__
        raise Diverged(f"{name} diverged after {self.frames} frames: {', '.join(wrong)}; {advice}")

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed learner needs: both networks, the optimizer, the position in the schedules."""
        return {
            "policy": self.policy.state_dict(),
            "critic": self.critic.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "frames": self.frames,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from where `state_dict` was taken, with the same networks and this learner's hyperparameters."""
        self.policy.load_state_dict(state["policy"])
        self.critic.load_state_dict(state["critic"])
        (group,) = self.optimizer.param_groups
        own = {name: value for name, value in group.items() if name != "params"}
        self.optimizer.load_state_dict(state["optimizer"])
        self.optimizer.param_groups[0].update(own)
        self.frames = state["frames"]


def zero_gaps(batch: TensorDictBase) -> TensorDictBase:
    """Return `batch` with zeros where its "mask" has no frame, in what is computed from observations there.

    A gap follows the end of an episode; its observation is the episode's last one, which may have any values, e.g. NaN.
    """
    mask = batch.get("mask", None)
    if mask is None:
        return batch
    copy = batch.copy()  # shares the other tensors
    for key in ("observation", "action", "action_log_prob", ("next", STATE)):
        if (values := batch.get(key, None)) is not None:
            zeroed = values.clone()
            zeroed[~mask] = 0
            copy.set(key, zeroed)
    return copy


def as_sequences(x: Tensor, dimensions: int) -> Tensor:
    """Return `x` ``[*B, T, ...]``, where B and T have so many `dimensions`, as ``[n, T, ...]``."""
    return x.flatten(0, dimensions - 2) if dimensions > 1 else x.unsqueeze(0)


def kl_divergence(log_ratio: Tensor) -> Tensor:
    """Return an estimate in nats with low variance, never negative: http://joschu.net/blog/kl-approx.html."""
    return (log_ratio.exp() - 1.0 - log_ratio).mean()


def explained_variance(error: Tensor, target: Tensor) -> Tensor:
    """Return the part of the variance of `target` that predictions with the variance `error` of errors explain."""
    return 1.0 - error / target.var(correction=0).clamp_min(1e-8)


def _not_finite(batch: TensorDictBase) -> list[str]:
    """Return which inputs of `batch` are not finite; an observation after a terminated episode does not count."""
    step = batch.get("next")
    successors = step.get("observation")[~step.get("terminated").squeeze(-1)]
    parts = {"observations": (batch.get("observation"), successors), "rewards": (step.get("reward"),)}
    return [name for name, tensors in parts.items() if not all(x.isfinite().all() for x in tensors)]
