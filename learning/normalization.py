"""Normalisation of observations and rewards: one set of statistics over all environments and workers.

The trainer updates the statistics from its batches. Those of observations are buffers of the policy, and travel with
its weights; those of rewards are used by the trainer alone.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from collectors.environments.specs import Spec, SpecTree
from learning.advantages import discounted_sum
from learning.encoders import Observation, leaves

CLIP = 10.0  # normalised values are clipped to ± this, as in Stable-Baselines3's VecNormalize and in CleanRL


class Moments(nn.Module):
    """Running mean and variance of rows ``[n, *shape]`` (Chan et al., 1979), as buffers."""

    mean: Tensor
    var: Tensor
    scale: Tensor  # one over the standard deviation; kept, because what acts needs it at each step
    count: Tensor

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float32))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float32))
        self.register_buffer("scale", torch.ones(shape, dtype=torch.float32))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        rows, before, n = rows.double(), self.count.item(), len(rows)
        if n == 0:
            return
        difference, share = rows.mean(0) - self.mean, n / (before + n)
        squares = self.var.double() * (1 - share) + rows.var(0, correction=0) * share
        self.var.copy_(squares + difference.square() * share * (1 - share))
        self.mean.add_(difference * share)
        self.scale.copy_((self.var + 1e-8).rsqrt())
        self.count.add_(n)


class ObservationNormalizer(nn.Module):
    """Observations with mean 0 and standard deviation 1, clipped; before the first update, they are only clipped.

    Images, action masks, and every part with the bounds 0 and 1 (one-hot, binary, rescaled) are left.
    """

    def __init__(self, spec: SpecTree) -> None:
        super().__init__()
        measured = {path: leaf.shape for path, leaf in leaves(spec) if _is_measured(leaf)}
        self.paths = list(measured)
        self.moments: Any = nn.ModuleList(Moments(*shape) for shape in measured.values())

    def forward(self, observation: Observation) -> Observation:
        if not isinstance(observation, TensorDictBase):
            return normalized(observation, self.moments[0].mean, self.moments[0].scale) if self.paths else observation
        result = observation.copy()
        for path, moments in zip(self.paths, self.moments, strict=True):
            result.set(path, normalized(observation.get(path), moments.mean, moments.scale))
        return result

    def update(self, observation: Observation, mask: Tensor | None = None) -> None:
        """Take observations ``[*B]`` into account; only those at which `mask` ``[*B]`` is true, if it is given."""
        for path, moments in zip(self.paths, self.moments, strict=True):
            part = observation.get(path) if isinstance(observation, TensorDictBase) else observation
            moments.update(part.reshape(-1, *moments.mean.shape) if mask is None else part[mask])

    @property
    def is_new(self) -> bool:
        """Whether there was no update yet."""
        return any(moments.count.item() == 0 for moments in self.moments)


def normalized(part: Any, mean: Any, scale: Any) -> Any:
    """Return `part`, a tensor or an array, with the mean and the scale of its `Moments` taken out, clipped."""
    return ((part - mean) * scale).clip(-CLIP, CLIP)


def _is_measured(spec: Spec) -> bool:
    """Whether `spec` is that of a quantity; one-hot and binary vectors are not."""
    if not spec.dtype.is_floating_point:
        return False
    return spec.low is None or spec.high is None or not (bool((spec.low == 0).all()) and bool((spec.high == 1).all()))


class RewardNormalizer(nn.Module):
    """What the learner gets as rewards: ``raw``, ``normalized`` or ``sign``.

    ``normalized``: divided by the standard deviation of the discounted sum of rewards so far, and clipped, as in
    Stable-Baselines3's VecNormalize, with `gamma` as the discount per step. The sums continue from batch to batch, row
    for row, also over missing frames and where another worker's batch follows. They start at 0 again where the number
    of rows changes, and after a resume.
    """

    def __init__(self, how: str = "raw", gamma: float = 0.99) -> None:
        super().__init__()
        self.how, self.gamma = how, gamma
        self.moments = Moments()
        self._sums = torch.zeros(0)  # what each row adds to its next reward

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """Return `batch` ``[*B, T]`` with the learner's rewards; the given one is unchanged."""
        if self.how == "raw":
            return batch
        step = batch.get("next").copy()
        reward = step.get("reward")
        if self.how == "sign":
            step.set("reward", reward.sign())
        else:
            self._update(reward.squeeze(-1), step.get("done").squeeze(-1), batch.get("mask", None))
            step.set("reward", (reward * self.moments.scale).clamp(-CLIP, CLIP))
        return batch.copy().set("next", step)

    def _update(self, reward: Tensor, done: Tensor, mask: Tensor | None) -> None:
        rewards, decay = reward.double(), done.logical_not().double() * self.gamma
        rewards, decay = (x.cpu().reshape(-1, x.shape[-1]) for x in (rewards, decay))
        if len(self._sums) != len(rewards):
            self._sums = torch.zeros(len(rewards))
        backwards = rewards.flip(-1)
        backwards[:, -1] += self._sums
        sums = discounted_sum(backwards, decay.roll(1, -1).flip(-1)).flip(-1)  # decays of the step before
        self._sums = sums[:, -1] * decay[:, -1]
        self.moments.update(sums.flatten() if mask is None else sums.flatten()[mask.flatten().cpu()])
