"""Advantages against their definitions: GAE, and V-trace."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learning import gae, vtrace


def experience(*shape: int, seed: int, p_end: float = 0.3) -> tuple[Tensor, ...]:
    """What ``vtrace`` takes; ``gae`` takes all but the first, the log-ratio of the policies."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4))
    terminated, truncated = (torch.rand(shape, generator=generator) < p_end / 2 for _ in range(2))
    return *drawn, terminated, terminated | truncated


def gae_of_one(
    reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor, gamma: float, lmbda: float
) -> Tensor:
    """One trajectory [T], from the definition: a sum of discounted one-step errors, up to the episode's end."""
    advantage = torch.zeros_like(reward)
    for start in range(len(reward)):
        weight = 1.0
        for t in range(start, len(reward)):
            future = 0.0 if terminated[t] else gamma * next_value[t]
            advantage[start] += weight * (reward[t] + future - value[t])
            if done[t]:
                break
            weight *= gamma * lmbda
    return advantage


@settings(max_examples=60, deadline=None)
@given(
    leading=st.lists(st.integers(1, 3), max_size=2),
    length=st.integers(1, 12),
    gamma=st.floats(0.0, 1.0),
    lmbda=st.floats(0.0, 1.0),
    p_end=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_gae_equals_the_definition_on_every_trajectory(
    leading: list[int], length: int, gamma: float, lmbda: float, p_end: float, seed: int
) -> None:
    _, *tensors = experience(*leading, length, seed=seed, p_end=p_end)
    advantage = gae(*tensors, gamma=gamma, lmbda=lmbda)
    assert advantage.shape == (*leading, length)
    rows = zip(*(x.reshape(-1, length) for x in tensors), strict=True)
    expected = torch.stack([gae_of_one(r, v, n, t, d, gamma, lmbda) for r, v, n, t, d in rows]).view_as(advantage)
    torch.testing.assert_close(advantage, expected)


def test_a_slice_is_as_good_as_a_copy() -> None:
    _, *tensors = experience(4, 3, 6, seed=0)
    reward, value, next_value, terminated, done = (x.transpose(0, 1) for x in tensors)
    transposed = gae(reward, value, next_value, terminated, done, gamma=0.9, lmbda=0.9)
    torch.testing.assert_close(transposed.transpose(0, 1), gae(*tensors, gamma=0.9, lmbda=0.9))


def vtrace_of_one(
    log_ratio: Tensor, reward: Tensor, value: Tensor, next_value: Tensor, terminated: Tensor, done: Tensor,
    gamma: float, lmbda: float, clip_rho: float, clip_c: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One trajectory [T] by the sum and the product in equation 1 of the paper."""
    ratio, length = log_ratio.exp(), len(reward)
    rho, c = ratio.clamp(max=clip_rho), lmbda * ratio.clamp(max=clip_c)
    future = torch.where(terminated, 0.0, next_value)
    target, advantage = value.clone(), torch.zeros_like(value)
    for s in range(length):
        for t in range(s, length):
            product = math.prod(c[i].item() for i in range(s, t))
            target[s] += gamma ** (t - s) * product * rho[t] * (reward[t] + gamma * future[t] - value[t])
            if done[t]:
                break
    for s in range(length):
        following = future[s] if done[s] or s == length - 1 else target[s + 1]
        advantage[s] = rho[s] * (reward[s] + gamma * following - value[s])
    return target, advantage


@settings(max_examples=60, deadline=None)
@given(
    leading=st.lists(st.integers(1, 3), max_size=2),
    length=st.integers(1, 10),
    gamma=st.floats(0.0, 1.0),
    lmbda=st.floats(0.0, 1.0),
    clips=st.sampled_from([(1.0, 1.0), (2.0, 0.5), (math.inf, 1.0), (0.1, 0.0)]),
    p_end=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_vtrace_equals_the_papers_definition_on_every_trajectory(
    leading: list[int], length: int, gamma: float, lmbda: float, clips: tuple[float, float], p_end: float, seed: int
) -> None:
    tensors = experience(*leading, length, seed=seed, p_end=p_end)
    options: dict[str, Any] = {"gamma": gamma, "lmbda": lmbda, "clip_rho": clips[0], "clip_c": clips[1]}
    found = vtrace(*tensors, **options)
    rows = [vtrace_of_one(*row, **options) for row in zip(*(x.reshape(-1, length) for x in tensors), strict=True)]
    for one, expected in zip(found, zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(one, torch.stack(expected).view_as(one))


def test_an_action_that_the_policy_never_takes_changes_nothing_before_it() -> None:
    log_ratio, reward, value, *rest = experience(4, 6, seed=0, p_end=0.0)
    log_ratio[:, 3] = -math.inf
    first = vtrace(log_ratio, reward, value, *rest, gamma=0.9)
    reward[:, 3:] += 100.0
    second = vtrace(log_ratio, reward, value, *rest, gamma=0.9)
    assert torch.equal(first.target[:, :4], second.target[:, :4])
    assert torch.equal(first.target[:, 3], value[:, 3]) and (first.advantage[:, 3] == 0).all()
    assert not torch.allclose(first.target[:, 4:], second.target[:, 4:])


@pytest.mark.parametrize("unknown", [math.nan, math.inf, -math.inf])
def test_where_an_episode_has_no_future_its_value_does_not_matter(unknown: float) -> None:
    log_ratio, *rest = experience(4, 10, seed=0)

    def found() -> Tensor:
        return torch.stack([gae(*rest, gamma=0.9, lmbda=0.9), *vtrace(log_ratio, *rest, gamma=0.9)])

    expected, terminated = found(), rest[3]
    rest[2][terminated] = unknown
    assert torch.equal(found(), expected)


def test_the_targets_are_constants_for_the_gradient() -> None:
    tensors = [x.requires_grad_() if x.is_floating_point() else x for x in experience(2, 5, seed=0)]
    assert not any(x.requires_grad for x in vtrace(*tensors, gamma=0.9))
