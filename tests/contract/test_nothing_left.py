"""What a scheme made, it takes away: threads, descriptors, children, shared memory."""

from __future__ import annotations

import os
from typing import Any

import crew as crew_module
import pytest
from census import census, census_in_worker, without_segments
from contract_models import Small, fill
from crew import crew

pytestmark = pytest.mark.timeout(60)

ROUNDS = int(os.environ.get("WSYNC_ROUNDS", "5"))


def one_round(make_scheme: Any, workers: Any) -> None:
    model = fill(Small(), 1)
    with make_scheme() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=len(workers))
        workers.follow(scheme, Small)
        for value in range(2, 5):
            scheme.send(fill(model, value))
            assert [seen[0] for seen in workers.all("forward")] == [value] * len(workers)
        assert workers.all("shutdown") == [[]] * len(workers)
        scheme.shutdown()
        scheme.shutdown()
    workers.all("run", forget)


def forget(host: Any) -> None:
    host.schemes.clear()
    host.models.clear()


def test_nothing_is_left(make_scheme: Any) -> None:
    with crew(2) as workers:
        one_round(make_scheme, workers)  # what the machinery around it makes once, it keeps
        before, inside = census(), workers.all("run", census_in_worker)
        for _ in range(ROUNDS):
            one_round(make_scheme, workers)
        after = census()
        assert without_segments(after) == without_segments(before)
        assert not [name for name in after["segments"] if "wsync" in name]
        for old, new in zip(inside, workers.all("run", census_in_worker), strict=True):
            assert without_segments(new) == without_segments(old)


def test_nothing_is_left_of_workers_that_were_killed(make_scheme: Any) -> None:
    def attempt() -> None:
        with crew(2) as workers, make_scheme() as scheme:
            scheme.init_on_sender("policy", model=Small(), num_workers=2)
            workers.follow(scheme, Small)
            for worker in workers.workers:
                worker.kill()

    def left() -> dict[str, Any]:
        count = without_segments(census())
        if crew_module.current_kind == "ray":
            del count["descriptors"]  # Ray's client drops its connections to killed actors when it likes
        return count

    attempt()
    before = left()
    for _ in range(2):
        attempt()
    assert left() == before


def test_a_scheme_that_never_connected_leaves_nothing(make_scheme: Any) -> None:
    before = census()
    for _ in range(5):
        scheme = make_scheme()
        scheme.init_on_sender("policy", model=Small(), num_workers=2)
        scheme.shutdown()
    assert without_segments(census()) == without_segments(before)
