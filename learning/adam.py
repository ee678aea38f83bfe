"""Adam for many small gradient steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class FlatAdam:
    """Adam (Kingma and Ba, algorithm 1, https://arxiv.org/abs/1412.6980), with the norm of the gradient limited first.

    It does what ``clip_grad_norm_`` and ``torch.optim.Adam`` do, but on one flat vector: for a dozen small tensors they
    spend most of their time on bookkeeping, per tensor and per call.

    Args:
        parameters: moved in place; of one dtype and on one device.
        betas: how much of the running means of the gradient and of its square stays, per step.
        eps: added to the denominator.
        max_grad_norm: gradients are scaled down to this norm, all of them together.

    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-5,
        max_grad_norm: float = math.inf,
    ) -> None:
        self.parameters = list(parameters)
        self.betas, self.eps, self.max_grad_norm = betas, eps, max_grad_norm
        self.steps = 0
        self.mean = torch.cat([torch.zeros_like(p).flatten() for p in self.parameters])
        self.square = torch.zeros_like(self.mean)
        self._move = torch.zeros_like(self.mean)
        parts = self._move.split([p.numel() for p in self.parameters])
        self._moves = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], lr: float) -> Tensor:
        """Move the parameters against `gradients`, one for each; returns the norm of all of them before the limit."""
        gradient = torch.cat([g.flatten() for g in gradients])
        norm = torch.linalg.vector_norm(gradient)
        gradient.mul_((self.max_grad_norm / (norm + 1e-6)).clamp_max(1.0))

        self.steps += 1
        beta1, beta2 = self.betas
        self.mean.lerp_(gradient, 1.0 - beta1)
        self.square.lerp_(gradient.square_(), 1.0 - beta2)
        spread = self.square.sqrt().div_(math.sqrt(1.0 - beta2**self.steps)).add_(self.eps)
        torch.div(self.mean, spread, out=self._move)
        step_size = lr / (1.0 - beta1**self.steps)
        for parameter, move in zip(self.parameters, self._moves, strict=True):
            parameter.sub_(move, alpha=step_size)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return copies of both running means, and the number of steps."""
        return {"mean": self.mean.clone(), "square": self.square.clone(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was taken, of as many parameters."""
        self.mean.copy_(state["mean"])
        self.square.copy_(state["square"])
        self.steps = state["steps"]
