"""Ends of collectors at an inconvenient moment: in another thread, interrupted, or while a worker starts."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import gymnasium
import pytest

import wsync
from collectors import GymEnv, MultiAsyncCollector, MultiSyncCollector
from collectors.workers import processes


class Stuck(gymnasium.Wrapper):
    """Never returns from a step, or from its end; says when it has begun."""

    def __init__(self, where: str, begun: Path) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))
        self.where, self.begun = where, begun

    def _wait(self, where: str) -> None:
        if where == self.where:
            self.begun.write_text("begun")
            threading.Event().wait()

    def step(self, action: Any) -> Any:
        self._wait("step")
        return self.env.step(action)

    def close(self) -> None:
        self._wait("close")


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_a_thread_that_waits_for_a_batch_is_told_of_the_end(
    cls: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "SHUTDOWN_GRACE", 0.1)
    begun, errors = tmp_path / "begun", []
    os.mkfifo(begun)
    collector = cls([lambda: GymEnv(Stuck("step", begun))], frames_per_batch=4)

    def gather() -> None:
        try:
            next(collector)
        except Exception as error:  # noqa: BLE001  examined below
            errors.append(error)

    thread = threading.Thread(target=gather)
    thread.start()
    begun.read_text()  # the worker is in the middle of a batch
    collector.shutdown()
    thread.join(20)
    (error,) = errors
    assert isinstance(error, wsync.NotConnected) and "ended in another thread: by shutdown" in str(error)


def test_an_interrupted_shutdown_can_be_called_again(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    collector = MultiSyncCollector([lambda: GymEnv(Stuck("close", begun))] * 2, frames_per_batch=4)
    handles = [worker.process_handle for worker in collector.remote_workers]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            collector.shutdown()
    finally:
        signal.signal(signal.SIGALRM, before)
    collector.shutdown()
    assert collector.closed and all(handle.empty for handle in handles)


@pytest.mark.parametrize("seconds", [0.0, float("nan"), float("inf")])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="worker_timeout is a number of seconds above 0, or None"):
        MultiSyncCollector([lambda: GymEnv("CartPole-v1")], frames_per_batch=4, worker_timeout=seconds)
