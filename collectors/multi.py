"""Collectors with worker processes on the trainer's machine."""

from __future__ import annotations

from typing import Any, ClassVar

from collectors.worker_collector import WorkerCollector
from collectors.workers.pool import WorkerPool


class MultiCollector(WorkerCollector):
    """Collects batches in worker processes on this machine; batches are in shared memory.

    ``MultiCollector(sync=True)`` is a ``MultiSyncCollector``: a batch has a share of every worker, and all wait for new
    weights. ``sync=False`` is a ``MultiAsyncCollector``: a batch is one worker's.

    The other arguments, and the errors, are those of ``WorkerCollector``. TypeError: ``sync`` is missing, or
    contradicts the class.
    """

    _sync: ClassVar[bool]

    def __new__(cls, *_: Any, sync: bool | None = None, **__: Any) -> MultiCollector:
        """Choose the class by ``sync``."""
        if cls is not MultiCollector:
            return super().__new__(cls)
        if sync is None:
            raise TypeError("MultiCollector needs sync=True or sync=False")
        chosen: Any = MultiSyncCollector if sync else MultiAsyncCollector
        return super().__new__(chosen)

    def __init__(self, create_env_fn: Any, policy: Any = None, *, sync: bool | None = None, **options: Any) -> None:
        if sync not in (None, self._sync):
            raise TypeError(f"{type(self).__name__} has sync={self._sync}; MultiCollector takes either")
        super().__init__(create_env_fn, policy, sync=self._sync, start=WorkerPool, **options)


class MultiSyncCollector(MultiCollector):
    """A batch has a share of every worker, with one version unless another thread updates the weights meanwhile."""

    _sync = True


class MultiAsyncCollector(MultiCollector):
    """Workers collect while the trainer learns; a batch is the next one that any worker has completed.

    A worker runs ahead of the trainer by ``run_ahead`` batches (1 by default): see ``WorkerCollector``.
    """

    _sync = False
