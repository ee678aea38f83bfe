from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learning import gae


def reference(
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


def experience(*shape: int, seed: int, p_end: float = 0.3) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reward, value, next_value = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    terminated, truncated = (torch.rand(shape, generator=generator) < p_end / 2 for _ in range(2))
    return reward, value, next_value, terminated, terminated | truncated


@settings(max_examples=60, deadline=None)
@given(
    leading=st.lists(st.integers(1, 3), max_size=2),
    length=st.integers(1, 12),
    gamma=st.floats(0.0, 1.0),
    lmbda=st.floats(0.0, 1.0),
    p_end=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_equals_the_definition_on_every_trajectory(
    leading: list[int], length: int, gamma: float, lmbda: float, p_end: float, seed: int
) -> None:
    tensors = experience(*leading, length, seed=seed, p_end=p_end)
    advantage = gae(*tensors, gamma=gamma, lmbda=lmbda)
    assert advantage.shape == (*leading, length)
    rows = zip(*(x.reshape(-1, length) for x in tensors), strict=True)
    expected = torch.stack([reference(r, v, n, t, d, gamma, lmbda) for r, v, n, t, d in rows]).view_as(advantage)
    torch.testing.assert_close(advantage, expected)


@settings(max_examples=30, deadline=None)
@given(end=st.integers(0, 8), seed=st.integers(0, 2**31))
def test_nothing_behind_an_episodes_end_matters(end: int, seed: int) -> None:
    before, after = experience(10, seed=seed), experience(10, seed=seed + 1)
    joined = [torch.cat([x[: end + 1], y[end + 1 :]]) for x, y in zip(before, after, strict=True)]
    before[4][end] = joined[4][end] = True
    one, other = (gae(*tensors, gamma=0.99, lmbda=0.95) for tensors in (before, joined))
    torch.testing.assert_close(one[: end + 1], other[: end + 1])


def test_lambda_one_is_the_discounted_return_with_the_right_bootstrap() -> None:
    reward, value = torch.ones(3), torch.tensor([5.0, 6.0, 7.0])
    next_value = torch.tensor([6.0, 7.0, 100.0])
    no, last = torch.zeros(3, dtype=torch.bool), torch.tensor([False, False, True])
    bootstrapped = 1 + 0.5 * (1 + 0.5 * (1 + 0.5 * 100)) - 5
    cases = {
        "end of the batch": (no, no, bootstrapped),
        "truncated": (no, last, bootstrapped),
        "terminated": (last, last, -3.25),
    }
    for name, (terminated, done, expected) in cases.items():
        advantage = gae(reward, value, next_value, terminated, done, gamma=0.5, lmbda=1.0)
        assert advantage[0].item() == expected, name


@pytest.mark.parametrize("unknown", [math.nan, math.inf, -math.inf])
def test_where_an_episode_has_no_future_its_value_does_not_matter(unknown: float) -> None:
    reward, value, next_value, terminated, done = experience(4, 10, seed=0)
    expected = gae(reward, value, next_value, terminated, done, gamma=0.9, lmbda=0.9)
    next_value[terminated] = unknown
    assert torch.equal(gae(reward, value, next_value, terminated, done, gamma=0.9, lmbda=0.9), expected)


def test_a_slice_is_as_good_as_a_copy() -> None:
    tensors = experience(4, 3, 6, seed=0)
    reward, value, next_value, terminated, done = (x.transpose(0, 1) for x in tensors)
    transposed = gae(reward, value, next_value, terminated, done, gamma=0.9, lmbda=0.9)
    torch.testing.assert_close(transposed.transpose(0, 1), gae(*tensors, gamma=0.9, lmbda=0.9))
