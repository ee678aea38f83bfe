"""A resumed run has another seed than the run that it continues, and always the same one."""

from __future__ import annotations

from learning.loop import resumed_seed


def test_a_new_run_has_the_seed_of_its_config() -> None:
    assert [resumed_seed(seed, 0) for seed in (0, 3, 2**40)] == [0, 3, 2**40]


def test_seeds_differ_by_run_and_frames_and_are_reproducible() -> None:
    starts = [(seed, frames) for seed in range(20) for frames in range(1024, 20 * 1024, 1024)]
    seeds = {resumed_seed(*start) for start in starts}
    assert len(seeds) == len(starts)
    assert seeds == {resumed_seed(*start) for start in starts}
    assert all(2**10 < seed < 2**31 for seed in seeds)
