"""The contract, part 4: workers that join in the place of others, and attempts to join that fail."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import wsync
import wsync.testing.commands as commands
from wsync.testing.hooks import TIMEOUT, BackendHooks
from wsync.testing.models import Small, fill
from wsync.testing.workers import WorkerError


@contextmanager
def _forked_child() -> Iterator[None]:
    """A child process of this one, which ends on leaving, or when this process ends."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the other end is closed
        os._exit(0)
    os.close(reading)
    try:
        yield
    finally:
        os.close(writing)
        os.waitpid(child, 0)


class Restarts(BackendHooks):
    """Joining, again and late."""

    def test_a_successor_joins_with_the_newest_version(self) -> None:
        with self.connected() as session:
            session.workers[1].kill()
            with pytest.raises(wsync.WorkerDied, match="worker 1"):
                session.update(2)
            session.send(3)
            assert session.restart(1) == 3
            assert session.outputs() == [3, 3]
            session.send(4)
            assert session.outputs() == [4, 4] and session.versions() == [4, 4]

    def test_a_successor_joins_while_a_forked_child_of_the_trainer_lives(self) -> None:
        """The child has copies of the trainer's descriptors, so the addresses of its sockets stay in use."""
        if not self.can_fork:
            pytest.skip("this process cannot be forked")
        with self.connected() as session, _forked_child():
            session.workers[0].kill()
            session.restart(0)
            session.send(2)
            assert session.outputs() == [2, 2]

    def test_a_successor_after_an_unnoticed_death(self) -> None:
        with self.connected(1) as session:
            session.send(2)
            session.workers[0].kill()
            assert session.restart(0) == 2
            session.send(3)
            assert session.outputs() == [3]

    def test_a_successor_gets_the_weights_of_its_predecessor(self) -> None:
        """Not those that another worker was sent since."""
        with self.connected(init={"params_map": {0: fill(Small(), 1), 1: fill(Small(), 2)}}) as session:
            session.scheme.send({0: fill(Small(), 3), 1: fill(Small(), 4)})
            session.outputs()
            session.send(5, worker_ids=1)
            session.workers[0].kill()
            session.restart(0)
            assert session.outputs() == [3, 5]

    def test_a_second_connect_of_the_sender_admits_a_successor(self) -> None:
        with self.connected() as session:
            session.workers[1].kill()
            with pytest.raises(wsync.WorkerDied):
                session.update(2)
            successor = session.workers.spare()
            session.begin_join(successor, 1)
            session.scheme.connect()
            session.scheme.send()
            successor.result()
            session.workers.replace(1, successor)
            report = session.send(3)
            assert report is not None and set(report.workers) == {0, 1}
            assert session.outputs() == [3, 3]

    def test_a_successor_after_updates_of_several_models(self) -> None:
        """An aborted update reaches no worker, a committed one also a worker that was away."""
        with self.connected() as session:
            session.send(2)
            session.workers[1].kill()
            with pytest.raises(wsync.WorkerDied):
                wsync.synchronize({session.scheme: fill(session.model, 3)})
            session.restart(1)
            assert session.outputs() == [2, 2]
            session.workers[1].kill()
            with pytest.raises(wsync.WorkerDied):
                session.update(4)
            wsync.synchronize({session.scheme: fill(session.model, 5)})
            session.restart(1)
            assert session.outputs() == [5, 5]
            session.send(6)
            assert session.outputs() == [6, 6]

    def test_a_worker_that_gave_up_can_connect_again(self) -> None:
        with self.workers(1) as workers, self.make_scheme(timeout=TIMEOUT) as scheme:
            scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
            hasty = pickle.loads(pickle.dumps(scheme))
            hasty.timeout = 0.2
            with pytest.raises(WorkerError) as gave_up:
                workers[0].call(commands.join, hasty, Small, 0, "policy")
            assert "SyncTimeout" in gave_up.value.kinds
            workers[0].start(commands.join, scheme, Small, 0, "policy")
            scheme.connect()
            scheme.send()
            workers[0].result()
            assert workers[0].call(commands.output)[0] == 1

    def test_a_worker_that_has_connected_does_not_wait_for_the_others(self) -> None:
        with self.workers(2) as workers, self.make_scheme(timeout=TIMEOUT) as scheme:
            scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=2)
            connecting = threading.Thread(target=scheme.connect)
            connecting.start()
            workers[0].call(commands.join, scheme, Small, 0, "policy")
            assert connecting.is_alive()  # worker 1 has not begun
            workers[1].call(commands.join, scheme, Small, 1, "policy")
            connecting.join(TIMEOUT)
            assert not connecting.is_alive()

    def test_a_worker_index_that_does_not_exist_or_is_taken_is_refused(self) -> None:
        with self.workers(3) as workers, self.make_scheme(timeout=TIMEOUT) as scheme:
            scheme.init_on_sender("policy", model=Small(), num_workers=2)
            workers[2].start(commands.join, scheme, Small, 5, "policy")
            workers[0].start(commands.join, scheme, Small, 0, "policy")
            connecting = threading.Thread(target=scheme.connect)
            connecting.start()
            with pytest.raises(WorkerError, match=r"5.*out of range"):
                workers[2].result()
            workers[0].result()
            workers[2].start(commands.join, scheme, Small, 0, "policy")
            with pytest.raises(WorkerError, match=r"0.*taken"):
                workers[2].result()
            workers[1].call(commands.join, scheme, Small, 1, "policy")
            connecting.join(TIMEOUT)
            assert not connecting.is_alive()
