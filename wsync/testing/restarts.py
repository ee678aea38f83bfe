"""The contract, part 4: workers that join in the place of others, and attempts to join that fail."""

from __future__ import annotations

import threading

import pytest

import wsync
import wsync.testing.commands as commands
from wsync.testing.hooks import TIMEOUT, BackendHooks
from wsync.testing.models import Small, fill
from wsync.testing.workers import WorkerError


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
