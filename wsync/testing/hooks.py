"""What a backend brings to the contract suite, and how its tests begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from torch import nn

import wsync
import wsync.testing.commands as commands
from wsync.testing.models import Small, fill
from wsync.testing.workers import ANSWER_TIMEOUT, Worker, WorkerGroup, WorkerPool

TIMEOUT = 60.0
"""Seconds for ``connect`` and ``send`` where a test does not look at timeouts."""

SHORT = 0.5
"""Seconds until a send gives up, where a worker is made silent."""


@dataclass
class Session:
    """A sender of the model ``model_id`` with workers that are connected and have version 1; ``make`` made each one's.

    What is asked of the workers is asked of those that are alive.
    """

    scheme: wsync.WeightSyncScheme
    workers: WorkerGroup
    model: Any
    make: Callable[[], Any]
    model_id: str

    def send(self, value: float, **options: Any) -> wsync.SyncReport | None:
        """Fill the model with ``value``, and send it."""
        return self.scheme.send(fill(self.model, value), **options)

    def post(self, value: float, **options: Any) -> None:
        """Fill the model with ``value``, and send it without waiting."""
        self.scheme.send_async(fill(self.model, value), **options)

    def update(self, value: float) -> wsync.SyncReport | None:
        """``post``, and wait until every worker has acknowledged: also where ``send`` does not wait for that."""
        self.post(value)
        return self.scheme.wait_async()

    def outputs(self) -> list[float]:
        """The first output of a forward in each worker."""
        return [output[0] for output in self.workers.call(commands.output, self.model_id)]

    def digests(self, *, in_gate: bool = True) -> list[dict[str, Any]]:
        """The weights of each worker."""
        return self.workers.call(commands.digest, self.model_id, in_gate=in_gate)

    def versions(self) -> list[int]:
        """The version of each worker."""
        return self.workers.call(commands.version, self.model_id)

    def begin_join(self, worker: Worker, index: int) -> None:
        """Have a worker initialise its end as worker ``index`` and connect; its ``result`` is the version it has."""
        worker.start(commands.join, self.scheme, self.make, index, self.model_id)

    def restart(self, index: int) -> int:
        """Have another process join in the place of worker ``index``, which has ended; returns its version."""
        successor = self.workers.replace(index)
        self.begin_join(successor, index)
        self.scheme.readmit(index)
        return successor.result()


class BackendHooks:
    """What the author of a backend overrides.

    Attributes:
        pool_type: how workers are started. A backend with workers that are not plain processes brings a subclass.
        connects_within: seconds in which a worker that is there is connected.
    """

    pool_type: ClassVar[type[WorkerPool]] = WorkerPool
    connects_within: ClassVar[float] = SHORT
    pool: ClassVar[WorkerPool]

    def make_scheme(self, **options: Any) -> wsync.WeightSyncScheme:
        """Make a scheme, with options of ``WeightSyncScheme``. The only hook that has to be overridden."""
        raise NotImplementedError

    def corrupt(self, session: Session) -> None:
        """Damage a byte of the update that was just sent, for worker 1 or for every worker.

        Called while all workers are stopped: none has read the update. ``send_weights`` may not have returned: wait
        until the update is stored, e.g. until it equals ``session.model.state_dict()``. Change a value of a tensor;
        padding of a file format has no effect. The default skips the test.
        """
        pytest.skip("this backend does not say how an update is damaged: it has no hook `corrupt`")

    def starve(self, session: Session) -> AbstractContextManager[None]:
        """Take away the room (memory, disk) that an update needs: ``send`` is to raise ``WeightSyncError``.

        The default skips the test.
        """
        pytest.skip("this backend does not say how it runs out of room: it has no hook `starve`")

    # --- for the tests ---

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _make_pool(cls) -> Iterator[None]:
        """All tests of the class share their workers."""
        cls.pool = cls.pool_type()
        yield
        cls.pool.close()

    def workers(self, count: int) -> AbstractContextManager[WorkerGroup]:
        """Workers that have no scheme yet."""
        return self.pool.group(count)

    @contextmanager
    def connected(self, count: int = 2, make: Callable[[], nn.Module] = Small, **options: Any) -> Iterator[Session]:
        """``join``, with ``count`` workers of its own."""
        with self.workers(count) as workers, self.join(workers, make, **options) as session:
            yield session

    @contextmanager
    def join(self, workers: WorkerGroup, *args: Any, **options: Any) -> Iterator[Session]:
        """``begin``, and shut the scheme down."""
        session = self.begin(workers, *args, **options)
        with session.scheme:
            yield session

    def begin(
        self,
        workers: WorkerGroup,
        make: Callable[[], nn.Module] = Small,
        model_id: str = "policy",
        *,
        init: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Session:
        """Return a sender of a model that ``make`` makes, and ``workers`` that have its first weights, which are ones.

        They may have the models of other senders. ``init``: for ``init_on_sender``, instead of the model; ``options``:
        for ``make_scheme``.
        """
        with ExitStack() as failed:
            scheme = failed.enter_context(self.make_scheme(**{"timeout": TIMEOUT, **options}))
            model = fill(make(), 1)
            session = Session(scheme, workers, model, make, model_id)
            scheme.init_on_sender(model_id, num_workers=len(workers), **({"model": model} if init is None else init))
            for index, worker in enumerate(workers):
                session.begin_join(worker, index)
            scheme.connect()
            late = not scheme.delivers_at_connect and scheme.weights is not None
            if late:
                scheme.send()
                scheme.wait_async()
            workers.results()
            if scheme.initiator == "receiver":
                workers.call(commands.pull, TIMEOUT, model_id)
            elif late:
                workers.call(commands.receive, ANSWER_TIMEOUT, model_id)  # seen, as elsewhere after connect
            failed.pop_all()
        return session
