"""A resumed run draws other numbers than the one that it goes on from, and always the same ones."""

from __future__ import annotations

from learning.seeding import seed_from


def test_a_run_that_begins_has_the_seed_that_was_asked_for() -> None:
    assert [seed_from(seed, 0) for seed in (0, 3, 2**40)] == [0, 3, 2**40]


def test_each_start_of_each_seed_is_another_and_can_be_repeated() -> None:
    starts = [(seed, frames) for seed in range(20) for frames in range(1024, 20 * 1024, 1024)]
    seeds = {seed_from(*start) for start in starts}
    assert len(seeds) == len(starts)
    assert seeds == {seed_from(*start) for start in starts}
    assert all(2**10 < seed < 2**31 for seed in seeds)
