"""The contract, part 3: a fault ends in an error that names the worker and the cause, and the other workers go on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import wsync
import wsync.testing.commands as commands
from wsync.testing.commands import WorkerState
from wsync.testing.hooks import SHORT, TIMEOUT, BackendHooks
from wsync.testing.models import Large, Small, WithExtraState
from wsync.testing.workers import Worker, WorkerError


def _connect_again(state: WorkerState, worker_idx: int) -> None:
    state.schemes["policy"].connect(worker_idx=worker_idx)


@contextmanager
def killed_after(seconds: float, worker: Worker) -> Iterator[None]:
    """Kill ``worker`` while the block runs; the thread that does it has ended when the block has.

    That thread waits for the process on a descriptor. If it still did when the process is closed, it might read from
    the descriptor of the next process, which would have the same number.
    """
    timer = threading.Timer(seconds, worker.kill)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def in_forked_child(function: Callable[[], object]) -> str:
    """Fork this process, and call ``function`` in the child; returns the names of the classes of its error."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        outcome = ""
        try:
            function()
        except Exception as error:  # noqa: BLE001  the parent judges it
            outcome = ",".join(kind.__name__ for kind in type(error).__mro__)
        finally:
            os.write(writing, outcome.encode())
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        outcome = pipe.read()
    os.waitpid(child, 0)
    return outcome


class Faults(BackendHooks):
    """Workers that die, are silent, or refuse; weights that are damaged."""

    # --- a worker dies ---

    def test_a_killed_worker_is_named_and_the_others_have_the_update(self) -> None:
        with self.connected(3) as session:
            session.workers[1].kill()
            with pytest.raises(wsync.WorkerDied, match="worker 1") as died:
                session.update(2)
            assert set(died.value.workers) == {1} and died.value.version == 2
            assert session.outputs() == [2, 2]
            for value in range(3, 8):
                report = session.send(value)
                assert report is not None and set(report.workers) == {0, 2}
                assert session.outputs() == [value, value]
            with pytest.raises(wsync.WorkerDied, match="1"):
                session.send(8, worker_ids=1)

    @pytest.mark.parametrize("make", [Small, Large])
    def test_a_death_wakes_a_send_that_waits(self, make: Callable[[], Small]) -> None:
        with self.connected(make=make) as session:
            session.workers[1].stop()
            with killed_after(0.1, session.workers[1]), pytest.raises(wsync.WorkerDied, match="worker 1"):
                session.update(2)
            assert session.outputs() == [2]
            session.send(3)
            assert session.outputs() == [3]

    def test_a_worker_that_shuts_down_is_named(self) -> None:
        with self.connected() as session:
            assert session.workers[1].call(commands.shutdown) == []
            with pytest.raises(wsync.WorkerDied, match="worker 1"):
                session.update(2)
            session.send(3)
            assert session.workers[0].call(commands.output)[0] == 3
            assert session.workers[1].call(commands.output)[0] in (1, 2)  # weights of its own

    # --- a worker is silent ---

    def test_a_stopped_worker_times_out_and_catches_up_later(self) -> None:
        with self.connected() as session:
            victim = session.workers[1]
            session.scheme.timeout = SHORT
            victim.stop()
            with pytest.raises(wsync.SyncTimeout, match="worker 1") as late:
                session.update(2)
            assert set(late.value.workers) == {1}
            assert session.workers[0].call(commands.output)[0] == 2
            for value in (3, 4):
                session.post(value)
            session.scheme.timeout = TIMEOUT
            session.post(5)
            victim.resume()
            session.scheme.wait_async()
            assert session.outputs() == [5, 5]
            session.send(6)
            assert session.outputs() == [6, 6]

    def test_a_worker_that_does_not_connect_is_named(self) -> None:
        with self.workers(1) as workers, self.make_scheme(timeout=self.connects_within) as scheme:
            scheme.init_on_sender("policy", model=Small(), num_workers=2)
            workers[0].start(commands.join, scheme, Small, 0, "policy")
            with pytest.raises(wsync.SyncTimeout, match="1") as late:
                scheme.connect()
            assert set(late.value.workers) == {1}

    # --- a worker refuses ---

    def test_an_apply_that_raises_leaves_the_model_as_it_was(self) -> None:
        with self.connected(make=WithExtraState) as session:
            before = session.digests()
            session.model.state = "refuse 1"
            for value in range(2, 6):
                with pytest.raises(
                    wsync.WorkerFailed, match=r"(?s)worker 1.*set_extra_state.*ArithmeticError"
                ) as failed:
                    session.update(value)
                assert set(failed.value.workers) == {1} and failed.value.version == value
                assert session.digests()[1] == before[1]
                assert session.outputs() == [value, 1] and session.versions() == [value, 1]
            session.model.state = "accepted"
            for value in range(6, 10):
                session.send(value)
                assert session.outputs() == [value, value]

    # --- wrong use ---

    def test_calls_in_the_wrong_state_are_errors(self) -> None:
        with self.make_scheme(timeout=TIMEOUT) as scheme:
            for call in (scheme.send, scheme.send_async, scheme.wait_async, scheme.connect, scheme.receive):
                with pytest.raises(wsync.NotConnected):
                    call()
            with pytest.raises(RuntimeError):
                scheme.init_on_receiver("policy", model=Small())
            with pytest.raises(ValueError, match="model, weights"):
                scheme.init_on_sender("policy", model=Small(), weights=Small())
            with pytest.raises(ValueError, match="workers"):
                scheme.init_on_sender("policy", model=Small(), devices=["cpu"], num_workers=2)
            scheme.init_on_sender("policy", model=Small(), num_workers=1)
            with pytest.raises(RuntimeError, match="already"):
                scheme.init_on_sender("policy", model=Small(), num_workers=1)
            with pytest.raises(wsync.NotConnected, match="connect"):
                scheme.send()
        scheme.shutdown()

    def test_a_second_connect_of_a_worker_is_refused(self) -> None:
        with self.connected(1) as session:
            for worker_idx in (0, 1):
                with pytest.raises(WorkerError, match="already"):
                    session.workers[0].call(_connect_again, worker_idx)
            session.send(2)
            assert session.outputs() == [2]

    def test_a_forked_child_of_the_trainer_cannot_send(self) -> None:
        if not self.can_fork:
            pytest.skip("this process cannot be forked while the backend is in use")
        with self.connected() as session:
            for call in (lambda: session.send(7), lambda: session.post(7)):
                assert "NotConnected" in in_forked_child(call)
            assert session.outputs() == [1, 1]
            session.send(2)
            assert session.outputs() == [2, 2]

    # --- optional: see BackendHooks ---

    def test_a_damaged_update_is_refused(self) -> None:
        with self.connected(make=Small, **self.checksum_options) as session:
            session.update(2)
            for worker in session.workers:
                worker.stop()
            session.post(3)
            self.corrupt(session)
            for worker in session.workers:
                worker.resume()
            with pytest.raises(wsync.WorkerFailed, match="corrupt") as failed:
                session.scheme.wait_async()
            assert 1 in failed.value.workers
            for index, output in enumerate(session.outputs()):
                assert output == (2 if index in failed.value.workers else 3)
            session.update(4)
            assert session.outputs() == [4, 4]

    def test_an_update_without_room_changes_nothing(self) -> None:
        with self.connected(make=Large) as session:
            session.send(2, worker_ids=0)
            with self.starve(session), pytest.raises(wsync.WeightSyncError):
                session.update(3)
            assert session.outputs() == [2, 1]
            session.update(4)
            assert session.outputs() == [4, 4]
