"""The table of backends that the contract holds: a new backend is one line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import wsync

BACKENDS: dict[str, Callable[..., wsync.WeightSyncScheme]] = {
    "shared_mem": partial(wsync.SharedMemWeightSyncScheme, timeout=60.0),
    "shared_mem-published": partial(wsync.SharedMemWeightSyncScheme, timeout=60.0, acknowledge="published"),
    "multiprocess": partial(wsync.MultiProcessWeightSyncScheme, timeout=60.0),
    "distributed": partial(wsync.DistributedWeightSyncScheme, timeout=60.0),
    "distributed-gloo": partial(wsync.DistributedWeightSyncScheme, timeout=60.0, shared_memory=False),
    "rpc": partial(wsync.RPCWeightSyncScheme, timeout=60.0),
    "ray": partial(wsync.RayWeightSyncScheme, timeout=60.0),
}

WORKERS = {"rpc": "rpc", "ray": "ray"}  # of another kind than plain processes

ENDS_OF_DISTRIBUTED = ("distributed-gloo", "ray")  # as well: not once more what stands above the ends
