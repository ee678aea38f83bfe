"""Advantages: of a policy from its own experience (GAE), and from the experience of another one (V-trace)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def gae(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, *, gamma: float, lmbda: float
) -> Tensor:
    """Estimate advantages by GAE(lambda), equation 16 of Schulman et al., https://arxiv.org/abs/1506.02438.

    With ``delta_t = r_t + gamma V(s'_t) - V(s_t)``, the advantage is ``A_t = delta_t + gamma lambda A_{t+1}``.
    The value ``V(s'_t)`` is zero where an episode is *terminated*. Where it is truncated by a time limit, or continues
    after the last column, ``V(s'_t)`` is that of the true successor. The sum stops where an episode is *done*, and at
    the last column.

    Args:
        reward: ``[*B, T]``, time last, as are all the others.
        value: ``[*B, T]``, the value ``V(s_t)`` of the observation acted on.
        next_value: ``[*B, T]``, the value ``V(s'_t)`` of the true successor: an episode's final observation, not the
            first of the next episode.
        terminated: bool ``[*B, T]``, the episode reached a terminal state.
        done: bool ``[*B, T]``, the episode ended, terminated or truncated.
        gamma: discount per step, in [0, 1].
        lmbda: the weight of longer estimates, in [0, 1]: 0 is the one-step error, 1 the whole discounted return.

    Returns:
        Advantages, ``[*B, T]``. Adding ``value`` gives the lambda returns, the critic's targets.
    """
    future = next_value.masked_fill(terminated, 0.0)  # a product would keep NaN
    delta = torch.add(reward - value, future, alpha=gamma)
    decay = done.logical_not().to(reward.dtype) * (gamma * lmbda)
    return discounted_sum(delta, decay)


def successor_values(value: Tensor, done: Tensor, ends: Callable[[Any], Tensor]) -> Tensor:
    """Return the value ``V(s'_t)`` of the true successor of each observation, as `gae` and `vtrace` need it.

    It is the value of the next column, which is there already, except where an episode is done and in the last column.

    Args:
        value: ``[*B, T]``, the value ``V(s_t)`` of the observation acted on, time last.
        done: bool ``[*B, T]``, the episode ended, terminated or truncated.
        ends: called once, with an index of ``n`` frames; returns the values of their successors, ``[n]``.
    """
    last = done.clone()
    last[..., -1] = True
    following = value.detach().roll(-1, -1)
    index = last.nonzero(as_tuple=True)  # of a TensorDict, a bool index would not compile
    following[index] = ends(index)
    return following


def discounted_sum(delta: Tensor, decay: Tensor) -> Tensor:
    """Return ``A_t = delta_t + decay_t A_{t+1}`` for each t, with ``A`` of zero after the last column.

    All are ``[*B, T]``, time last; `decay` is zero where the sum stops. Each round doubles how far sums reach.
    """
    total, factor, reach = delta.to(torch.float64, copy=True), decay.double(), 1  # double: large decays multiply
    while reach < total.shape[-1]:
        total[..., :-reach] += factor[..., : total.shape[-1] - reach] * total[..., reach:]
        factor = factor[..., :-reach] * factor[..., reach:]
        reach *= 2
    return total.to(delta.dtype)


@torch.no_grad()
def vtrace(
    log_ratio: Tensor, reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, *,
    gamma: float, lmbda: float = 1.0, clip_rho: float = 1.0, clip_c: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return V-trace targets and advantages, equation 1 of Espeholt et al. 2018, https://arxiv.org/abs/1802.01561.

    With ``rho_t = min(clip_rho, pi/mu)`` and ``c_t = lmbda min(clip_c, pi/mu)``, where ``pi/mu`` is the ratio of the
    probabilities of action ``a_t`` under the trained policy and under the one that acted, and
    ``delta_t = rho_t (r_t + gamma V(s'_t) - V(s_t))``, the target is
    ``v_t = V(s_t) + delta_t + gamma c_t (v_{t+1} - V(s_{t+1}))``. The advantage is
    ``rho_t (r_t + gamma v_{t+1} - V(s_t))``. For equal policies and no clip below 1, ``v_t - V(s_t)`` is that of `gae`.

    ``V(s'_t)`` is that of `gae`; where an episode is done, and in the last column, it is also used for ``v_{t+1}``. All
    tensors are ``[*B, T]``, time last: ``log_ratio`` is ``log pi(a_t | s_t) - log mu(a_t | s_t)``, and those with names
    that `gae` has are the same here. ``clip_rho`` decides which policy the values are of: infinite for the trained one,
    near 0 for the one that acted. A smaller ``clip_c`` carries less of later errors back, with less variance.
    """
    ratio = log_ratio.exp()
    rho = ratio.clamp_max(clip_rho)
    future = next_value.masked_fill(terminated, 0.0)  # a product would keep NaN
    delta = rho * (reward + gamma * future - value)
    decay = done.logical_not() * ratio.clamp_max(clip_c) * (gamma * lmbda)
    target = value + discounted_sum(delta, decay)
    following = torch.cat([target[..., 1:], future[..., -1:]], -1)
    advantage = rho * (reward + gamma * torch.where(done, future, following) - value)
    return target, advantage
