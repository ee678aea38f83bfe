"""A trainer that forks children: what they inherit keeps no line open, and what they let go of ends none."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from contract_models import Small, fill
from crew import Host, RemoteError, crew

import wsync
from wsync.deadlines import deadline_in, wait_readable

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.parametrize(
        "make_scheme", ["shared_mem", "distributed", "distributed-gloo"], indirect=True
    ),  # others have these
]


@contextmanager
def forked(function: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """A forked child that has done something, and lives."""
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        function()
        os.write(theirs, b".")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(mine, 1) == b"."
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(mine)
        os.close(theirs)


def test_a_shutdown_ends_every_copy_of_a_line(make_scheme: Any) -> None:
    with crew(1) as workers, make_scheme() as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
        workers.follow(scheme, Small)
        with forked(scheme.shutdown):
            scheme.send(fill(Small(), 2))
            assert workers[0].call("receive", 20.0), "a child that let go of its copy has ended the line"
            with forked():
                workers[0].start("receive", 20.0)
                scheme.shutdown()
                with pytest.raises(RemoteError, match="shut down, or died"):
                    workers[0].result()


def train(host: Host, scheme: wsync.WeightSyncScheme) -> wsync.WeightSyncScheme:
    """In a worker: be a trainer."""
    scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
    host.schemes["policy"] = scheme
    return scheme


def leave_a_child(host: Host) -> int:
    """Fork a child, which lives on."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        signal.pause()
    return child


def test_a_death_ends_a_line_of_which_a_child_has_a_copy(make_scheme: Any) -> None:
    with crew(2) as workers:
        workers[0].start("join", workers[1].call("run", train, make_scheme()), Small, 0, "policy")
        workers[1].call("connect")
        workers[0].result()
        child = workers[1].call("run", leave_a_child)
        try:
            workers[0].start("receive", 15.0)
            workers[1].kill()
            with pytest.raises(RemoteError, match="shut down, or died"):
                workers[0].result()
        finally:
            os.kill(child, signal.SIGKILL)


def have_a_child_shut_down(host: Host) -> None:
    """Fork a child that lets go of what it has inherited, in the midst of a forward."""
    with wsync.gate():
        child = os.fork()
        if child == 0:
            host.shutdown()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


def test_a_worker_s_child_hangs_up_on_nobody(make_scheme: Any) -> None:
    model = fill(Small(), 1)
    with crew(1) as workers, make_scheme(timeout=20.0) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers.follow(scheme, Small)
        workers[0].call("run", have_a_child_shut_down)
        for value in range(2, 6):
            scheme.send(fill(model, value))
            assert workers[0].call("forward")[0] == value


@pytest.mark.parametrize("accepted", [False, True])
def test_a_shutdown_sends_away_who_waits_at_the_door(make_scheme: Any, accepted: bool) -> None:
    with crew(1) as workers, make_scheme(timeout=20.0) as scheme:
        scheme.init_on_sender("policy", model=Small(), num_workers=2)
        workers[0].start("join", scheme, Small, 0, "policy")
        assert wait_readable([scheme._role.end._lines._door.fileno()], deadline_in(20.0))
        if accepted:
            assert scheme._role.end._lines._door.accept() is None
        with forked():
            scheme.shutdown()
            with pytest.raises(RemoteError, match="not let in"):
                workers[0].result()
            with pytest.raises(RemoteError, match="shut down"):
                workers[0].call("connect")
