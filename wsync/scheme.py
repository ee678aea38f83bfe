"""A scheme owns the lifecycle of one model's weights, on either end; each file adds a part of it to the one before.

    roles.py      what can be seen of it
    setup.py      init, on either end: nothing is sent
    lifecycle.py  connect, updates, shutdown
    legacy.py     the older API's names

The two ends are two roles: a scheme that was initialised on the sender travels to a worker as a pickle that holds its
options and an address, and takes on the other role there.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Self

from wsync.legacy import OlderApi
from wsync.metrics import SyncMetrics

BACKENDS = {
    "shared_mem": "wsync.backends.shared_mem:SharedMemWeightSyncScheme",
    "multiprocess": "wsync.backends.multiprocess:MultiProcessWeightSyncScheme",
    "distributed": "wsync.backends.distributed:DistributedWeightSyncScheme",
    "rpc": "wsync.backends.rpc:RPCWeightSyncScheme",
    "ray": "wsync.backends.ray:RayWeightSyncScheme",
    "ray_module_transform": "wsync.backends.ray:RayModuleTransformScheme",
    "none": "wsync.backends.none:NoWeightSyncScheme",
}


class WeightSyncScheme(OlderApi):
    """Carries one model's weights from a trainer to its workers.

    Args:
        strategy: the format in which weights are handed out, ``"tensordict"`` or ``"state_dict"``. Either is accepted.
        sync: whether ``send`` waits until its promise holds; otherwise it returns at once, and ``wait_async`` waits.
        timeout: seconds for ``connect`` and for ``send``; None for no limit.
        bind: whether a worker's parameters may be bound to received memory without a copy. Say False for a worker
            that trains.
    """

    def __getstate__(self) -> dict[str, Any]:
        """Options and the way to the sender: no weights, no model, no role."""
        return {**self.__dict__, "_role": None, "metrics": SyncMetrics(self.name)}

    def __enter__(self) -> Self:
        """Use as a context manager: shut down at its end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Shut down."""
        self.shutdown()

    @classmethod
    def from_backend(cls, name: str, **options: Any) -> WeightSyncScheme:
        """The scheme called ``name`` in configs, with ``options``.

        Raises:
            ValueError: no such backend; lists those that there are.
        """
        if name not in BACKENDS:
            raise ValueError(f"unknown backend {name!r}: choose one of {', '.join(sorted(BACKENDS))}")
        module, scheme = BACKENDS[name].split(":")
        return getattr(import_module(module), scheme)(**options)
