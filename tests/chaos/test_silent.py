"""A worker says nothing, or too late, or twice: every send ends by its deadline, and the next one works."""

from __future__ import annotations

import time

import pytest
from matrix import Cell
from relay import HOLD, Relay, answers_of, intercept
from stage import DEADLINE, VICTIM, Scene, Stage, detected, recovered

import wsync

pytestmark = pytest.mark.above_the_ends

SOON = DEADLINE + 1.5  # seconds: by the deadline, on a busy machine


def silent(cell: Cell, stage: Stage, value: float) -> None:
    """An update to which the victim does not answer."""
    with detected(cell, wsync.SyncTimeout, f"worker 1: did not answer within {DEADLINE} s", within=SOON) as late:
        stage.ask(value)
    assert set(late.value.workers) == {VICTIM}
    assert cell.detection is not None and cell.detection >= DEADLINE * 0.9


def test_stopped_and_continued(cell: Cell, scene: Scene) -> None:
    """A worker is stopped (SIGSTOP). The send ends at its deadline, and names it and the cause; the others have the
    update. When it goes on (SIGCONT) it catches up with the newest version, and skips those before."""
    with scene.play() as stage:
        stage.within(DEADLINE)
        stage.victim.stop()
        silent(cell, stage, 2)
        assert stage.workers[0].call("forward")[0] == 2
        for value in (3, 4, 5):
            stage.scheme.send_async(stage.fill(value))
        stage.within(20.0)
        stage.scheme.send_async(stage.fill(6))
        assert stage.workers[0].call("receive", 10.0) is not None
        with recovered(cell):
            stage.victim.resume()
            stage.scheme.wait_async()
            assert stage.all_see(6)
        stage.send(7)
        assert stage.all_see(7)


def test_acknowledgement_delayed(cell: Cell, scene: Scene) -> None:
    """A worker's answers are held back beyond the deadline. Each send ends at its deadline; the answer to an older
    version, when it comes at last, does not count for a newer one."""
    relays: list[Relay] = []
    with scene.play(before=lambda scheme: relays.append(intercept(scheme))) as stage:
        (relay,) = relays
        stage.within(DEADLINE)
        relay.judge(answers_of(VICTIM, HOLD))
        silent(cell, stage, 2)
        stage.victim.stop()  # so that it has not answered to this one, too
        stage.scheme.send_async(stage.fill(3))
        assert relay.release() == 1  # to the update before
        with pytest.raises(wsync.SyncTimeout, match="worker 1"):
            stage.scheme.wait_async()
        assert stage.workers[0].call("forward")[0] == 3
        stage.victim.resume()
        relay.judge(answers_of(VICTIM, 1))
        stage.within(20.0)
        with recovered(cell):
            relay.release()
            stage.ask(4)
            assert stage.all_see(4)


def test_acknowledgement_dropped(cell: Cell, scene: Scene) -> None:
    """A worker's answer to an update is lost. The send ends at its deadline, and the next one works."""
    relays: list[Relay] = []
    with scene.play(before=lambda scheme: relays.append(intercept(scheme))) as stage:
        (relay,) = relays
        stage.within(DEADLINE)
        relay.judge(answers_of(VICTIM, 0))
        silent(cell, stage, 2)
        relay.judge(answers_of(VICTIM, 1))
        stage.within(5.0)
        with recovered(cell):
            stage.ask(3)
            assert stage.all_see(3)


def test_acknowledgement_duplicated(cell: Cell, scene: Scene) -> None:
    """A worker says everything twice. The second answer to a version does not count for the next one."""
    relays: list[Relay] = []
    with scene.play(before=lambda scheme: relays.append(intercept(scheme))) as stage:
        (relay,) = relays
        relay.judge(answers_of(VICTIM, 2))
        with recovered(cell):
            for value in range(2, 6):
                stage.ask(value)
                assert stage.all_see(value)
        stage.within(DEADLINE)
        stage.victim.stop()  # what it said of the version before is on the line a second time
        started = time.perf_counter()
        with pytest.raises(wsync.SyncTimeout, match="worker 1"):
            stage.ask(6)
        cell.detected(time.perf_counter() - started)
        stage.victim.resume()
        stage.within(20.0)
        stage.ask(7)
        assert stage.all_see(7)
