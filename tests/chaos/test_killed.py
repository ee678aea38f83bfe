"""A worker is killed, at every moment of an update: the error names it at once, and the survivors have the update."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from contract_models import Large, Small, Stuck
from crew import crew
from matrix import Cell
from stage import Scene, Stage, detected, recovered

import wsync


def goes_on(cell: Cell, stage: Stage, value: float = 3) -> None:
    """The others have the update, and get the next ones."""
    assert stage.all_see(value - 1)
    with recovered(cell):
        stage.send(value)
        assert stage.all_see(value)
    for later in (value + 1, value + 2, value + 3):  # more than there are slots
        stage.ask(later)
        assert stage.all_see(later)


def test_killed_between_updates(cell: Cell, scene: Scene) -> None:
    """A worker is killed (SIGKILL) while nothing is being sent. The next send names it, and the others have the
    update."""
    with scene.play() as stage:
        stage.victim.kill()
        with detected(cell, wsync.WorkerDied, "worker 1") as died:
            stage.send(2)
        assert set(died.value.workers) == {1}
        goes_on(cell, stage)


def test_killed_during_an_update(cell: Cell, scene: Scene) -> None:
    """A worker is killed at a random moment (seeded) while 32 MiB are packed and transferred. The send names it and
    ends, and the others have the update."""
    with scene.play(Large) as stage:
        stage.victim.stop()  # so that it surely has not answered by then
        delay = stage.rng.uniform(0.0, 0.05)
        killed: list[float] = []

        def kill() -> None:
            killed.append(time.perf_counter())
            stage.victim.kill()

        timer = threading.Timer(delay, kill)
        timer.start()
        with pytest.raises(wsync.WorkerDied, match="worker 1") as died:
            stage.ask(2)
        cell.detected(time.perf_counter() - killed[0])
        timer.join()
        assert set(died.value.workers) == {1}
        goes_on(cell, stage)


def test_killed_before_its_acknowledgement(cell: Cell, scene: Scene) -> None:
    """A worker is killed after an update was written, and before it has answered. The wait for its answer ends at
    once and names it, and the others have the update."""
    with scene.play() as stage:
        stage.victim.stop()
        stage.scheme.send_async(stage.fill(2))
        stage.victim.kill()
        with detected(cell, wsync.WorkerDied, "worker 1"):
            stage.scheme.wait_async()
        goes_on(cell, stage)


def stick(host: Any, fifo: str) -> None:
    host.models["policy"].fifo = fifo
    host.models["policy"]()


def test_killed_inside_a_forward(cell: Cell, scene: Scene, tmp_path: Path) -> None:
    """A worker is killed while its forward runs: in `shared_mem`, on weights in memory that it shares with the trainer,
    which is used again. The wait for its answer names it."""
    os.mkfifo(fifo := tmp_path / "inside")
    with scene.play(Stuck) as stage:
        stage.victim.start("run", stick, str(fifo))
        fifo.read_bytes()  # returns when the victim is inside
        stage.scheme.send_async(stage.fill(2))
        stage.victim.kill()
        with detected(cell, wsync.WorkerDied, "worker 1"):
            stage.scheme.wait_async()
        goes_on(cell, stage)


def take_the_switch(host: Any) -> None:
    host.schemes["policy"].receiver._end._switch._mutex.lock()


def test_killed_while_it_holds_its_switch(cell: Cell, scene: Scene, backend: str) -> None:
    """A worker is killed inside the few instructions in which it holds the lock of its switch in shared memory. The
    lock passes to the trainer (a robust mutex): the send names the worker, and the others have the update."""
    if backend not in ("shared_mem", "shared_mem-published", "multiprocess"):
        pytest.skip("there is no switch, and so no lock that a worker could hold")
    with scene.play() as stage:
        stage.victim.call("run", take_the_switch)
        stage.victim.kill()
        with detected(cell, wsync.WorkerDied, "worker 1"):
            stage.send(2)
        goes_on(cell, stage)


def test_restarted_and_admitted(cell: Cell, scene: Scene) -> None:
    """A worker dies, two updates are sent, and a new one joins in its place (`Sender.admit`). It has the newest
    version before it acts for the first time; it missed those between, and nobody waits for it."""
    with scene.play() as stage, crew(1) as spare:
        stage.victim.kill()
        with detected(cell, wsync.WorkerDied, "worker 1"):
            stage.send(2)
        stage.send(3)
        with recovered(cell, within=20.0):
            spare[0].start("join", stage.scheme, Small, 1, "policy")
            stage.scheme.sender.admit(1)
            assert spare[0].result() == 3
            assert spare[0].call("forward")[0] == 3
        stage.send(4)
        assert spare[0].call("forward")[0] == 4 and stage.all_see(4)


def test_all_killed(cell: Cell, scene: Scene) -> None:
    """Every worker is killed. The send names them all; the next one says that there is nobody to send to."""
    with scene.play() as stage:
        for worker in stage.workers.workers:
            worker.kill()
        with detected(cell, wsync.WorkerDied, "(?s)worker 0.*worker 1"):
            stage.ask(2)
        with pytest.raises(wsync.NotConnected, match="nobody"):
            stage.send(3)
