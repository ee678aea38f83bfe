"""Workers that die, stall, raise and come back, in collectors with worker processes: real kills, real processes."""

import logging
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from collecting import telling, update
from stepping import Quiet
from stopping import ends
from tensordict import TensorDictBase
from torch import nn

import wsync
from collectors import GymEnv, MultiAsyncCollector, MultiSyncCollector
from wsync.testing.contract import resources, shared_memory_files

KINDS = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}
every_kind = pytest.mark.parametrize("kind", KINDS)


class Still(Quiet):
    """Nothing happens, until a file says what: each line but the last is taken by one worker, once.

    ``raise`` raises, ``die`` kills its process, ``stop`` stops it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def step(self, action: Any) -> Any:
        what = take(self.folder)
        if what == "raise":
            raise ArithmeticError("the cart fell off the table")
        if what:
            os.kill(os.getpid(), {"die": signal.SIGKILL, "stop": signal.SIGSTOP}[what])
        return super().step(action)


def take(folder: Path) -> str:
    """What is to happen, if anything is: no other caller gets the same."""
    for name in os.listdir(folder):
        try:
            os.rename(folder / name, folder.with_suffix(f".{name}.{os.getpid()}"))
        except FileNotFoundError:
            continue  # another worker was faster
        return name.partition("-")[0]
    return ""


@pytest.fixture
def events(tmp_path: Path) -> Path:
    folder = tmp_path / "events"
    folder.mkdir()
    return folder


def collect(kind: str, events: Path, failure: str = "restart", **options: Any) -> Any:
    makers = [lambda: GymEnv(Still(events))] * 2
    return KINDS[kind](makers, telling(), frames_per_batch=16, on_worker_failure=failure, **options)


def told(batch: TensorDictBase, what: str) -> set[int]:
    index = ("weight", "mark", "note", "pid").index(what)
    return set(batch["told"][..., index].flatten().int().tolist())


def kill(collector: Any, worker_idx: int) -> int:
    """Kill a worker; its process."""
    (pid,) = [worker.process.pid for worker in collector.remote_workers if worker.worker_idx == worker_idx]
    os.kill(pid, signal.SIGKILL)
    assert ends(pid)
    return pid


def next_without(gone: set[int], collector: Any) -> Any:
    """The next batch in which none of these processes has acted; two that each had finished may come before it."""
    for _ in range(2 * len(gone)):
        if not told(batch := next(collector), "pid") & gone:
            return batch
    return next(collector)


def until_there(collector: Any, workers: int, sync: bool, versions: dict[int, int] | None = None) -> Any:
    """Batches, until so many workers are there, and each has delivered: in one batch, or one after the other."""
    seen: set[int] = set()
    for _ in range(3000):
        batch = next(collector)
        note(batch, {} if versions is None else versions)
        seen = told(batch, "pid") if sync else seen | told(batch, "pid")
        pids = {worker.process.pid for worker in collector.remote_workers}
        if len(pids) == workers and pids <= seen:
            return batch
    raise AssertionError(f"there are still only {seen}")


def note(batch: TensorDictBase, newest: dict[int, int]) -> None:
    """Check the versions of a batch, by process: they never go back."""
    rows = torch.stack([batch["told"][..., 3].flatten(), batch["policy_version"].flatten().double()], 1)
    for pid in rows[:, 0].unique().tolist():
        mine = rows[rows[:, 0] == pid, 1]
        assert mine.diff().ge(0).all() and mine[0] >= newest.get(int(pid), 0)
        newest[int(pid)] = int(mine[-1])


@every_kind
def test_drop_continues_until_no_worker_is_left(kind, events, caplog):
    with collect(kind, events, "drop", total_frames=400) as collector:
        next(collector)
        pid = kill(collector, 0)
        update(collector, 2)
        batches = [next_without({pid}, collector), *(next(collector) for _ in range(2))]
        assert [batch.numel() for batch in batches] == [8 if kind == "sync" else 16] * 3
        assert told(batches[-1], "weight") == {2}
        assert collector.failures.as_dict() == {"failed": {"0": 1}, "dropped": {"0": 1}, "restarted": {}}
        with pytest.raises(wsync.WorkerDied, match="dropped"):
            collector.update_policy_weights_(worker_ids=0)
        assert [one.levelname for one in caplog.records if one.name.startswith("collectors")] == ["WARNING"]
        assert "worker 0" in caplog.text and "dropped" in caplog.text
        total = collector.frames
        rest = list(collector)
        assert collector.frames == total + sum(batch.numel() for batch in rest) >= 400
        collector.total_frames = -1
        kill(collector, 1)
        with pytest.raises(wsync.WorkerDied, match="no worker is left"):
            for _ in range(4):
                next(collector)


@every_kind
@pytest.mark.parametrize("what", ["die", "raise"])
def test_a_worker_that_fails_within_a_batch_comes_back(kind, what, events, caplog):
    with collect(kind, events) as collector:
        first = until_there(collector, 2, kind == "sync")
        before = collector.frames
        update(collector, 2)
        (events / what).touch()
        frames = 0
        while not collector.failures:
            batch = next(collector)
            frames += batch.numel()
        update(collector, 3)
        batch = until_there(collector, 2, kind == "sync")
        assert told(batch, "pid") != told(first, "pid") or kind == "async"
        for name in ("weight", "mark", "note"):
            assert told(batch, name) == {3}
        assert collector.failures.failed.total() == collector.failures.restarted.total() == 1
        assert collector.frames > before + frames
        assert ("the cart fell off the table" in caplog.text) == (what == "raise")


@every_kind
def test_a_successor_has_every_model_from_its_first_frame_on(kind, events):
    schemes = {name: wsync.SharedMemWeightSyncScheme() for name in ("policy", "module.critic")}
    with collect(kind, events, weight_sync_schemes=schemes) as collector:
        until_there(collector, 2, kind == "sync")
        for value in (2, 3):
            collector.policy.module.become(value)
            both = {"policy": collector.policy, "module.critic": nn.Linear(4, 1)}
            collector.update_policy_weights_(weights_dict=both)
        known = {kill(collector, 1)}
        collector.policy.module.become(4)
        collector.update_policy_weights_(weights_dict=both)  # undone by the death, and done again with the other
        known |= {worker.process.pid for worker in collector.remote_workers}
        while (batch := next(collector)) is not None and not told(batch, "pid") - known:
            assert collector.frames < 10**5
        theirs = batch["told"][batch["told"][..., 3] == max(told(batch, "pid") - known)]
        assert theirs[:, :3].unique().tolist() == [4]
        assert collector.failures.restarted == {1: 1}


@every_kind
def test_a_stopped_worker_is_ended_and_replaced(kind, events):
    with collect(kind, events, worker_timeout=3.0) as collector:
        until_there(collector, 2, kind == "sync")
        (events / "stop").touch()
        while not collector.failures:
            next(collector)
        until_there(collector, 2, kind == "sync")
        assert collector.failures.failed.total() == 1


def test_refused_weights_are_an_error_whatever_the_policy(events):
    scheme = wsync.SharedMemWeightSyncScheme()
    with collect("sync", events, weight_sync_schemes={"policy": scheme}) as collector:
        next(collector)
        with pytest.raises(wsync.WorkerFailed, match="-13 is refused"):
            update(collector, -13)
        assert not collector.failures and not collector.closed
        update(collector, 14)
        assert told(next(collector), "note") == {14}


@pytest.mark.slow
@every_kind
def test_many_kills_leave_nothing_and_versions_never_go_back(kind, events, caplog):
    def count() -> tuple[int, int, int, set[str]]:
        """Without the descriptors of the arena: it may have one slot more than before."""
        found = resources()
        descriptors = sum(n for name, n in found["descriptors"].items() if "memfd:wsync-weights" not in name)
        return len(found["threads"]), descriptors, found["children"], shared_memory_files()

    dice, versions = random.Random(3), {}
    caplog.set_level(logging.ERROR)
    with collect(kind, events) as collector:
        until_there(collector, 2, kind == "sync")
        before = count()
        for number in range(10):
            kill(collector, dice.randrange(2))
            while collector.failures.restarted.total() <= number:
                update(collector, collector.weight_sync_schemes["policy"].version + 1)
                note(next(collector), versions)
            batch = until_there(collector, 2, kind == "sync", versions)
            assert torch.equal(batch["told"][..., 0], batch["policy_version"].double())
        assert collector.failures.failed.total() == collector.failures.restarted.total() == 10
        assert count() == before
