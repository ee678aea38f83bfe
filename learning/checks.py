"""Which settings of a training run make sense together, and with an environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from collectors.config import ConfigError, MultiAsyncConfig, MultiSyncConfig, RemoteConfig
from collectors.environments.specs import Spec
from learning.mlp import ACTIVATIONS

if TYPE_CHECKING:
    from learning.config import TrainConfig


def refuse_contradictions(config: TrainConfig) -> None:
    """Look at settings that are possible each by itself.

    Raises:
        ConfigError: for the first pair that contradicts itself.
    """
    if isinstance(config.collector, MultiSyncConfig | RemoteConfig):
        _check_joining(config.collector.cat_results, batched=config.num_envs > 1)
    for group in ("weight_sync", "collector"):
        if getattr(getattr(config, group), "host", None) == "":
            raise ConfigError(f"{group}.host is empty: name an address of this machine (127.0.0.1: for workers on it)")
    workers = 1 if _is_asynchronous(config.collector) else config.num_workers  # whose frames make a batch
    rows = workers * config.num_envs
    if config.frames_per_batch < rows:
        of = "num_envs" if workers == 1 else f"num_workers × num_envs = {workers} × {config.num_envs}"
        raise ConfigError(
            f"frames_per_batch={config.frames_per_batch} is less than one frame for each of {of} = {rows} environments"
        )
    if config.policy.activation not in ACTIVATIONS:
        raise ConfigError(f"policy.activation={config.policy.activation}: it is one of {', '.join(ACTIVATIONS)}")


def _check_joining(how: Any, *, batched: bool) -> None:
    """``[T]`` of each worker can be stacked; ``[E, T]`` can also be joined along E."""
    say = "say stack, or 0" if batched else "say stack"
    if how in ((1, -1) if batched else (0, -1)):
        raise ConfigError(
            f"collector.cat_results={how} joins the workers' batches along time, as if one's frames came after "
            f"another's: {say}"
        )
    if how != "stack" and not (batched and how in (0, -2)):
        raise ConfigError(f"collector.cat_results={how}: a worker's batch has no such dimension: {say}")


def _is_asynchronous(collector: Any) -> bool:
    return isinstance(collector, MultiAsyncConfig) or (isinstance(collector, RemoteConfig) and not collector.sync)


def observation_dim(env_id: str, spec: Spec) -> int:
    """Return the length of an observation that a policy can read.

    Raises:
        ConfigError: it is no vector of floats (an image, say).
    """
    if len(spec.shape) != 1 or not spec.dtype.is_floating_point:
        raise ConfigError(
            f"env.id={env_id}: the policy reads a vector of floats, and an observation is {spec.dtype} of shape "
            f"{list(spec.shape)}: register the environment with wrappers that make it one (FlattenObservation, "
            "RescaleObservation)"
        )
    return spec.shape[0]


def check_action(env_id: str, spec: Spec) -> None:
    """Refuse an action that no policy gives.

    Raises:
        ConfigError: it is neither a choice nor a vector.
    """
    if len(spec.shape) != 1:
        raise ConfigError(
            f"env.id={env_id}: the policy gives a choice or a vector, and an action is of shape {list(spec.shape)}: "
            "register the environment with a wrapper that makes it one (TransformAction)"
        )
