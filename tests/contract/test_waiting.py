"""``send_async``, ``wait_async`` and ``pull``: every acknowledgement is waited for once, and none is lost."""

from __future__ import annotations

import pytest
from backends import BuiltIn

import wsync
from wsync.testing import commands
from wsync.testing.hooks import TIMEOUT
from wsync.testing.models import Small, WithExtraState, digest, fill


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
        report = session.scheme.wait_async()  # of version 5, if the error came so soon that `send_async` has raised it
        assert report is None or report.version == 5
        assert session.workers[1].call(commands.version) == 5


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
        successors = [session.workers.replace(index) for index in range(2)]
        for index in (1, 0):
            session.begin_join(successors[index], index)
        for index, successor in enumerate(successors):
            session.scheme.readmit(index)
            successor.result()
        session.send(3)
        assert session.outputs() == [3, 3]


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


def test_a_worker_installs_the_newest_version_when_it_pulls(backend: BuiltIn) -> None:
    """``send`` waits for no worker; a version that was not pulled is skipped; a replacement pulls, too."""
    with backend.connected(initiator="receiver", max_staleness=3) as session:  # of which none is further behind
        for value in (2, 3, 4):
            report = session.send(value)
            assert report is not None and report.version == value
            assert session.outputs() == [1, 1]
        assert session.workers[0].call(commands.pull) == 4
        assert session.outputs() == [4, 1]
        session.send(5)
        for _ in range(2):  # the second time there is no newer one
            assert session.workers.call(commands.pull) == [5, 5]
        session.workers[1].kill()
        assert session.workers[0].call(commands.pull) == 5  # the sender has read all messages, the death's too
        with pytest.raises(wsync.WorkerDied, match="worker 1"):
            session.send(6)
        version = session.scheme.version
        assert session.restart(1) == version
        session.send(7)
        assert session.outputs() == [5, 6]
        assert session.workers.call(commands.pull) == [version + 1] * 2


def test_a_worker_of_a_connect_that_failed_takes_the_first_weights(backend: BuiltIn) -> None:
    """There was no layout yet when it connected."""
    with backend.workers(2) as workers, backend.make_scheme(timeout=1.0) as scheme:
        scheme.init_on_sender("policy", num_workers=2)
        workers[0].start(commands.join, scheme, Small, 0, "policy")
        with pytest.raises(wsync.SyncTimeout, match=r"worker\(s\) 1 did not connect"):
            scheme.connect()
        scheme.timeout = TIMEOUT
        workers[1].start(commands.join, scheme, Small, 1, "policy")
        scheme.connect(weights=fill(Small(), 4))
        for worker in workers:
            worker.result()
            assert worker.call(commands.output)[0] == 4
