"""``send_async`` and ``wait_async``: every acknowledgement is waited for once, and none is lost."""

from __future__ import annotations

import pickle
from contextlib import suppress
from itertools import count

import pytest
from backends import BuiltIn

import wsync
from wsync.testing import commands
from wsync.testing.models import Small, WithExtraState, digest, scramble


def test_an_error_is_raised_by_a_later_wait(backend: BuiltIn) -> None:
    with backend.connected(make=WithExtraState) as session:
        session.model.state = "refuse 0"
        session.scheme.send_async(worker_ids=0)
        session.model.state = "accepted"
        session.scheme.send(worker_ids=1)  # says nothing about worker 0
        with pytest.raises(wsync.WorkerFailed, match=r"(?s)worker 0.*ArithmeticError"):
            session.scheme.wait_async()
        session.model.state = "refuse 0"
        session.scheme.send_async(worker_ids=0)
        session.model.state = "accepted"
        with pytest.raises(wsync.WorkerFailed, match=r"(?s)worker 0.*ArithmeticError"):
            session.scheme.send_async(worker_ids=1)
            session.scheme.wait_async()
        report = session.scheme.wait_async()
        assert report is not None and dict(report.workers) == {1: 5}


def test_a_send_without_waiting_raises_the_error_of_an_earlier_one(backend: BuiltIn) -> None:
    """It sends its own update first, and does not wait for a worker that has not answered."""
    with backend.connected(make=WithExtraState, sync=False) as session:
        session.workers[1].stop()
        session.model.state = "refuse 0"
        with pytest.raises(wsync.WorkerFailed, match=r"(?s)worker 0.*ArithmeticError") as failed:
            for value in count(2):
                assert session.send(value) is None
        assert set(failed.value.workers) == {0} and failed.value.version is not None
        assert 2 <= failed.value.version < session.scheme.version
        session.model.state = "accepted"
        session.workers[1].resume()
        with suppress(wsync.WorkerFailed):
            session.send(-1)
        while True:  # the last of the others may be refused as well, each with an error of its own
            try:
                session.scheme.wait_async()
                break
            except wsync.WorkerFailed as later:
                assert set(later.workers) == {0}
        assert session.outputs() == [-1, -1]
        session.workers[0].kill()
        with pytest.raises(wsync.WorkerDied) as died:
            for _ in count():
                assert session.send(-2) is None
        assert set(died.value.workers) == {0}
        while True:  # updates that were sent before the death was seen: each has an error of its own
            try:
                session.scheme.wait_async()
                break
            except wsync.WorkerDied as later:
                assert set(later.workers) == {0}
        assert session.workers[1].call(commands.output)[0] == -2


def test_there_is_no_such_worker(backend: BuiltIn) -> None:
    with backend.connected() as session:
        for worker in (2, -1):
            for method in (session.scheme.disconnect, session.scheme.readmit):
                with pytest.raises(ValueError, match="there are workers 0 to 1"):
                    method(worker)
        session.send(2)


def test_nothing_is_received_before_connect() -> None:
    with wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", model=Small(), num_workers=1)
        worker = pickle.loads(pickle.dumps(scheme))
        worker.init_on_receiver("policy", model=Small(), worker_idx=0)
        for method in (worker.receive, worker.pull):
            with pytest.raises(wsync.NotConnected, match="call connect"):
                method()
        worker.shutdown()


def test_a_worker_that_a_newer_send_leaves_out_is_waited_for(backend: BuiltIn) -> None:
    with backend.connected() as session:
        session.scheme.timeout = 0.5
        session.workers[1].stop()
        session.post(2)
        session.send(3, worker_ids=0)
        with pytest.raises(wsync.SyncTimeout, match=r"(?s)worker 1.*A silent worker stays connected.*readmit"):
            session.scheme.wait_async()
        session.scheme.timeout = 60.0
        session.workers[1].resume()
        assert session.scheme.wait_async() is None
        assert session.workers[0].call(commands.output)[0] == 3


def test_replacements_may_connect_in_any_order_and_before_they_are_readmitted(backend: BuiltIn) -> None:
    with backend.connected(timeout=20.0) as session:
        for worker in session.workers:
            worker.kill()
        successors = [session.workers.spare() for _ in range(2)]
        for index in (1, 0):
            session.begin_join(successors[index], index)
        for index, successor in enumerate(successors):
            session.scheme.readmit(index)
            session.workers.replace(index, successor)
            successor.result()
        session.send(3)
        assert session.outputs() == [3, 3]


def test_a_slow_worker_installs_its_version_whole_after_newer_ones_to_others(backend: BuiltIn) -> None:
    with backend.connected() as session:
        session.workers[1].stop()
        scramble(session.model, 1)
        session.scheme.send_async()
        first = digest(session.model)
        for seed in range(2, 7):
            session.scheme.send(scramble(session.model, seed), worker_ids=0)
            assert session.workers[0].call(commands.digest) == digest(session.model)
        session.workers[1].resume()
        session.scheme.wait_async()
        assert session.workers[1].call(commands.digest) == first


def test_a_large_message_to_a_stopped_worker_does_not_delay_the_others(backend: BuiltIn) -> None:
    with backend.connected(make=WithExtraState) as session:
        session.workers[0].stop()
        session.model.state = bytes(16 << 20)  # more than a socket buffers
        session.post(2)
        assert session.workers[1].call(commands.receive, 20.0) is not None
        assert session.workers[1].call(commands.output)[0] == 2
        session.workers[0].resume()
        session.scheme.wait_async()
        session.model.state = "small"
        session.send(3)
        assert session.digests() == [digest(session.model)] * 2
