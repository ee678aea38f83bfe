"""Collectors: they gather experience with copies of a policy, and carry its updates to wherever those act."""

from importlib import import_module
from typing import TYPE_CHECKING

import wsync  # isort: skip  # noqa: F401  before tensordict: see wsync/lean_import.py
from collectors.base import BaseCollector
from collectors.environments.transforms import ModuleTransform
from collectors.envs import GymEnv
from collectors.multi import MultiAsyncCollector, MultiCollector, MultiSyncCollector
from collectors.ready_updaters import MultiProcessedWeightUpdater, RayWeightUpdater, VanillaWeightUpdater
from collectors.rollouts.sampled import SampledPolicy
from collectors.single import Collector
from collectors.updaters import WeightUpdaterBase

if TYPE_CHECKING:
    from collectors.ray_transform import RayModuleTransform

SyncDataCollector = Collector
MultiSyncDataCollector = MultiSyncCollector
MultiaSyncDataCollector = MultiAsyncCollector

__all__ = [
    "BaseCollector",
    "Collector",
    "GymEnv",
    "ModuleTransform",
    "MultiAsyncCollector",
    "MultiCollector",
    "MultiProcessedWeightUpdater",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "RayModuleTransform",
    "RayWeightUpdater",
    "SampledPolicy",
    "SyncDataCollector",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]

_WITH_RAY = {"RayModuleTransform": "collectors.ray_transform"}


def __getattr__(name: str) -> object:
    """What needs Ray is imported when it is asked for: Ray is slow to import, and most runs do without."""
    if name in _WITH_RAY:
        return getattr(import_module(_WITH_RAY[name]), name)
    raise AttributeError(f"module 'collectors' has no attribute '{name}'")
