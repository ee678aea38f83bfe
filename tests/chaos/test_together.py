"""Two models at once (``weights_dict``): whatever happens in between, nobody has one without the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from contract_models import Tail, fill
from matrix import Cell
from stage import Scene, Stage, detected, recovered

import wsync

pytestmark = pytest.mark.above_the_ends


def pair_up(stage: Stage, second: wsync.WeightSyncScheme) -> None:
    """Have the workers follow a second model as well."""
    second.init_on_sender("critic", model=fill(Tail(), 1), num_workers=len(stage.workers))
    stage.workers.follow(second, Tail, "critic")


def after(stage: Stage, method: str, happen: Callable[[], None]) -> None:
    """Have something happen right behind the first scheme's step of the transaction."""
    sender: Any = stage.scheme.sender
    real = getattr(sender, method)

    def step(*args: Any) -> Any:
        result = real(*args)
        setattr(sender, method, real)
        happen()
        return result

    setattr(sender, method, step)


def both(stage: Stage, second: wsync.WeightSyncScheme, value: float) -> None:
    wsync.synchronize({stage.scheme: stage.fill(value), second: fill(Tail(), value)})


def all_have(stage: Stage, value: float) -> bool:
    return stage.all_see(value) and stage.all_see(value, "critic")


def goes_on(cell: Cell, stage: Stage, second: wsync.WeightSyncScheme) -> None:
    """Each scheme finds out for itself who has died, and says so once; then the survivors get both."""
    with recovered(cell):
        for _ in range(3):
            try:
                both(stage, second, 5)
                break
            except wsync.WorkerDied:
                continue
        assert all_have(stage, 5)


def test_together_killed_before_the_vote(cell: Cell, scene: Scene, make_scheme: Any) -> None:
    """Two models are sent together (`weights_dict`), and a worker is killed before it has voted. Nobody has either."""
    with scene.play(Tail) as stage, make_scheme() as second:
        pair_up(stage, second)
        after(stage, "stage", stage.victim.kill)  # it has voted on the first, not on the second
        with detected(cell, wsync.WorkerDied, "worker 1"):
            both(stage, second, 2)
        assert all_have(stage, 1)
        goes_on(cell, stage, second)


def test_together_killed_after_the_vote(cell: Cell, scene: Scene, make_scheme: Any) -> None:
    """A worker is killed between the vote and its decision: the others have both models, and the error says that it
    had been decided."""
    with scene.play(Tail) as stage, make_scheme() as second:
        pair_up(stage, second)
        real: Any = second.sender.stage

        def vote_and_die(*args: Any) -> Any:
            posted = real(*args)
            stage.victim.kill()  # the last vote is in
            return posted

        second.sender.stage = vote_and_die
        with detected(cell, wsync.WorkerDied, "(?s)it had been decided.*worker 1"):
            both(stage, second, 2)
        second.sender.stage = real
        assert all_have(stage, 2)
        goes_on(cell, stage, second)


def test_together_killed_after_the_decision(cell: Cell, scene: Scene, make_scheme: Any) -> None:
    """A worker is killed when the first of two models was decided. The others have both, and the error says so."""
    with scene.play(Tail) as stage, make_scheme() as second:
        pair_up(stage, second)
        real: Any = stage.scheme.sender.decide

        def decide_and_kill(*args: Any) -> None:
            stage.victim.stop()  # so that it surely has not answered
            real(*args)
            stage.victim.kill()

        stage.scheme.sender.decide = decide_and_kill
        with detected(cell, wsync.WorkerDied, "(?s)it had been decided.*worker 1"):
            both(stage, second, 2)
        stage.scheme.sender.decide = real
        assert all_have(stage, 2)
        goes_on(cell, stage, second)


def test_together_one_refuses(cell: Cell, scene: Scene, make_scheme: Any) -> None:
    """One of two models is refused by one worker. Nobody has either; the next ones work."""
    with scene.play(Tail) as stage, make_scheme() as second:
        pair_up(stage, second)
        bad = fill(Tail(), 2)
        bad.note = "refuse 1"
        with detected(cell, wsync.WorkerFailed, "(?s)worker 1.*ArithmeticError"):
            wsync.synchronize({stage.scheme: stage.fill(2), second: bad})
        assert all_have(stage, 1)
        with recovered(cell):
            both(stage, second, 3)
            assert all_have(stage, 3)
