"""Structured configs of the schemes, for Hydra's ``ConfigStore``."""

from __future__ import annotations

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf


@dataclass
class SharedMemConfig:
    """``SharedMemWeightSyncScheme``."""

    _target_: str = "wsync.SharedMemWeightSyncScheme"
    strategy: str = "tensordict"
    auto_register: bool = True
    sync: bool = True
    per_worker_weights: bool = False
    timeout: float | None = 60.0
    acknowledge: str = "published"
    bind: bool = True
    checksum: bool = False


@dataclass
class MultiProcessConfig:
    """``MultiProcessWeightSyncScheme``."""

    _target_: str = "wsync.MultiProcessWeightSyncScheme"
    strategy: str = "tensordict"
    sync: bool = True
    timeout: float | None = 60.0
    checksum: bool = False


@dataclass
class DistributedConfig:
    """``DistributedWeightSyncScheme``."""

    _target_: str = "wsync.DistributedWeightSyncScheme"
    backend: str = "gloo"
    sync: bool = True
    strategy: str = "tensordict"
    timeout: float | None = 60.0
    host: str = "127.0.0.1"
    bind: bool = True
    checksum: bool | None = None
    shared_memory: bool = True


@dataclass
class RPCConfig:
    """``RPCWeightSyncScheme``."""

    _target_: str = "wsync.RPCWeightSyncScheme"
    strategy: str = "tensordict"
    backend: str = "gloo"
    sync: bool = True
    timeout: float | None = 60.0
    host: str = "127.0.0.1"
    bind: bool = True
    checksum: bool | None = None
    shared_memory: bool = True
    trainer: str = "trainer"


@dataclass
class RayConfig:
    """``RayWeightSyncScheme``."""

    _target_: str = "wsync.RayWeightSyncScheme"
    strategy: str = "tensordict"
    backend: str = "gloo"
    sync: bool = True
    timeout: float | None = 60.0
    host: str = "127.0.0.1"
    bind: bool = True
    checksum: bool | None = None
    shared_memory: bool = True


@dataclass
class RayModuleTransformConfig(RayConfig):
    """``RayModuleTransformScheme``."""

    _target_: str = "wsync.RayModuleTransformScheme"


@dataclass
class NoneConfig:
    """``NoWeightSyncScheme``."""

    _target_: str = "wsync.NoWeightSyncScheme"


CONFIGS: dict[str, type] = {
    "shared_mem": SharedMemConfig,
    "multiprocess": MultiProcessConfig,
    "distributed": DistributedConfig,
    "rpc": RPCConfig,
    "ray": RayConfig,
    "ray_module_transform": RayModuleTransformConfig,
    "none": NoneConfig,
}


def store_once(group: str | None, name: str, node: type) -> None:
    """Put `node` into Hydra's ConfigStore; again is harmless, another one of the same name a ValueError.

    The store itself would overwrite the first in silence.
    """
    store = ConfigStore.instance()
    present = store.repo.get(group, {}) if group else store.repo
    if f"{name}.yaml" not in present:
        store.store(group=group, name=name, node=node)
    elif OmegaConf.get_type(present[f"{name}.yaml"].node) is not node:
        raise ValueError(f"the config store has another {group or ''}/{name} already")


def register_configs() -> None:
    """Put ``weight_sync/base_<name>`` into the store, once; ValueError as ``store_once``."""
    for name, config in CONFIGS.items():
        store_once("weight_sync", f"base_{name}", config)
