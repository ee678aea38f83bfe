"""The contract, part 9: a transport's calls end at their timeout, and when the transport is closed."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from typing import Any

import pytest

import wsync
import wsync.testing.commands as commands
from wsync.testing.commands import WorkerState
from wsync.testing.hooks import SHORT, TIMEOUT, BackendHooks
from wsync.testing.models import Large, Small
from wsync.weights.packing import packed

PATIENCE = 20.0
"""Seconds after which a call counts as one that does not end."""


def _join_keeping_the_transport(state: WorkerState, scheme: Any) -> None:
    create = scheme.create_transport

    def keep(worker_idx: int | None = None) -> Any:
        state.kept["transport"] = create(worker_idx)
        return state.kept["transport"]

    scheme.create_transport = keep
    commands.join(state, scheme, Small, 0, "policy")


def _a_receive_ends(state: WorkerState) -> bool:
    """Call ``receive_weights`` while nothing is sent; return whether it ends."""
    transport: Any = state.kept.get("transport")
    if transport is None:
        return True
    strategy, (layout, buffer) = state.schemes["policy"].strategy, packed(Small())
    weights = strategy.extract_weights(dict(zip(layout.names, buffer.views, strict=True)))

    def receive() -> None:
        with suppress(Exception):  # allowed, as is an older version
            transport.receive_weights(SHORT, weights=weights, strategy=strategy)

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    thread.join(SHORT + 5.0)  # seconds; more than enough on a busy machine
    return not thread.is_alive()


def _die_in_the_set_up(state: WorkerState, scheme: Any) -> None:
    scheme.create_transport = lambda worker_idx: os.kill(os.getpid(), signal.SIGKILL)
    commands.join(state, scheme, Small, 0, "policy")


class Transports(BackendHooks):
    """What holds of any ``TransportBackend``. Workers that use shared memory have none: the tests pass."""

    def test_a_receive_ends_at_its_timeout(self) -> None:
        with self.workers(1) as workers, self.make_scheme(timeout=TIMEOUT) as scheme:
            scheme.init_on_sender("policy", model=Small(), num_workers=1)
            workers[0].start(_join_keeping_the_transport, scheme)
            scheme.connect()
            if not self.first_weights_at_connect:
                scheme.send()
            workers[0].result()
            assert workers[0].call(_a_receive_ends), "receive_weights does not end at its timeout"

    def test_close_ends_a_transfer_to_a_worker_that_does_not_read(self) -> None:
        before = set(threading.enumerate())
        with self.connected(1, Large) as session:
            session.scheme.timeout = SHORT
            session.workers[0].stop()
            with pytest.raises(wsync.WeightSyncError):
                session.update(2)  # at the deadline ``close`` is called, if ``send_weights`` still waits
            session.scheme.shutdown()
            left = {thread.name for thread in set(threading.enumerate()) - before}
            assert "wsync-transfer" not in left, "send_weights does not end when close() is called"

    def test_close_ends_a_set_up_that_waits_for_a_worker(self) -> None:
        before = set(threading.enumerate())
        with self.workers(1) as workers, self.make_scheme(timeout=TIMEOUT) as scheme:
            scheme.init_on_sender("policy", model=Small(), num_workers=1)
            workers[0].start(_die_in_the_set_up, scheme)
            with suppress(wsync.WeightSyncError):  # in shared memory nothing is set up
                scheme.connect()
            scheme.shutdown()
            left = {thread.name for thread in set(threading.enumerate()) - before}
            assert "wsync-transport-setup" not in left, "the set-up does not end when close() is called"
