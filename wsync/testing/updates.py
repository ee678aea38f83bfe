"""The contract, part 2: versions, reports, sends that do not wait, and forwards that are never torn."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import wsync
import wsync.testing.commands as commands
from wsync.testing.commands import WorkerState
from wsync.testing.hooks import TIMEOUT, BackendHooks
from wsync.testing.models import Small, digest, fill

FORWARDS = 400
"""Forwards of each worker while updates are sent."""


class TwoReads(Small):
    """Reads its parameter twice in a forward, with work between: weights of two versions would differ.

    The output is the smallest and the largest value that was read.
    """

    def __init__(self) -> None:
        super().__init__(4096)

    def forward(self) -> torch.Tensor:
        first = self.weight.detach().clone()
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        both = torch.cat([first, self.weight.detach()])
        return torch.stack([both.min(), both.max()])


def _forwards(state: WorkerState, count: int) -> tuple[int, bool, int]:
    """Run forwards: how many were torn, whether their versions never went back, and how many versions they saw.

    There are ``count`` forwards, or more, until one has seen another version than the first.
    """
    seen: list[list[float]] = []
    while len(seen) < count or seen[-1] == seen[0]:
        seen.append(state.models["policy"]().tolist())
    torn = sum(low != high for low, high in seen)
    lows = [low for low, _ in seen]
    return torn, lows == sorted(lows), len(set(lows))


def _hold_gate(state: WorkerState) -> None:
    """Hold the gate in a thread, as a forward does that takes long."""
    turn = threading.Barrier(2)

    def forward() -> None:
        with wsync.gate():
            turn.wait()  # it is entered
            turn.wait()  # until it is to end

    thread = threading.Thread(target=forward)
    thread.start()
    turn.wait()
    state.kept["forward"] = turn, thread


def _leave_gate(state: WorkerState) -> None:
    turn, thread = state.kept.pop("forward")
    turn.wait()
    thread.join()


class TwoProducts(nn.Module):
    """Multiplies two parameters, which ``torch.autocast`` casts to bfloat16 and keeps cast until its context ends.

    The output is the smallest and the largest value of both products.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(32, 32)) for _ in range(2))

    def forward(self) -> torch.Tensor:
        one = torch.eye(32)
        first = torch.mm(one, self.first)
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        both = torch.cat([first, torch.mm(one, self.second)])
        return torch.stack([both.min(), both.max()])


def _output_in_autocast(state: WorkerState, last: bool = False) -> list[float]:
    """The output of a forward in one ``torch.autocast`` context, which is left after the last one."""
    if "autocast" not in state.kept:
        state.kept["autocast"] = torch.autocast("cpu", torch.bfloat16)
        state.kept["autocast"].__enter__()
    output = state.models["policy"]()
    assert output.dtype is torch.bfloat16
    if last:
        state.kept.pop("autocast").__exit__(None, None, None)
    return output.tolist()


class Updates(BackendHooks):
    """What one update after the other means."""

    def test_an_update_that_arrives_in_a_forward_is_installed_when_that_ends(self) -> None:
        """Although no other forward follows."""
        with self.connected(1) as session:
            (worker,) = session.workers
            for value in range(2, 12):
                worker.call(_hold_gate)
                session.scheme.send_async(fill(session.model, value))
                assert worker.call(commands.plain_digest) != digest(session.model)
                worker.call(_leave_gate)
                session.scheme.wait_async()
                assert worker.call(commands.plain_digest) == digest(session.model)

    def test_after_a_send_every_forward_uses_the_new_version(self) -> None:
        with self.connected() as session:
            before = session.scheme.metrics.updates
            for version in range(2, 40):
                report = session.send(version)
                assert report is not None and report.version == session.scheme.version == version
                if self.acknowledged:  # installed, although no forward has run
                    assert session.workers.call(commands.plain_digest) == [digest(session.model)] * 2
                assert session.outputs() == [version, version]
            assert session.versions() == [39, 39]
            assert session.scheme.metrics.updates == before + 38

    def test_a_send_waits_for_the_acknowledgement(self) -> None:
        """It ends at its deadline while the worker is stopped, the first one and one that follows another send."""
        if not self.acknowledged:
            pytest.skip("a finished send does not mean that workers have acknowledged it")
        with self.connected(1) as session:
            (worker,) = session.workers
            for value in (2, 4):
                session.scheme.timeout = 0.1
                worker.stop()
                with pytest.raises(wsync.SyncTimeout, match="worker 0"):
                    session.send(value)
                worker.resume()
                session.scheme.timeout = TIMEOUT
                session.send(value + 1)
                assert session.outputs() == [value + 1]

    def test_a_report_accounts_for_every_worker_and_for_all_of_the_time(self) -> None:
        with self.connected() as session, self.second_model(session, Small, "critic") as critic:
            reports = [session.send(2), session.send(3), session.send(4, worker_ids=1), session.update(5)]
            reports += wsync.synchronize({session.scheme: None, critic.scheme: None}).values()
            assert [dict(report.workers) for report in reports[:4] if report is not None] == [
                {0: 2, 1: 2},
                {0: 3, 1: 3},
                {1: 4},
                {0: 5, 1: 5},
            ]
            for report in reports:
                assert report is not None and report.bytes >= 16 and report.seconds > 0
                assert sum(report.phases.values()) == pytest.approx(report.seconds, rel=0.0, abs=1e-9), report

    def test_send_async_copies_the_weights_and_wait_async_waits(self) -> None:
        with self.connected() as session:
            assert session.scheme.wait_async() is None  # no update is under way
            for value in range(2, 20):
                session.post(value)
            fill(session.model, -1)
            report = session.scheme.wait_async()
            assert report is not None and report.version == 19
            assert session.workers.call(commands.plain_digest) == [digest(fill(session.model, 19))] * 2
            assert session.outputs() == [19, 19]
            session.post(20, worker_ids=0)
            session.post(21, worker_ids=1)
            session.scheme.wait_async()
            assert session.outputs() == [20, 21]

    def test_with_sync_false_send_does_not_wait(self) -> None:
        """Not even for a worker that is stopped."""
        with self.connected(1, sync=False) as session:
            (worker,) = session.workers
            for value in (2, 3):  # the first one may take another path than the next
                worker.stop()
                assert session.send(value) is None
                worker.resume()
                session.scheme.wait_async()
                assert worker.call(commands.plain_digest) == digest(session.model)
                assert session.outputs() == [value]

    def test_acknowledgements_that_are_not_waited_for_do_not_block_a_worker(self) -> None:
        with self.connected(1) as session:
            for version in range(2, 602):  # more than a socket buffers
                session.scheme.send_async()
                assert session.scheme.version == version
            assert session.update(7).version == 602
            assert session.outputs() == [7]

    def test_no_forward_is_torn_under_continuous_sends(self) -> None:
        with self.connected(make=TwoReads) as session:
            done = threading.Event()

            def train() -> None:
                value = 2
                while not done.is_set():
                    session.send(value)
                    value += 1

            trainer = threading.Thread(target=train)
            trainer.start()
            try:
                results: list[Any] = session.workers.call(_forwards, FORWARDS)
            finally:
                done.set()
                trainer.join()
            for torn, in_order, versions in results:
                assert torn == 0 and in_order and versions > 1

    def test_forwards_in_one_autocast_context_use_the_new_version(self) -> None:
        with self.connected(make=TwoProducts) as session:
            for value in range(2, 40):
                session.send(value)
                assert session.workers.call(_output_in_autocast, value == 39) == [[float(value)] * 2] * 2
