"""A sender and its connected workers, as most tests of the contract begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

import wsync
import wsync.testing.commands as commands
from wsync.testing.models import fill
from wsync.testing.workers import ANSWER_TIMEOUT, Worker, WorkerGroup


@dataclass
class Session:
    """A sender with workers that are connected and have version 1.

    Attributes:
        scheme: on the sender.
        workers: one for each index.
        model: the sender's.
        make: makes a worker's model.
        model_id: the model's name.
    """

    scheme: wsync.WeightSyncScheme
    workers: WorkerGroup
    model: Any
    make: Callable[[], nn.Module]
    model_id: str

    def send(self, value: float, **options: Any) -> wsync.SyncReport | None:
        """Fill the model with ``value``, and send it."""
        return self.scheme.send(fill(self.model, value), **options)

    def post(self, value: float, **options: Any) -> None:
        """Fill the model with ``value``, and send it without waiting."""
        self.scheme.send_async(fill(self.model, value), **options)

    def update(self, value: float) -> wsync.SyncReport:
        """``post``, and wait until every worker has acknowledged: also where ``send`` does not wait for that."""
        self.post(value)
        report = self.scheme.wait_async()
        assert report is not None
        return report

    def outputs(self) -> list[float]:
        """The first output of a forward in each worker that is alive."""
        return [output[0] for output in self.workers.call(commands.output, self.model_id)]

    def digests(self) -> list[dict[str, Any]]:
        """The weights of each worker that is alive."""
        return self.workers.call(commands.digest, self.model_id)

    def versions(self) -> list[int]:
        """The version of each worker that is alive."""
        return self.workers.call(commands.version, self.model_id)

    def begin_join(self, worker: Worker, index: int) -> None:
        """Have a worker initialise its end as worker ``index`` and connect; its ``result`` is the version it has."""
        worker.start(commands.join, self.scheme, self.make, index, self.model_id)

    def restart(self, index: int) -> int:
        """Have another process join in the place of worker ``index``, which has ended; returns its version."""
        successor = self.workers.spare()
        self.begin_join(successor, index)
        self.scheme.readmit(index)
        self.workers.replace(index, successor)
        return successor.result()


def connect_all(session: Session, *, first_weights_at_connect: bool) -> None:
    """Connect both ends, deliver the first weights, and have each worker see them.

    Args:
        session: initialised on the sender.
        first_weights_at_connect: whether ``connect`` delivers the first weights; else the first ``send`` does.
    """
    scheme, workers = session.scheme, session.workers
    for index, worker in enumerate(workers):
        session.begin_join(worker, index)
    scheme.connect()
    if first_weights_at_connect or scheme.weights is None:
        workers.results()
        return
    scheme.send()
    workers.results()
    workers.call(commands.receive, ANSWER_TIMEOUT, session.model_id)  # seen, as elsewhere after connect
