"""Structured configs of collectors, and which of them can carry a scheme."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from collectors.env_config import EnvConfig
from collectors.errors import ConfigError
from wsync import WeightSyncScheme
from wsync.config import store_once


@dataclass
class CollectorConfig:
    """A collector; the numbers of workers, environments and frames per batch are settings of the run, at top level.

    Attributes:
        init_random_frames: number of first frames with random actions, an equal share for each worker.
        max_staleness: versions, at most, that the newest weights may be ahead of those that acted in any frame of a
            batch when the learner gets it; older ones are dropped and collected anew. null: no limit.
    """

    _target_: str = MISSING
    init_random_frames: int = 0
    max_staleness: int | None = None


@dataclass
class SingleConfig(CollectorConfig):
    """Collects in the trainer's process."""

    _target_: str = "collectors.Collector"


@dataclass
class WorkerCollectorConfig(CollectorConfig):
    """Several workers.

    Attributes:
        on_worker_failure: ``raise``; ``drop`` the worker and continue; or ``restart`` it and continue meanwhile.
        worker_timeout: seconds in which a worker has to answer; null: no limit.
        max_restarts: more failures of a worker than this within `restart_window` seconds, or since its last batch, end
            the run.
        restart_window: see `max_restarts`.
    """

    on_worker_failure: str = "raise"
    worker_timeout: float | None = 600.0
    max_restarts: int = 10
    restart_window: float = 60.0


@dataclass
class MultiSyncConfig(WorkerCollectorConfig):
    """Worker processes; a batch has a share of every worker, and all wait for new weights."""

    _target_: str = "collectors.MultiSyncCollector"
    cat_results: Any = "stack"  # or a dimension, which is a number


@dataclass
class MultiAsyncConfig(WorkerCollectorConfig):
    """Worker processes that collect while the learner learns; a batch is one worker's.

    Attributes:
        run_ahead: how many further batches a worker may begin while a finished one waits for the learner.
    """

    _target_: str = "collectors.MultiAsyncCollector"
    run_ahead: int = 1


@dataclass
class RemoteConfig(WorkerCollectorConfig):
    """Workers that are reached over a network.

    Attributes:
        sync: whether a batch has a share of every worker, and all wait for new weights; otherwise it is one worker's.
        run_ahead: with `sync=false`, as that of `multi_async`; null: 1 there.
        timeout: seconds in which the workers have to join.
    """

    sync: bool = True
    run_ahead: int | None = None
    cat_results: Any = "stack"  # or a dimension, which is a number
    timeout: float = 60.0
    _convert_: str = "all"  # the collector gets plain lists and dictionaries


@dataclass
class DistributedConfig(RemoteConfig):
    """Workers that are reached over TCP: processes of this machine, or workers that join; see DistributedCollector."""

    _target_: str = "collectors.distributed.DistributedCollector"
    launcher: str = "local"
    host: str | None = None
    port: int = 0


@dataclass
class RPCConfig(RemoteConfig):
    """Workers that are called by ``torch.distributed.rpc``; see RPCCollector."""

    _target_: str = "collectors.distributed.RPCCollector"


@dataclass
class RayConfig(RemoteConfig):
    """Ray actors; see RayCollector."""

    _target_: str = "collectors.distributed.RayCollector"
    address: str | None = None
    resources: dict[str, Any] = field(default_factory=dict)
    scheduling_strategy: str = "DEFAULT"


BUNDLED: dict[str, CollectorConfig] = {
    "single": SingleConfig(),
    "multi_sync": MultiSyncConfig(),
    "multi_async": MultiAsyncConfig(),
    "distributed": DistributedConfig(),
    "distributed_async": DistributedConfig(sync=False),
    "rpc": RPCConfig(),
    "rpc_async": RPCConfig(sync=False),
    "ray": RayConfig(),
    "ray_async": RayConfig(sync=False),
}
"""The collectors of this package, by the options of the group ``collector``."""


def check(collector: Any, scheme: object, num_workers: int) -> None:
    """Check that a collector can carry a scheme (``WeightSyncScheme.collectors``), and has a valid number of workers.

    The collector in the trainer's process takes every scheme. Collectors of other packages are not checked.

    Raises:
        ConfigError: it cannot, or `scheme` is not a WeightSyncScheme.
    """
    if not isinstance(scheme, WeightSyncScheme):
        raise ConfigError("weight_sync is no scheme: name a subclass of WeightSyncScheme in its YAML file by _target_")
    option = next((option for option, bundled in BUNDLED.items() if _kind(bundled) == _kind(collector)), None)
    if option == "single":
        if num_workers != 1:
            raise ConfigError(f"Collector works in the trainer's process: num_workers is 1 there, not {num_workers}")
    elif option is not None and option not in scheme.collectors:
        can = f"choose collector={', '.join(scheme.collectors)}" if scheme.collectors else "no collector can"
        raise ConfigError(f"collector={option} cannot carry {type(scheme).__name__}: {can}")


def _kind(collector: Any) -> tuple[str, bool | None] | None:
    """Return what distinguishes the bundled collectors; None for a config that is not based on theirs."""
    if not isinstance(collector, CollectorConfig):
        return None
    return collector._target_, collector.sync if isinstance(collector, RemoteConfig) else None


def register_configs() -> None:
    """Add the groups ``env`` and ``collector`` to Hydra's ConfigStore, as ``base_<name>``."""
    store_once("env", "base_gym", EnvConfig)
    for name in ("single", "multi_sync", "multi_async", "distributed", "rpc", "ray"):
        store_once("collector", f"base_{name}", type(BUNDLED[name]))
