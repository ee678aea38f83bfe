"""A trainer with real workers, on which a fault is played; when the curtain falls nothing may be left."""

from __future__ import annotations

import gc
import random
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import census
import pytest
from contract_models import Small, fill
from crew import Crew, crew, kind
from matrix import Cell
from torch import nn

import wsync

DEADLINE = 0.5  # seconds, where somebody is made to be silent
PROMPT = 3.0  # seconds in which an event has to be noticed on a busy machine, far below the deadline of 30
VICTIM = 1


class Stage:
    """What a test works with.

    Attributes:
        scheme: on the sender, connected; its model is full of ones.
        workers: two of them; the second one is the victim.
        rng: seeded by the scheme's name.
    """

    def __init__(self, scheme: wsync.WeightSyncScheme, workers: Crew, model: nn.Module, seed: str) -> None:
        self.scheme = scheme
        self.workers = workers
        self.model = model
        self.rng = random.Random(seed)

    @property
    def victim(self) -> Any:
        """The worker to whom it happens."""
        return self.workers[VICTIM]

    def within(self, seconds: float) -> None:
        """The deadline of sends from now on."""
        self.scheme.timeout = seconds

    def fill(self, value: float) -> nn.Module:
        """The trainer's model, full of ``value``."""
        return fill(self.model, value)

    def send(self, value: float) -> None:
        """An update, as users send it."""
        self.scheme.send(self.fill(value))

    def ask(self, value: float) -> None:
        """An update to which every worker has to answer, published or not."""
        self.scheme.send_async(self.fill(value))
        self.scheme.wait_async()

    def seen(self, model_id: str = "policy") -> list[float]:
        """What each worker that lives acts on."""
        return [worker.call("forward", model_id)[0] for worker in self.workers.workers if worker.alive]

    def all_see(self, value: float, model_id: str = "policy") -> bool:
        """Whether everybody who lives acts on ``value``."""
        return set(self.seen(model_id)) == {value}


class Scene:
    """Makes stages for one backend."""

    def __init__(self, make_scheme: Callable[..., wsync.WeightSyncScheme]) -> None:
        self._make_scheme = make_scheme

    @contextmanager
    def play(
        self,
        make: Callable[[], nn.Module] = Small,
        *,
        count: int = 2,
        before: Callable[[wsync.WeightSyncScheme], None] = lambda scheme: None,
        checked: bool = True,
    ) -> Iterator[Stage]:
        """Connected workers with copies of a model; ``before`` is called with the scheme before they come."""
        model = fill(make(), 1)
        there = trainers_own()
        with crew(count) as workers:
            with self._make_scheme() as scheme:
                scheme.init_on_sender("policy", model=model, num_workers=count)
                before(scheme)
                workers.follow(scheme, make)
                yield Stage(scheme, workers, model, scheme.name)
            for worker in workers.workers:
                assert not worker.alive or worker.call("shutdown") == []
        assert not checked or trainers_own() == there


def trainers_own() -> dict[str, Any]:
    """What the trainer's process has that has to go with a scheme."""
    gc.collect()
    count = census.without_segments(census.census())
    if kind() == "ray":
        del count["descriptors"]  # Ray's client has more and fewer as actors come and go: see test_nothing_left.py
    return count


@contextmanager
def detected(
    cell: Cell, error: type[BaseException], match: str, *, within: float = PROMPT, since: float | None = None
) -> Iterator[Any]:
    """What happens inside has to raise ``error``, soon; the cell has the time."""
    started = time.perf_counter() if since is None else since
    with pytest.raises(error, match=match) as caught:
        yield caught
    cell.detected(seconds := time.perf_counter() - started)
    forget_frames(caught.value)
    assert seconds < within, f"it took {seconds:.1f} s to notice"


def forget_frames(error: BaseException | None) -> None:
    """Let go of what the frames held that an error came through: it would look as if something were left."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextmanager
def recovered(cell: Cell, *, within: float = PROMPT) -> Iterator[None]:
    """What happens inside brings everybody to a newer version; the cell has the time."""
    started = time.perf_counter()
    yield
    cell.recovered(seconds := time.perf_counter() - started)
    assert seconds < within, f"it took {seconds:.1f} s to recover"
