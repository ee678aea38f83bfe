"""IMPALA: an actor-critic for experience that is several versions of the policy old."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn  # noqa: F401  (nn: wsync.config reads the types of the arguments here)

from learning.actor_critic import ActorCritic, as_sequences, each, explained_variance, kl_divergence
from learning.advantages import successor_values, vtrace
from learning.networks import Policy, evaluate
from learning.recurrent import RecurrentPolicy

STATS = ("loss_policy", "loss_value", "entropy", "kl", "clip_fraction", "explained_variance", "value", "grad_norm")


class Trajectories(NamedTuple):
    """Pieces of trajectories to learn from, ``[n, T, ...]`` each; `log_prob` is that of the policy that acted."""

    observation: Tensor
    next_observation: Tensor
    action: Tensor
    log_prob: Tensor
    reward: Tensor
    terminated: Tensor
    done: Tensor
    mask: Tensor


@dataclass(eq=False, repr=False, kw_only=True)
class IMPALA(ActorCritic):
    """Improves a policy and its critic on experience of earlier versions of it, corrected by V-trace.

    Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, section 4. The ratio between the policy and the one that
    acted is computed anew for each gradient step, so a batch may be passed over several times. The optimizer is Adam,
    as in RLlib's IMPALA; the paper's is RMSProp. Losses are means over frames; the paper's are sums.

    The other arguments are those of `ActorCritic`.

    Args:
        vtrace_lambda: the weight of longer estimates, see :func:`learning.vtrace`.
        clip_rho: limit of the importance ratio in the values and in the policy gradient.
        clip_c: limit of the importance ratios that carry errors back in time.
    """

    vtrace_lambda: float = 1.0
    clip_rho: float = 1.0
    clip_c: float = 1.0
    epochs: int = 1
    minibatch_size: int = 512
    lr: float = 5e-4
    entropy_coef: float = 0.01
    max_grad_norm: float = 40.0

    def __post_init__(self) -> None:
        if isinstance(self.policy, RecurrentPolicy):
            raise ValueError("IMPALA learns policies without a state; a recurrent one needs algorithm=ppo")
        super().__post_init__()

    def update(self, batch: TensorDictBase) -> dict[str, float]:
        """Learn from a batch; return means over the gradient steps.

        Keys: ``loss_policy``, ``loss_value``, ``entropy`` and ``kl`` (nats, from the policy that acted),
        ``clip_fraction`` (of ratios above ``clip_rho``), ``grad_norm``, ``explained_variance``, ``value`` (scaled
        reward), ``epochs``, ``lr``.
        """
        lr, epochs = self._begin_update(batch)
        x = self._prepare(batch)
        steps = self._descend(self._loss, x, x.mask.shape, lr, epochs)
        self.frames += int(x.mask.sum())
        means = torch.stack([one for (one,) in steps]).mean(0)
        stats: dict[str, float] = dict(zip(STATS, means.tolist(), strict=True))
        self._check_diverged(stats)
        return stats | {"epochs": float(epochs), "lr": lr}

    def _prepare(self, batch: TensorDictBase) -> Trajectories:
        """Return the trajectories of a batch, in one dimension; without those in which there is no frame."""
        step, mask = batch.get("next"), batch.get("mask", None)
        if mask is None:
            mask = torch.ones(batch.batch_size, dtype=torch.bool, device=batch.device)
        reward, terminated, done = (step.get(key).squeeze(-1) for key in ("reward", "terminated", "done"))
        acted = (batch.get("action"), batch.get("action_log_prob"), self.reward_scale * reward)
        columns = (batch.get("observation"), step.get("observation"), *acted, terminated, done, mask)
        flat = Trajectories(*(as_sequences(x, batch.ndim) for x in columns))
        return each(flat, lambda x: x[flat.mask.any(-1)])

    def _loss(self, x: Trajectories) -> tuple[Tensor, Tensor]:
        """Return the loss, and the first seven of `STATS`."""
        assert isinstance(self.policy, Policy)
        distribution, value = evaluate(self.policy, self.critic, x.observation)
        log_prob = distribution.log_prob(x.action)
        with torch.no_grad():
            log_ratio = log_prob - x.log_prob
            next_value = successor_values(value, x.done, lambda ends: self.critic(x.next_observation[ends]))
        target, advantage = vtrace(
            log_ratio, x.reward, value, next_value, x.terminated, x.done,
            gamma=self.gamma, lmbda=self.vtrace_lambda, clip_rho=self.clip_rho, clip_c=self.clip_c,
        )  # fmt: skip
        loss_policy = -(advantage * log_prob)[x.mask].mean()
        loss_value = 0.5 * (value - target)[x.mask].square().mean()
        entropy = distribution.entropy()[x.mask].mean()
        loss = loss_policy + self.value_coef * loss_value - self.entropy_coef * entropy
        with torch.no_grad():
            log_ratio, target, value = log_ratio[x.mask], target[x.mask], value[x.mask]
            kl, clip_fraction = kl_divergence(log_ratio), (log_ratio.exp() > self.clip_rho).float().mean()
            explained = explained_variance((value - target).var(correction=0), target)
            return loss, torch.stack([loss_policy, loss_value, entropy, kl, clip_fraction, explained, value.mean()])
