"""Collectors that reach their workers over TCP, RPC or Ray."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from collectors.distributed.tcp import DistributedCollector, is_worker, join_trainer
from collectors.updaters import DistributedWeightUpdater, RPCWeightUpdater

if TYPE_CHECKING:
    from collectors.distributed.ray_collector import RayCollector
    from collectors.distributed.rpc import RPCCollector

__all__ = [
    "DistributedCollector",
    "DistributedWeightUpdater",
    "RPCCollector",
    "RPCWeightUpdater",
    "RayCollector",
    "is_worker",
    "join_trainer",
]

# Imported on first use: Ray is slow to import, and RPC is not needed by most programs.
_LAZY = {"RPCCollector": "collectors.distributed.rpc", "RayCollector": "collectors.distributed.ray_collector"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(import_module(_LAZY[name]))[name]
