"""Proximal policy optimisation: the learner of the training loop."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from learning.gae import gae
from learning.networks import Policy


class PPO:
    """Improves a policy and its critic on batches of their own experience (Schulman et al., https://arxiv.org/abs/1707.06347).

    Args:
        policy: improved in place; its acting copies elsewhere are somebody else's affair.
        critic: observations ``[*B, obs]`` to values ``[*B]``, in units of scaled reward.
        gamma: discount per step.
        gae_lambda: see :func:`learning.gae`.
        reward_scale: factor on rewards before anything is computed from them, so that returns are of the order of one.
        epochs: passes over each batch, at most.
        minibatch_size: frames per gradient step; the last one of a pass may be smaller.
        lr: learning rate of Adam, at the start.
        lr_final: learning rate once `anneal_frames` have been learnt from; in between it falls on a straight line.
        clip: the probability ratio counts between ``1 - clip`` and ``1 + clip``, at the start.
        clip_final: the same, once `anneal_frames` have been learnt from.
        anneal_frames: length of both schedules; after it the final values stay, so that a long run goes on learning.
        value_coef: weight of the value loss.
        value_clip: largest step of a value prediction that its loss rewards, in scaled reward; None: no limit.
        entropy_coef: weight of the entropy bonus.
        max_grad_norm: gradients are scaled down to this norm, all parameters together.
        target_kl: no further pass over a batch once the policy has moved by this much, in nats; None: never stop early.
        normalize_advantage: give a batch's advantages mean 0 and standard deviation 1.
        adam_eps: Adam's epsilon.

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
        """Make a learner; see the class for the arguments."""
        self.policy, self.critic = policy, critic
        self.gamma, self.gae_lambda, self.reward_scale = gamma, gae_lambda, reward_scale
        self.epochs, self.minibatch_size = epochs, minibatch_size
        self.lr, self.lr_final = lr, lr if lr_final is None else lr_final
        self.clip, self.clip_final = clip, clip if clip_final is None else clip_final
        self.anneal_frames = anneal_frames
        self.value_coef, self.value_clip, self.entropy_coef = value_coef, value_clip, entropy_coef
        self.max_grad_norm, self.target_kl = max_grad_norm, target_kl
        self.normalize_advantage = normalize_advantage
        self.frames = 0
        self.parameters = [*policy.parameters(), *critic.parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, lr=lr, eps=adam_eps, fused=True)

    def update(self, batch: TensorDictBase) -> dict[str, float]:
        """Learn from one batch ``[*B, T]`` as a collector yields it (time last); returns means over the gradient steps.

        Keys: ``loss_policy``, ``loss_value``, ``entropy`` and ``kl`` (nats), ``clip_fraction``, ``grad_norm``,
        ``explained_variance``, ``value`` (scaled reward), ``epochs`` (passes done), ``lr``, ``clip``.
        """
        lr, clip = self._anneal()
        frames, summary = self._prepare(batch)
        stats: list[Tensor] = []
        epochs = 0
        while epochs < self.epochs:
            epochs += 1
            order = torch.randperm(batch.numel())
            shuffled = [x[order].split(self.minibatch_size) for x in frames]
            steps = [self._step(*minibatch, clip=clip) for minibatch in zip(*shuffled, strict=True)]
            stats += steps
            if self.target_kl is not None and torch.stack(steps)[:, KL].mean().item() > self.target_kl:
                break
        self.frames += batch.numel()
        means = torch.stack(stats).mean(0).tolist()
        return dict(zip(STATS, means, strict=True)) | summary | {"epochs": float(epochs), "lr": lr, "clip": clip}

    def _anneal(self) -> tuple[float, float]:
        left = max(0.0, 1.0 - self.frames / self.anneal_frames)
        lr = self.lr_final + left * (self.lr - self.lr_final)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr, self.clip_final + left * (self.clip - self.clip_final)

    @torch.no_grad()
    def _prepare(self, batch: TensorDictBase) -> tuple[list[Tensor], dict[str, float]]:
        """Return what a gradient step needs of every frame, flat: `_step`'s arguments, in its order."""
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
        explained = 1.0 - advantage.var() / target.var().clamp_min(1e-8)
        summary = {"explained_variance": explained.item(), "value": value.mean().item()}
        if self.normalize_advantage:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        dims = batch.ndim - 1
        tensors = [observation, batch.get("action"), batch.get("action_log_prob"), advantage, target, value]
        return [x.flatten(0, dims) for x in tensors], summary

    def _step(
        self,
        observation: Tensor,
        action: Tensor,
        old_log_prob: Tensor,
        advantage: Tensor,
        target: Tensor,
        old_value: Tensor,
        *,
        clip: float,
    ) -> Tensor:
        """Do one gradient step on one minibatch, ``[n]`` each; returns the figures named by `STATS`."""
        log_prob, entropy = self.policy.log_prob_and_entropy(observation, action)
        log_ratio = log_prob - old_log_prob
        ratio = log_ratio.exp()
        loss_policy = -torch.min(advantage * ratio, advantage * ratio.clamp(1.0 - clip, 1.0 + clip)).mean()
        loss_value = self._value_loss(self.critic(observation), target, old_value)
        mean_entropy = entropy.mean()
        loss = loss_policy + self.value_coef * loss_value - self.entropy_coef * mean_entropy

        self.optimizer.zero_grad()
        loss.backward()
        grad_norm = nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm, foreach=True)
        self.optimizer.step()

        with torch.no_grad():
            kl = (ratio - 1.0 - log_ratio).mean()  # the low-variance estimate, http://joschu.net/blog/kl-approx.html
            clipped = ((ratio - 1.0).abs() > clip).float().mean()
            return torch.stack([loss_policy, loss_value, mean_entropy, kl, clipped, grad_norm])

    def _value_loss(self, value: Tensor, target: Tensor, old_value: Tensor) -> Tensor:
        loss = (value - target).square()
        if self.value_clip is not None:
            near = old_value + (value - old_value).clamp(-self.value_clip, self.value_clip)
            loss = torch.max(loss, (near - target).square())
        return 0.5 * loss.mean()

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


STATS = ("loss_policy", "loss_value", "entropy", "kl", "clip_fraction", "grad_norm")
KL = STATS.index("kl")
