"""Proximal policy optimisation: the learner of the training loop."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from learning.adam import FlatAdam
from learning.gae import gae
from learning.networks import Policy

STATS = ("loss_policy", "loss_value", "entropy", "kl", "clip_fraction", "grad_norm")
KL = STATS.index("kl")


class Diverged(FloatingPointError):
    """A learner's figures are no longer finite, by themselves or for what it was given: its networks are lost."""


class Frames(NamedTuple):
    """Frames to learn from, ``[n, ...]`` each: what the acting policy said of them, and what came of it."""

    observation: Tensor
    action: Tensor
    log_prob: Tensor
    advantage: Tensor
    target: Tensor
    value: Tensor


class PPO:
    """Improves a policy and its critic on batches of their own experience (Schulman et al., https://arxiv.org/abs/1707.06347).

    Args:
        policy: improved in place; its acting copies elsewhere are somebody else's affair.
        critic: observations ``[*B, obs]`` to values ``[*B]``, in units of scaled reward.
        gamma: discount per step.
        gae_lambda: see :func:`learning.gae`.
        reward_scale: factor on rewards before anything is computed from them, so that returns are of the order of one.
        epochs: passes over each batch, at most; at the start.
        epochs_final: the same, once `anneal_frames` have been learnt from; in between it falls on a straight line.
        minibatch_size: frames per gradient step; the last one of a pass may be smaller.
        lr: learning rate of Adam, at the start.
        lr_final: the same, at the end of the schedule.
        clip: the probability ratio counts between ``1 - clip`` and ``1 + clip``, at the start.
        clip_final: the same, at the end of the schedule.
        anneal_frames: length of the schedules; after it the final values stay, so that a long run goes on learning.
        value_coef: weight of the value loss.
        value_clip: largest step of a value prediction that its loss rewards, in scaled reward; None: no limit.
        entropy_coef: weight of the entropy bonus.
        max_grad_norm: gradients are scaled down to this norm, all parameters together.
        target_kl: no further pass over a batch once the policy has moved by this much, in nats; None: never stop early.
        normalize_advantage: give a batch's advantages mean 0 and standard deviation 1.
        adam_eps: Adam's epsilon.

    Raises:
        ValueError: a count below 1.

    """

    def __init__(
        self,
        policy: Policy,
        critic: nn.Module,
        *,
        gamma: float = 0.99,
        gae_lambda: float = 0.95,
        reward_scale: float = 1.0,
        epochs: int = 10,
        epochs_final: int | None = None,
        minibatch_size: int = 256,
        lr: float = 3e-4,
        lr_final: float | None = None,
        clip: float = 0.2,
        clip_final: float | None = None,
        anneal_frames: int = 100_000,
        value_coef: float = 0.5,
        value_clip: float | None = None,
        entropy_coef: float = 0.0,
        max_grad_norm: float = 0.5,
        target_kl: float | None = None,
        normalize_advantage: bool = True,
        adam_eps: float = 1e-5,
    ) -> None:
        if min(epochs, epochs if epochs_final is None else epochs_final, minibatch_size, anneal_frames) < 1:
            raise ValueError("epochs, epochs_final, minibatch_size and anneal_frames must be at least 1")
        self.policy, self.critic = policy, critic
        self.gamma, self.gae_lambda, self.reward_scale = gamma, gae_lambda, reward_scale
        self.epochs, self.epochs_final = epochs, epochs if epochs_final is None else epochs_final
        self.minibatch_size = minibatch_size
        self.lr, self.lr_final = lr, lr if lr_final is None else lr_final
        self.clip, self.clip_final = clip, clip if clip_final is None else clip_final
        self.anneal_frames = anneal_frames
        self.value_coef, self.value_clip, self.entropy_coef = value_coef, value_clip, entropy_coef
        self.target_kl, self.normalize_advantage = target_kl, normalize_advantage
        self.frames = 0
        both = dict.fromkeys((*policy.parameters(), *critic.parameters()))  # once each, though they may share a trunk
        self.parameters = [p for p in both if p.requires_grad]
        self.optimizer = FlatAdam(self.parameters, eps=adam_eps, max_grad_norm=max_grad_norm)

    def update(self, batch: TensorDictBase) -> dict[str, float]:
        """Learn from one batch ``[*B, T]`` as a collector yields it (time last); returns means over the gradient steps.

        Keys: ``loss_policy``, ``loss_value``, ``entropy`` and ``kl`` (nats), ``clip_fraction``, ``grad_norm``,
        ``explained_variance``, ``value`` (scaled reward), ``epochs`` (passes done), ``lr``, ``clip``.

        Raises:
            Diverged: the figures are no longer finite; the networks are lost.

        """
        lr = self._scheduled(self.lr, self.lr_final)
        clip = self._scheduled(self.clip, self.clip_final)
        epochs = round(self._scheduled(self.epochs, self.epochs_final))
        frames, summary = self._prepare(batch)
        passes: list[Tensor] = []
        while len(passes) < epochs:
            passes.append(self._epoch(frames, lr, clip))
            if self.target_kl is not None and passes[-1][KL].item() > self.target_kl:
                break
        self.frames += batch.numel()
        stats = dict(zip(STATS, torch.stack(passes).mean(0).tolist(), strict=True)) | summary
        lost = [f"{name} is {value}" for name, value in stats.items() if not math.isfinite(value)]
        if lost:
            advice = (
                "go on from an earlier checkpoint, if there is one, or begin again, with a learning rate "
                f"(algorithm.lr) below {lr:g}"
            )
            if given := _not_finite(batch):
                advice = f"it was given {' and '.join(given)} that are not finite: look to the environment"
            raise Diverged(f"PPO diverged after {self.frames} frames: {', '.join(lost)}; {advice}")
        return stats | {"epochs": float(len(passes)), "lr": lr, "clip": clip}

    def _scheduled(self, first: float, final: float) -> float:
        return final + max(0.0, 1.0 - self.frames / self.anneal_frames) * (first - final)

    @torch.no_grad()
    def _prepare(self, batch: TensorDictBase) -> tuple[Frames, dict[str, float]]:
        """Compute, once per batch, what gradient steps need of every frame."""
        observation, step = batch.get("observation"), batch.get("next")
        value = self.critic(observation)
        advantage = gae(
            self.reward_scale * step.get("reward").squeeze(-1),
            value,
            self.critic(step.get("observation")),
            step.get("terminated").squeeze(-1),
            step.get("done").squeeze(-1),
            gamma=self.gamma,
            lmbda=self.gae_lambda,
        )
        target = advantage + value
        explained = 1.0 - advantage.var(correction=0) / target.var(correction=0).clamp_min(1e-8)
        summary = {"explained_variance": explained.item(), "value": value.mean().item()}
        if self.normalize_advantage:
            advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
        last = batch.ndim - 1
        tensors = (observation, batch.get("action"), batch.get("action_log_prob"), advantage, target, value)
        return Frames(*(x.flatten(0, last) for x in tensors)), summary

    def _epoch(self, frames: Frames, lr: float, clip: float) -> Tensor:
        """Pass once over all frames in random order; returns the figures named by `STATS`."""
        order = torch.randperm(len(frames.advantage), device=frames.advantage.device)
        frames = Frames(*(x[order] for x in frames))
        minibatches = zip(*(x.split(self.minibatch_size) for x in frames), strict=True)
        steps = [self._step(Frames(*minibatch), lr, clip) for minibatch in minibatches]

        log_prob, entropy, value = (torch.cat(parts) for parts in list(zip(*steps, strict=True))[:3])
        log_ratio = log_prob - frames.log_prob
        ratio = log_ratio.exp()
        surrogate = torch.min(frames.advantage * ratio, frames.advantage * ratio.clamp(1.0 - clip, 1.0 + clip))
        squared_error = (value - frames.target).square()
        kl = ratio - 1.0 - log_ratio  # of low variance and never negative: http://joschu.net/blog/kl-approx.html
        clipped = ((ratio - 1.0).abs() > clip).float()
        grad_norm = torch.stack([grad_norm for *_, grad_norm in steps])
        figures = (-surrogate, 0.5 * squared_error, entropy, kl, clipped, grad_norm)
        return torch.stack([x.mean() for x in figures])

    def _step(self, frames: Frames, lr: float, clip: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Do one gradient step; returns log-probabilities, entropies and values before it, and the gradient's norm."""
        log_prob, entropy = self.policy.log_prob_and_entropy(frames.observation, frames.action)
        value = self.critic(frames.observation)
        by_log_prob, by_value = self._loss_gradients(frames, log_prob.detach(), value.detach(), clip)
        # A number with these gradients: for gradients that it is given, autograd imports sympy, most of a second.
        linear = log_prob @ by_log_prob + value @ by_value
        if self.entropy_coef:
            linear = linear - self.entropy_coef * entropy.mean()
        grad_norm = self.optimizer.step(torch.autograd.grad(linear, self.parameters), lr)
        return log_prob.detach(), entropy.detach(), value.detach(), grad_norm

    def _loss_gradients(self, frames: Frames, log_prob: Tensor, value: Tensor, clip: float) -> tuple[Tensor, Tensor]:
        """Return the gradients of the loss by `log_prob` and by `value`, ``[n]`` each.

        With ``r = exp(log_prob - old)``, the clipped objective ``min(A r, A clamp(r, 1 - clip, 1 + clip))`` has the
        gradient ``A r`` until the ratio has left the range on the side that `A` asks for, and none beyond. Written out,
        it costs a few operations where autograd takes some forty.
        """
        ratio = (log_prob - frames.log_prob).exp_()
        beyond = torch.where(frames.advantage > 0.0, ratio > 1.0 + clip, ratio < 1.0 - clip)
        grad_log_prob = (frames.advantage * ratio).masked_fill_(beyond, 0.0).mul_(-1.0 / len(ratio))
        error = value - frames.target
        if self.value_clip is not None:  # the larger of both squares counts; the clipped one has no gradient
            moved = value - frames.value
            near = frames.value + moved.clamp(-self.value_clip, self.value_clip)
            # Inside the range both are the same, but for rounding, which must not decide.
            beyond = (moved.abs() > self.value_clip) & ((near - frames.target).abs() > error.abs())
            error = error.masked_fill(beyond, 0.0)
        return grad_log_prob, error * (self.value_coef / len(error))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed learner needs: both networks, Adam's moments, the position in the schedules."""
        return {
            "policy": self.policy.state_dict(),
            "critic": self.critic.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "frames": self.frames,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken; networks and hyperparameters must be the same."""
        self.policy.load_state_dict(state["policy"])
        self.critic.load_state_dict(state["critic"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.frames = state["frames"]


def _not_finite(batch: TensorDictBase) -> list[str]:
    """What of `batch` no learner could have learnt from; a successor counts where the episode goes on."""
    step = batch.get("next")
    successors = step.get("observation")[~step.get("terminated").squeeze(-1)]
    parts = {"observations": (batch.get("observation"), successors), "rewards": (step.get("reward"),)}
    return [name for name, tensors in parts.items() if not all(x.isfinite().all() for x in tensors)]
