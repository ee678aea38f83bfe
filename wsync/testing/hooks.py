"""What a backend brings to the contract suite, and how its tests begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import pytest
from torch import nn

import wsync
from wsync.testing.models import Small, fill
from wsync.testing.session import Session, connect_all
from wsync.testing.workers import WorkerGroup, WorkerPool

TIMEOUT = 60.0
"""Seconds for ``connect`` and ``send`` where a test does not look at timeouts."""

SHORT = 0.5
"""Seconds until a send gives up, where a worker is made silent."""


class BackendHooks:
    """What the author of a backend overrides.

    Attributes:
        pool_type: how workers are started. A backend with workers that are not plain processes brings a subclass.
        first_weights_at_connect: whether ``connect`` delivers the first weights; else the first ``send`` does.
        acknowledged: whether a finished ``send`` means that every worker has installed the update; else that every
            forward that starts from then on uses it.
        connects_within: seconds in which a worker that is there is connected.
        can_fork: whether this process may be forked while the backend is in use.
        checksum_options: for ``make_scheme``, where ``corrupt`` is overridden: they turn checksums on.
    """

    pool_type: ClassVar[type[WorkerPool]] = WorkerPool
    first_weights_at_connect: ClassVar[bool] = True
    acknowledged: ClassVar[bool] = True
    connects_within: ClassVar[float] = SHORT
    can_fork: ClassVar[bool] = True
    checksum_options: ClassVar[Mapping[str, Any]] = {}
    pool: ClassVar[WorkerPool]

    def make_scheme(self, **options: Any) -> wsync.WeightSyncScheme:
        """Make a scheme of the backend. The only hook that has to be overridden.

        Args:
            options: the options of ``WeightSyncScheme``: ``timeout``, ``strategy``, ``sync``, ``initiator`` and others.
                Tests that need one that the scheme does not take are skipped.
        """
        raise NotImplementedError

    def corrupt(self, session: Session) -> None:
        """Damage a byte of the update that was just sent, for worker 1 or for every worker.

        Called once, on the test's thread, while all workers are stopped: none has read the update. ``send_weights``
        may not have returned: wait until the update is stored, e.g. until it equals ``session.model.state_dict()``.
        Change a value of a tensor; padding of a file format has no effect. The default skips the test: the backend has
        no means to damage an update.
        """
        pytest.skip("this backend does not say how an update is damaged: it has no hook `corrupt`")

    def starve(self, session: Session) -> AbstractContextManager[None]:
        """Take away the room (memory, disk) that the next update needs.

        Called once, on the test's thread. A ``send`` inside the context is to raise ``WeightSyncError``. The default
        skips the test.
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
    def connected(
        self,
        count: int = 2,
        make: Callable[[], nn.Module] = Small,
        *,
        model_id: str = "policy",
        init: dict[str, Any] | None = None,
        **options: Any,
    ) -> Iterator[Session]:
        """A sender and ``count`` workers that have its first weights, which are ones.

        ``make`` makes the sender's model and each worker's; ``init`` is for ``init_on_sender`` instead of the model;
        ``options`` are for ``make_scheme``.
        """
        with self.workers(count) as workers, self._session(workers, make, model_id, init, options) as session:
            yield session

    def second_model(
        self, first: Session, make: Callable[[], nn.Module], model_id: str
    ) -> AbstractContextManager[Session]:
        """Another model, with a scheme of its own, of the workers of ``first``."""
        return self._session(first.workers, make, model_id, None, {})

    @contextmanager
    def _session(
        self,
        workers: WorkerGroup,
        make: Callable[[], nn.Module],
        model_id: str,
        init: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> Iterator[Session]:
        model = fill(make(), 1)
        with self.make_scheme(**{"timeout": TIMEOUT, **options}) as scheme:
            scheme.init_on_sender(model_id, num_workers=len(workers), **({"model": model} if init is None else init))
            session = Session(scheme, workers, model, make, model_id)
            connect_all(session, first_weights_at_connect=self.first_weights_at_connect)
            yield session
