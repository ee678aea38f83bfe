"""What a scheme made, it takes away: threads, descriptors, children, shared memory."""

from __future__ import annotations

import os
from typing import Any

import crew as crew_module
import pytest
from census import census, census_in_worker, resident, without_segments
from contract_models import Small, fill
from crew import crew

ROUNDS = int(os.environ.get("WSYNC_ROUNDS", "5"))
KILLS = int(os.environ.get("WSYNC_KILLS", "1"))
GROWTH = 8.0  # MiB by which an allocator's mood may change what is resident, however many rounds there were

pytestmark = pytest.mark.timeout(60 + 2 * ROUNDS + 10 * KILLS)


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
        before, inside, size = census(), workers.all("run", census_in_worker), resident()
        for _ in range(ROUNDS):
            one_round(make_scheme, workers)
        after = census()
        assert without_segments(after) == without_segments(before)
        assert not [name for name in after["segments"] if "wsync" in name]
        for old, new in zip(inside, workers.all("run", census_in_worker), strict=True):
            assert without_segments(new) == without_segments(old)
        assert resident() - size < GROWTH


def test_nothing_is_left_of_workers_that_were_killed(make_scheme: Any) -> None:
    """Again and again one is killed, and another comes in its place; in the end all are killed."""
    if crew_module.kind() == "ray" and KILLS == 1:
        pytest.skip("tests/chaos kills an actor, and looks at what is left; WSYNC_KILLS=30 kills more here")

    def left() -> dict[str, Any]:
        count = without_segments(census())
        if crew_module.kind() == "ray":
            del count["descriptors"]  # Ray's client drops its connections to killed actors when it likes
        return count

    def attempt(kills: int) -> None:
        model, value = fill(Small(), 1), 1
        ahead = kills if crew_module.kind() == "rpc" else 0  # a session that has lost a member takes nobody in
        with crew(2) as workers, crew(ahead) as spare, make_scheme() as scheme:
            scheme.init_on_sender("policy", model=model, num_workers=2)
            workers.follow(scheme, Small)
            alive, size = None, resident()
            for _ in range(kills):
                workers.succeed(value % 2, spare, scheme, Small)
                value += 1
                scheme.send(fill(model, value))
                assert [seen[0] for seen in workers.all("forward")] == [value] * 2
                alive, now = alive or left(), left()
                assert now.pop("descriptors", 0) <= alive.get("descriptors", 0)  # a spare one has had some, too
                assert now == {what: alive[what] for what in now}
            assert resident() - size < GROWTH
            for worker in workers.workers:
                worker.kill()

    attempt(1)
    before = left()
    attempt(KILLS)
    assert left() == before


def test_a_scheme_that_never_connected_leaves_nothing(make_scheme: Any) -> None:
    before = census()
    for _ in range(5):
        scheme = make_scheme()
        scheme.init_on_sender("policy", model=Small(), num_workers=2)
        scheme.shutdown()
    assert without_segments(census()) == without_segments(before)
