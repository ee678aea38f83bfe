"""Backends that reach other machines, and workers on the trainer's own: those share its memory."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
from contract_models import Plain, Tail, digest, scramble
from crew import crew

import wsync
from wsync.network.group import GroupPair
from wsync.network.same_host import HostOutgoing

pytestmark = pytest.mark.timeout(60)


def as_from_elsewhere(scheme: Any) -> wsync.WeightSyncScheme:
    """The scheme, for a worker that will not find the trainer's memory."""
    far = pickle.loads(pickle.dumps(scheme))
    memory = replace(far._seed.meeting.memory, name="that of another machine")
    far._seed = replace(far._seed, meeting=replace(far._seed.meeting, memory=memory))
    return far


@pytest.mark.parametrize("checksum", [None, True, False])
@pytest.mark.parametrize("make", [Plain, Tail])
def test_one_worker_here_and_another_elsewhere(make: Any, checksum: bool | None) -> None:
    with crew(2) as workers, wsync.DistributedWeightSyncScheme(timeout=20.0, checksum=checksum) as scheme:
        model = scramble(make(), 0)
        scheme.init_on_sender("policy", model=model, num_workers=2)
        for number, given in enumerate((scheme, as_from_elsewhere(scheme))):
            workers[number].start("join", given, make, number, "policy")
        scheme.connect()
        end: Any = scheme.sender._end
        assert [type(lane.pair) for lane in end._lanes] == [HostOutgoing, GroupPair]
        assert [lane.checked for lane in end._lanes] == [bool(checksum), checksum is not False]
        for worker in workers.workers:
            worker.result()
        for seed in range(1, 6):
            if make is Tail:
                model.note = f"note {seed}"
            scheme.send(scramble(model, seed), worker_ids=[0, 1] if seed == 3 else None)
            assert workers.all("raw_digest") == [digest(model)] * 2
        workers[0].kill()
        with pytest.raises(wsync.WorkerDied, match="worker 0"):
            scheme.send(scramble(model, 6))
        assert workers[1].call("raw_digest") == digest(model)


def test_a_slow_worker_finds_its_version_whole_whatever_came_after_it() -> None:
    """While one is stopped, the slot that it is to take is not written, and others go round it."""
    with crew(2) as workers, wsync.DistributedWeightSyncScheme(timeout=20.0) as scheme:
        model = scramble(Plain(), 0)
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Plain)
        workers[1].stop()
        scheme.send_async(scramble(model, 1))
        first = digest(model)
        for seed in range(2, 7):
            scheme.send(scramble(model, seed), worker_ids=0)
            assert workers[0].call("raw_digest") == digest(model)
        workers[1].resume()
        scheme.wait_async()
        assert workers[1].call("raw_digest") == first


def test_a_worker_that_was_given_up_takes_nothing_more() -> None:
    with crew(2) as workers, wsync.DistributedWeightSyncScheme(timeout=20.0) as scheme:
        model = scramble(Plain(), 0)
        scheme.init_on_sender("policy", model=model, num_workers=2)
        workers.follow(scheme, Plain)
        before = digest(model)
        workers[1].stop()
        scheme.send_async(scramble(model, 1))  # it has been told, and pointed to it
        scheme.dismiss(1)
        for seed in range(2, 7):  # what it was pointed to is written again
            scheme.send(scramble(model, seed), worker_ids=0)
        workers[1].resume()
        with pytest.raises(Exception, match="shut down, or died"):
            workers[1].call("receive", 20.0)
        assert workers[1].call("raw_digest") == before
