"""Counters, returns in the order of time, staleness."""

import pytest
import torch
from tensordict import TensorDict

from collectors.batches import Staleness
from collectors.workers.records import Failures
from learning.progress import WINDOW, Progress
from learning.summary import summarise
from wsync import SyncMetrics, SyncReport
from wsync.update import PHASES


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


def test_solved_is_to_have_been_reached_once_and_a_resumed_run_keeps_that() -> None:
    progress = Progress()
    progress.collected(batch(torch.full((WINDOW,), 0.86)), 1)
    progress.solved_after = progress.frames
    again = Progress()
    again.load_state_dict(progress.state_dict())
    again.collected(batch(torch.full((WINDOW,), 0.8)), 1)
    for status in ("failed", "finished", "interrupted"):
        told = summarise(status, again, 0.85, SyncMetrics(""), Failures(), Staleness())
        assert (told["solved"], told["solved_after_frames"]) == (True, 100)
        assert told["verdict"].startswith(f"{status.capitalize()} after 200 frames in ")
        assert "mean return 0.800 over the last 100 episodes; 0.85 counts as solved, first" in told["verdict"]


def test_masked_frames_do_not_count() -> None:
    progress = Progress()
    one = batch(torch.tensor([[NAN, 2.0, NAN]]), torch.tensor([[1, 1, 0]]))
    progress.collected(one.set("mask", torch.tensor([[True, True, False]])), 1)
    assert (progress.frames, progress.acted_frames, progress.versions_behind) == (2, 2, 0.0)


def test_staleness_is_the_mean_over_frames_in_which_a_policy_acted() -> None:
    progress = Progress()
    progress.collected(batch(torch.full((4,), NAN), torch.tensor([-1, 1, 2, 3])), 3)
    assert progress.versions_behind / progress.acted_frames == pytest.approx(1.0)
    progress.collected(batch(torch.full((3,), NAN), 3), 3)
    assert progress.versions_behind / progress.acted_frames == pytest.approx(0.5)
    assert progress.staleness_max == 2  # 1 when version 3 was the newest; a random action is of no version


def report(version: int) -> SyncReport:
    return SyncReport(version, 1000, version * 1e-3, (0.0, 1e-4, 0.0, 0.0, 0.0), {0: version})


def test_a_row_has_the_cost_of_its_own_update() -> None:
    progress, metrics = Progress(), SyncMetrics("shared_mem")
    progress.begin()
    progress.collected(batch(torch.tensor([3.0])), 1)
    metrics.record(report(1))
    row = progress.synchronised({"loss": 0.5}, metrics, 1)
    assert row.weight_sync is not None
    assert (row.weight_sync.latency_us, row.weight_sync.bytes) == (pytest.approx(1000), 1000)
    phases = {**dict.fromkeys(PHASES, 0.0), "pack": 100.0, "acknowledge": 900.0}
    assert row.weight_sync.phases_us == pytest.approx(phases)
    assert progress.synchronised({}, metrics, 1).weight_sync is None  # nothing new was reported
    metrics.record(report(3))
    after = progress.synchronised({}, metrics, 3).weight_sync
    assert after is not None
    assert (after.p50_us, after.p95_us) == (pytest.approx(1000), pytest.approx(3000))


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
    assert again.versions_behind / again.acted_frames == 3.0
    assert 0 < again.seconds <= progress.seconds
    assert again.frames_per_second == pytest.approx(150 / again.seconds)  # of the whole run
    assert again.resumes == 1


def test_the_verdict_on_a_control_names_the_version_that_acted() -> None:
    progress = Progress()
    for _ in range(3):
        progress.collected(batch(torch.full((WINDOW,), 20.0), 0), 0)
    summary = summarise("finished", progress, 475.0, SyncMetrics("none"), Failures(), Staleness())
    assert "Finished after 300 frames" in summary["verdict"]
    assert "475 counts as solved, and was not reached" in summary["verdict"]
    assert "Nothing reached the workers: version 0 acted in all frames" in summary["verdict"]
    assert "it did not learn" in summary["verdict"]
    assert summary["weight_sync"]["latency_us"] == {"p50": None, "p95": None, "p99": None, "max": None}
