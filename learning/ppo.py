"""Proximal policy optimisation: the learner of the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn  # noqa: F401  (nn: wsync.config reads the types of the arguments here)
from torch.distributions import Distribution

from learning.actor_critic import ActorCritic, as_sequences, each, explained_variance, kl_divergence
from learning.advantages import gae, successor_values
from learning.networks import Policy, evaluate
from learning.recurrent import STATE, RecurrentCritic, RecurrentPolicy

STATS = ("loss_policy", "loss_value", "entropy", "grad_norm", "kl", "clip_fraction")


class Frames(NamedTuple):
    """Frames to learn from, ``[n, ...]`` each; those of a recurrent policy are sequences ``[R, T, ...]``."""

    observation: Any
    action: Tensor
    log_prob: Tensor  # of the policy that acted; with a decoupled objective, of the policy before the update
    advantage: Tensor
    target: Tensor
    value: Tensor  # from before the update
    state: Tensor | None = None  # of a recurrent policy; so are `is_init` and `mask`
    is_init: Tensor | None = None  # where an episode starts
    weight: Tensor | None = None  # decoupled: the action's probability before the update over that when it acted
    mask: Tensor | None = None  # where there is a frame


@dataclass(eq=False, repr=False, kw_only=True)
class PPO(ActorCritic):
    """Improves a policy and its critic on batches of their own experience (Schulman et al., https://arxiv.org/abs/1707.06347).

    The other arguments are those of `ActorCritic`.

    Args:
        gae_lambda: see :func:`learning.gae`.
        clip: at the start; a frame gives nothing more for a probability ratio beyond ``1 ± clip`` in the direction that
            its advantage favours.
        clip_final: the same, at the end of the schedule.
        normalize_advantage: give a minibatch's advantages mean 0 and standard deviation 1.
        decoupled: clip the ratio to the policy before the update instead of the ratio to the policy that acted, and
            multiply each frame's objective by π_before(a|s) / π_acted(a|s) (Hilton et al. 2022,
            https://arxiv.org/abs/2110.00641). The two policies differ if the workers' weights are some versions old, or
            rounded to another dtype; in the first batch if observations are normalised; and for random first frames.
        max_weight: the largest of these weights.
    """

    gae_lambda: float = 0.95
    clip: float = 0.2
    clip_final: float | None = None
    normalize_advantage: bool = True
    decoupled: bool = True
    max_weight: float = 2.0

    def update(self, batch: TensorDictBase) -> dict[str, float]:
        """Learn from a batch; return means over the gradient steps.

        Keys: ``loss_policy``, ``loss_value``, ``entropy`` and ``kl`` (nats), ``clip_fraction``, ``grad_norm``,
        ``explained_variance``, ``value`` (scaled reward), ``epochs``, ``lr``, ``clip``; with ``decoupled`` also
        ``kl_acted``, from the policy that acted to the one before the update (nats).
        """
        lr, epochs = self._begin_update(batch)
        clip = self._scheduled(self.clip, self.clip_final)
        frames, summary = self._prepare(batch)
        steps = self._descend(self._loss, frames, frames.value.shape, lr, epochs, clip)
        means, log_ratio = torch.stack([one for one, _ in steps]).mean(0), torch.cat([one for _, one in steps])
        clip_fraction = ((log_ratio.exp() - 1.0).abs() > clip).float().mean()
        values = torch.cat([means, torch.stack([kl_divergence(log_ratio), clip_fraction])])
        stats = dict(zip(STATS, values.tolist(), strict=True)) | summary
        self._check_diverged(stats)
        return stats | {"epochs": float(epochs), "lr": lr, "clip": clip}

    @torch.no_grad()
    def _prepare(self, batch: TensorDictBase) -> tuple[Frames, dict[str, float]]:
        """Return the frames of a batch with advantages and targets, and statistics of the values before the update."""
        step, mask = batch.get("next"), batch.get("mask", None)
        value, log_prob, weight, summary = self._before(batch)
        done = step.get("done").squeeze(-1)
        inputs = step.select("observation", STATE, strict=False)
        reward, terminated = self.reward_scale * step.get("reward").squeeze(-1), step.get("terminated").squeeze(-1)
        following = successor_values(value, done, lambda ends: self._value(inputs[ends]))
        advantage = gae(reward, value, following, terminated, done, gamma=self.gamma, lmbda=self.gae_lambda)
        columns = (batch.get("observation"), batch.get("action"), log_prob, advantage, advantage + value, value)
        state = batch.get(STATE, None)
        if state is None:
            rows = Frames(*columns, weight=weight)
            frames = each(rows, lambda x: x.flatten(0, batch.ndim - 1) if mask is None else x[mask])
        else:
            valid = torch.ones_like(advantage, dtype=torch.bool) if mask is None else mask
            sequences = Frames(*columns, state, batch.get("is_init").squeeze(-1), weight, mask=valid)
            present = valid.reshape(-1, valid.shape[-1]).any(-1)  # a minibatch without a frame would have no mean
            frames = each(sequences, lambda x: as_sequences(x, batch.ndim)[present])
        flat = _flat(frames)
        explained = explained_variance(flat.advantage.var(correction=0), flat.target)
        self.frames += len(flat.value)
        return frames, summary | {"explained_variance": explained.item(), "value": flat.value.mean().item()}

    def _before(self, batch: TensorDictBase) -> tuple[Tensor, Tensor, Tensor | None, dict[str, float]]:
        """Return the values, `Frames.log_prob` and `Frames.weight`, ``[*B, T]`` each; and ``kl_acted`` to report."""
        acted = batch.get("action_log_prob")
        if not self.decoupled:
            return self._value(batch), acted, None, {}
        observation, action, mask = batch.get("observation"), batch.get("action"), batch.get("mask", None)
        if isinstance(self.policy, RecurrentPolicy):
            sequences = (batch.get(key) for key in ("observation", STATE, "is_init", "action"))
            observation, state, is_init, action = (as_sequences(x, batch.ndim) for x in sequences)
            parameters, _ = self.policy.sequence(observation, state, is_init.squeeze(-1))
            log_prob = self.policy.actions.from_parameters(parameters).log_prob(action).reshape(acted.shape)
            value = self._value(batch)
        else:
            distribution, value = evaluate(self.policy, self.critic, observation)
            log_prob = distribution.log_prob(action)
        log_ratio = log_prob - acted
        kl = kl_divergence(log_ratio if mask is None else log_ratio[mask])
        return value, log_prob, log_ratio.exp().clamp(max=self.max_weight), {"kl_acted": kl.item()}

    def _value(self, step: TensorDictBase) -> Tensor:
        """Return the values of the observations of `step`; those of a recurrent critic depend on the state as well."""
        keys = ("observation", STATE) if isinstance(self.policy, RecurrentPolicy) else ("observation",)
        return self.critic(*(step.get(key) for key in keys))

    def _evaluate(self, frames: Frames) -> tuple[Distribution, Tensor, Frames]:
        """Return the distributions of actions, the values and the frames, ``[n, ...]`` each."""
        if frames.state is None or frames.is_init is None:
            assert isinstance(self.policy, Policy)
            return *evaluate(self.policy, self.critic, frames.observation), frames
        assert isinstance(self.policy, RecurrentPolicy) and isinstance(self.critic, RecurrentCritic)
        parameters, features = self.policy.sequence(frames.observation, frames.state, frames.is_init)
        value, mask = self.critic.of_features(features), frames.mask
        return self.policy.actions.from_parameters(parameters[mask]), value[mask], _flat(frames)

    def _loss(self, minibatch: Frames, clip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss, the first three of `STATS`, and the log-ratios of the probabilities."""
        distribution, value, frames = self._evaluate(minibatch)
        log_ratio = distribution.log_prob(frames.action) - frames.log_prob
        ratio, advantage = log_ratio.exp(), frames.advantage
        if self.normalize_advantage and len(advantage) > 1:
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        objective = torch.min(advantage * ratio, advantage * ratio.clamp(1.0 - clip, 1.0 + clip))
        loss_policy = -(objective if frames.weight is None else frames.weight * objective).mean()
        loss_value = 0.5 * (value - frames.target).square().mean()
        with torch.set_grad_enabled(self.entropy_coef != 0.0):
            entropy = distribution.entropy().mean()
        loss = loss_policy + self.value_coef * loss_value - self.entropy_coef * entropy
        return loss, torch.stack([loss_policy, loss_value, entropy]).detach(), log_ratio.detach()


def _flat(frames: Frames) -> Frames:
    """Return sequences as frames ``[n, ...]``; frames are returned as they are."""
    mask, rest = frames.mask, frames._replace(observation=None, state=None, is_init=None, mask=None)
    return frames if mask is None else each(rest, lambda x: x[mask])
