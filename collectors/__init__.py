"""Collectors: they gather experience with copies of a policy, and carry its updates to wherever those act."""

from collectors.base import BaseCollector
from collectors.envs import GymEnv
from collectors.multi import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from collectors.single import Collector

SyncDataCollector = Collector
MultiSyncDataCollector = MultiSyncCollector
MultiaSyncDataCollector = MultiAsyncCollector

__all__ = [
    "BaseCollector",
    "Collector",
    "GymEnv",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "SyncDataCollector",
]
