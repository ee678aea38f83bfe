"""How far an asynchronous worker runs ahead of the trainer, exactly; and batches that are too old are dropped."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from stepping import STEPS, Counted, Held, more_come, policy, wait_for

from collectors import Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from collectors.config import MultiAsyncConfig
from collectors.distributed import DistributedCollector, RayCollector, RPCCollector


def by_hydra(run_ahead: int):
    return instantiate(OmegaConf.structured(MultiAsyncConfig(run_ahead=run_ahead)), _partial_=True)


FAMILIES = {
    "processes": (MultiAsyncCollector, {}),
    "hydra": (lambda *given, run_ahead, **options: by_hydra(run_ahead)(*given, **options), {}),
    "tcp": (DistributedCollector, {"sync": False}),
    "rpc": (RPCCollector, {"sync": False}),
}


@pytest.mark.parametrize(
    ("family", "run_ahead"), [("processes", 0), ("processes", 3), ("hydra", 1), ("tcp", 0), ("tcp", 2), ("rpc", 0)]
)
def test_a_worker_begins_as_many_batches_as_it_may_and_its_frames_say_how_old_they_are(family, run_ahead, steps):
    path, reading = steps
    cls, options = FAMILIES[family]
    collector = cls([lambda: Counted(path)], policy(), frames_per_batch=STEPS, run_ahead=run_ahead, **options)
    bound = run_ahead + 1  # batches that are begun, and not taken
    with collector:
        first = next(collector)
        for version in range(2, 5):  # each round: the worker is at its bound when the weights are updated
            wait_for(reading, STEPS * (bound + (version == 2)))
            assert not more_come(reading), "it has begun a batch beyond its bound"
            collector.update_policy_weights_()
            ahead = [next(collector) for _ in range(bound)]
            assert all((batch["policy_version"] == version - 1).all() for batch in ahead)
            assert collector.policy_version == version
        wait_for(reading, STEPS * bound)
        assert all((next(collector)["policy_version"] == 4).all() for _ in range(bound))
        assert (first["policy_version"] == 1).all()


def test_new_weights_are_used_within_a_batch_and_each_frame_says_so(steps, gate):
    """The worker is held within a step of its batch until it has been sent new weights."""
    (path, reading), (held, passes) = steps, gate
    with MultiAsyncCollector([lambda: Held(path, held)], policy(), frames_per_batch=STEPS, run_ahead=0) as collector:
        os.write(passes, b"*" * (STEPS + 3))
        assert next(collector)["policy_version"].tolist() == [1] * STEPS
        wait_for(reading, STEPS + 4)
        for _ in range(3):
            collector.update_policy_weights_()
        os.write(passes, b"*" * STEPS)
        assert next(collector)["policy_version"].tolist() == [1] * 4 + [4] * (STEPS - 4)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (MultiSyncCollector, {}),
        (MultiCollector, {"sync": True}),
        (DistributedCollector, {}),
        (RPCCollector, {}),
        (RayCollector, {}),
    ],
)
def test_a_synchronous_collector_never_runs_ahead(cls, options):
    with pytest.raises(ValueError, match="run_ahead=0 is for asynchronous collection"):
        cls([lambda: None], policy(), frames_per_batch=STEPS, run_ahead=0, **options)


# --- how stale a batch may be: an older one is counted, and another one is collected in its place ---


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
