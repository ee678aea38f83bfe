"""Collectors of experience, which act with copies of a policy and deliver its updates to them."""

from importlib import import_module
from typing import TYPE_CHECKING

from wsync import missing_extra

try:
    import cloudpickle  # noqa: F401
    import gymnasium  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_extra(error, "collectors") from error

from collectors.base import BaseCollector
from collectors.environments.transforms import ModuleTransform
from collectors.environments.vector import ActionMask, PartialObservation
from collectors.envs import GymEnv
from collectors.rollouts.sampled import SampledPolicy
from collectors.single import Collector
from collectors.updaters import (
    MultiProcessedWeightUpdater,
    RayWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from collectors.worker_collector import MultiAsyncCollector, MultiCollector, MultiSyncCollector

if TYPE_CHECKING:
    from collectors.ray_transform import RayModuleTransform

SyncDataCollector = Collector
MultiSyncDataCollector = MultiSyncCollector
MultiaSyncDataCollector = MultiAsyncCollector

__all__ = [
    "ActionMask",
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
    "PartialObservation",
    "RayModuleTransform",
    "RayWeightUpdater",
    "SampledPolicy",
    "SyncDataCollector",
    "VanillaWeightUpdater",
    "WeightUpdaterBase",
]


def __getattr__(name: str) -> object:
    """Import what needs Ray on first use: most programs do not."""
    if name == "RayModuleTransform":
        return import_module("collectors.ray_transform").RayModuleTransform
    raise AttributeError(f"module 'collectors' has no attribute '{name}'")
