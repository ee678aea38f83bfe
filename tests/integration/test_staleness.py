"""How stale a batch may be: an older one is not delivered, but counted, and another one is collected in its place."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from stepping import STEPS, Counted, Held, policy, wait_for

from collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from collectors.distributed import DistributedCollector, RPCCollector


@pytest.mark.parametrize(
    ("cls", "options"),
    [(MultiAsyncCollector, {}), (DistributedCollector, {"sync": False}), (RPCCollector, {"sync": False})],
)
def test_batches_that_are_too_old_are_dropped_and_their_worker_collects_others(cls, options, steps):
    path, reading = steps
    given = {"frames_per_batch": STEPS, "run_ahead": 1, "max_staleness": 1, **options}
    with cls([lambda: Counted(path)], policy(), **given) as collector:
        next(collector)
        wait_for(reading, STEPS * 3)  # the worker has two batches of version 1 ready
        collector.update_policy_weights_()
        assert (next(collector)["policy_version"] == 1).all(), "one version behind is as old as it may be"
        wait_for(reading, STEPS)  # one batch of version 1, one of version 2
        collector.update_policy_weights_()
        assert (next(collector)["policy_version"] == 2).all()
        assert collector.stats()["staleness"] == {
            "max_staleness": 1, "run_ahead": 1, "dropped_batches": 1, "dropped_frames": STEPS
        }  # fmt: skip
        assert collector.frames == 3 * STEPS


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_a_batch_that_became_too_old_while_it_was_collected_is_collected_anew(cls, steps, gate):
    """Another thread updates the weights in the middle of the first batch, so its first frames are two versions old."""
    (path, reading), (held, passes) = steps, gate
    given = {"frames_per_batch": STEPS, "max_staleness": 1}
    with cls([lambda: Held(path, held)], policy(), **given) as collector, ThreadPoolExecutor(1) as other:
        first = other.submit(next, collector)
        wait_for(reading, 1)
        os.write(passes, b"*" * 3)
        wait_for(reading, 3)
        collector.update_policy_weights_()
        collector.update_policy_weights_()
        os.write(passes, b"*" * (STEPS - 3 + STEPS))
        assert (first.result()["policy_version"] == 3).all()
        assert (collector.staleness.dropped_batches, collector.staleness.dropped_frames) == (1, STEPS)
