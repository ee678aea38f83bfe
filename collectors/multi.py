"""Collectors with worker processes on the trainer's machine: synchronous, and asynchronous."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Unpack

from collectors.crew import CrewCollector, CrewOptions
from collectors.making import EnvMaker
from collectors.workers.processes import ProcessPool


class MultiCollector(CrewCollector):
    """Gathers batches in worker processes, each with its own environments and its own copy of the policy.

    ``MultiCollector(sync=True)`` is a ``MultiSyncCollector``, ``sync=False`` a ``MultiAsyncCollector``.
    Batches come through shared memory.

    Args:
        create_env_fn: one function per worker; each makes an environment (lambdas are fine).
        policy: a module that reads "observation" and writes "action"; or any function of a TensorDict; None acts at
            random. Workers get copies.
        sync: whether all workers wait for each other, and for new weights.
        options: as ``CrewCollector``.

    Raises:
        TypeError: neither ``sync=True`` nor ``sync=False``, or another than the class says; else as ``CrewCollector``.
    """

    _sync: ClassVar[bool]

    def __new__(cls, *_: Any, sync: bool | None = None, **__: Any) -> MultiCollector:
        """Choose the class that ``sync`` says."""
        if cls is not MultiCollector:
            return super().__new__(cls)
        if sync is None:
            raise TypeError("MultiCollector needs sync=True or sync=False")
        chosen: Any = MultiSyncCollector if sync else MultiAsyncCollector
        return super().__new__(chosen)

    def __init__(
        self,
        create_env_fn: EnvMaker | Sequence[EnvMaker],
        policy: Any = None,
        *,
        sync: bool | None = None,
        **options: Unpack[CrewOptions],
    ) -> None:
        if sync not in (None, self._sync):
            raise TypeError(f"{type(self).__name__} has sync={self._sync}; MultiCollector takes either")
        super().__init__(create_env_fn, policy, sync=self._sync, start=ProcessPool, **options)


class MultiSyncCollector(MultiCollector):
    """All workers gather their share of a batch, then wait: it is of one version, unless a thread updates meanwhile."""

    _sync = True


class MultiAsyncCollector(MultiCollector):
    """Workers go on while the trainer learns; a batch is the next one that any worker has finished."""

    _sync = False
