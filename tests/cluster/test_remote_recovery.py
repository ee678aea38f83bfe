"""Workers over TCP, RPC and Ray that die, stall, raise and come back (or are refused to)."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from ray_workers import START_TIMEOUT
from tensordict import TensorDictBase
from torch import nn

import wsync
from collectors.distributed import DistributedCollector, RayCollector, RPCCollector
from wsync.testing.workers import stop_process

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no worker has this file in its path

FAMILIES = {"tcp": DistributedCollector, "rpc": RPCCollector, "ray": RayCollector}


class Pids(gymnasium.Env):
    """Observes the process that it is in."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return np.full(1, os.getpid(), np.float64), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.full(1, os.getpid(), np.float64), 0.0, False, False, {}


class Telling(nn.Module):
    """Writes down what its weight and its buffer are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("mark", torch.ones(1))

    def become(self, value: int) -> None:
        with torch.no_grad():
            self.weight.fill_(value)
            self.get_buffer("mark").fill_(value)

    def forward(self, observation: TensorDictBase) -> TensorDictBase:
        observation.set("told", torch.stack([self.weight[0], self.get_buffer("mark")[0]]).detach())
        return observation.set("action", torch.tensor(0))


def collect(family: str, failure: str, **options: Any) -> Any:
    if family == "ray":
        options.setdefault("timeout", START_TIMEOUT)
    return FAMILIES[family]([Pids] * 2, Telling(), frames_per_batch=16, on_worker_failure=failure, **options)


def pids(batch: TensorDictBase) -> list[int]:
    """By worker, in a synchronous batch."""
    return [int(pid) for pid in batch["observation"].flatten().unique_consecutive().tolist()]


def update(collector: Any, value: int) -> None:
    collector.policy.become(value)
    collector.update_policy_weights_()


class Failing(Pids):
    """In a folder called bad it raises in its second batch; its end takes a moment, and a fifo says when it begins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = 0
        self.raised = False

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps == 15 and self.folder.name == "bad":
            self.raised = True
            raise ArithmeticError("the cart fell off the table")
        return super().step(action)

    def close(self) -> None:
        if self.raised:
            self.raised = False
            (self.folder / "fifo").write_text("schemes are closed by now")
            time.sleep(0.3)
        super().close()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "failure"), [("tcp", "raise"), ("rpc", "drop"), ("ray", "drop")])
def test_an_update_that_comes_upon_a_worker_that_raised_tells_what_it_raised(family, failure, tmp_path, caplog):
    """A call is answered when the worker has closed all that it had; the update has come upon that before."""
    for name in ("bad", "good"):
        (tmp_path / name).mkdir()
        os.mkfifo(tmp_path / name / "fifo")
    makers = [lambda: Failing(tmp_path / "bad"), lambda: Failing(tmp_path / "good")]
    options: Any = {"frames_per_batch": 10, "sync": False, "on_worker_failure": failure}
    with FAMILIES[family](makers, Telling(), **options) as collector:
        next(collector)  # has both at work
        assert (tmp_path / "bad" / "fifo").read_text()
        if failure == "raise":
            with pytest.raises(wsync.WorkerFailed, match="the cart fell off the table"):
                update(collector, 2)
            assert collector.closed
        else:
            update(collector, 2)
            assert "the cart fell off the table" in caplog.text
        assert collector.failures.failed == {0: 1}


def until_both(collector: Any, gone: int) -> list[int]:
    for _ in range(20_000):
        batch = next(collector)
        assert gone not in pids(batch) or not collector.failures
        if len(pids(batch)) == 2 and gone not in pids(batch):
            return pids(batch)
    raise AssertionError("the worker did not come back")


@pytest.mark.parametrize(("family", "victims"), [("tcp", (1, 0)), ("ray", (1,))])
def test_a_worker_comes_back_with_the_newest_weights(family, victims, monkeypatch):
    # A descriptor may be equal to the id of a child: ids are small in a container.
    monkeypatch.setattr("wsync.control.processes._is_child", lambda number: True)
    with collect(family, "restart") as collector:
        first = pids(next(collector))
        for victim in victims:
            os.kill(first[victim], signal.SIGKILL)
            update(collector, 3)
            second = until_both(collector, first[victim])
            assert second[1 - victim] == first[1 - victim]
            assert next(collector)["told"].unique().tolist() == [3]
            update(collector, 4 + victim)
            assert next(collector)["told"].unique().tolist() == [4 + victim]
            first = second
        assert collector.failures.failed == collector.failures.restarted == dict.fromkeys(victims, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "patience"), [("tcp", 8.0), ("ray", 12.0)])
def test_a_stopped_worker_is_ended(family, patience):
    with collect(family, "drop", worker_timeout=patience) as collector:
        first = pids(next(collector))
        stop_process(first[1])
        descriptor = os.pidfd_open(first[1])
        assert pids(next(collector)) == first[:1]
        assert wait([descriptor], 10), "it is still there"
        os.close(descriptor)
        update(collector, 3)
        assert next(collector)["told"].unique().tolist() == [3]


@pytest.mark.parametrize("family", ["tcp", "rpc", pytest.param("ray", marks=pytest.mark.slow)])
def test_the_others_go_on_without_a_worker_that_is_dropped(family):
    with collect(family, "drop", total_frames=64) as collector:
        first = pids(next(collector))
        os.kill(first[0], signal.SIGKILL)
        update(collector, 2)
        rest = [next(collector) for _ in range(3)]
        assert [pids(batch) for batch in rest] == [first[1:]] * 3
        assert rest[-1]["told"].unique().tolist() == [2.0]
        assert collector.failures.as_dict() == {"failed": {"0": 1}, "dropped": {"0": 1}, "restarted": {}}
        assert collector.frames == 16 + 3 * 8


@pytest.mark.slow
def test_asynchronous_workers_come_back():
    with collect("tcp", "restart", sync=False) as collector:
        first = next(collector)
        seen = set(pids(first))
        os.kill(max(seen), signal.SIGKILL)
        while not collector.failures.restarted:
            update(collector, 2)
            next(collector)
        update(collector, 3)
        late: set[int] = set()
        for _ in range(20_000):
            batch = next(collector)
            if batch["told"].unique().tolist() == [3.0]:
                late |= set(pids(batch))
            if len(late) == 2:
                break
        assert len(late) == 2 and max(seen) not in late


def test_restart_of_workers_that_cannot_be_restarted_is_refused():
    with pytest.raises(ValueError, match="does not take a member back"):
        collect("rpc", "restart")
    with pytest.raises(ValueError, match="workers that join"):
        collect("tcp", "restart", launcher="join")
