"""Counters, returns in the order of time, staleness."""

import pytest
import torch
from tensordict import TensorDict

from collectors.staleness import Staleness
from learning.progress import WINDOW, Progress


def batch(returns: torch.Tensor, version: int | torch.Tensor = 1) -> TensorDict:
    """A batch of `returns` ``[*B, T]``, in which a frame ends an episode where its return is not nan."""
    size = returns.shape
    done = ~returns.isnan()
    step = {"done": done[..., None], "episode_return": returns.nan_to_num()[..., None]}
    version = torch.as_tensor(version).expand(size)
    return TensorDict({"policy_version": version, "next": TensorDict(step, size)}, size)


NAN = float("nan")


def test_returns_come_in_the_order_of_time_whatever_the_batch_looks_like() -> None:
    returns = torch.tensor([[NAN, 2.0, NAN, 5.0], [1.0, NAN, 4.0, NAN]])
    for shaped in (returns, returns.view(2, 1, 4), returns.view(1, 2, 4)):
        progress = Progress()
        progress.collected(batch(shaped), 1)
        assert list(progress.window) == [1.0, 2.0, 4.0, 5.0]
        assert (progress.episodes, progress.frames) == (4, 8)


def test_solved_takes_a_hundred_episodes() -> None:
    progress = Progress()
    progress.collected(batch(torch.full((WINDOW - 1,), 500.0)), 1)
    assert not progress.solved(475)
    progress.collected(batch(torch.tensor([500.0])), 1)
    assert progress.solved(475)
    assert not progress.solved(501)
    assert not progress.solved(None)


def test_staleness_is_the_mean_over_frames_in_which_a_policy_acted() -> None:
    progress = Progress()
    progress.collected(batch(torch.full((4,), NAN), torch.tensor([-1, 1, 2, 3])), 3)
    assert progress.staleness_mean == pytest.approx(1.0)
    progress.collected(batch(torch.full((3,), NAN), 3), 3)
    assert progress.staleness_mean == pytest.approx(0.5)
    assert progress.staleness_max == 2  # 1 when version 3 was the newest; a random action is of no version


def test_counters_survive_a_checkpoint() -> None:
    progress = Progress()
    progress.begin()
    progress.collected(batch(torch.arange(150.0), 2), 5, Staleness(dropped_batches=2, dropped_frames=32))
    again = Progress()
    again.load_state_dict(progress.state_dict())
    again.collected(batch(torch.full((1,), NAN), 5), 5, Staleness(dropped_batches=1, dropped_frames=16))
    assert (again.staleness_max, again.dropped_batches, again.dropped_frames) == (3, 3, 48)
    again = Progress()
    again.load_state_dict(progress.state_dict())
    assert (again.frames, again.episodes, list(again.window)) == (150, 150, list(progress.window))
    assert again.staleness_mean == 3.0
    assert again.first_mean == progress.first_mean
    assert 0 < again.seconds <= progress.seconds
    assert again.frames_per_second == pytest.approx(150 / again.seconds)  # of the whole run
    assert again.resumes == 1
