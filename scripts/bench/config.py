"""What can be set, as Hydra sees it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from hydra.core.config_store import ConfigStore

from bench.cases import BACKENDS, NETWORK, BenchError, Case
from bench.models import usual_tensors

_CHOICES = {
    "kind": ("send", "update", "both"),
    "acknowledge": ("installed", "published", "both"),
    "give": ("module", "tensordict"),
    "peer": (None, "torchrl"),
}
_FOLDER = "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}-bench_sync"


def _hydra() -> dict[str, Any]:
    return {"job": {"name": "bench_sync", "chdir": False}, "run": {"dir": _FOLDER}, "sweep": {"dir": _FOLDER}}


@dataclass
class BenchConfig:
    """All settings.

    Attributes:
        backends: which.
        mib: sizes of the weights that a standalone send carries.
        tensors: in how many; ``auto`` goes by the size.
        policy_mib: sizes of the policies that a collector's workers act with; 0.018 is 2 × 64.
        workers: how many, one case for each number.
        rounds: updates that are timed, of each side of a case.
        seconds: that the rounds of a side may take, together; then there are fewer.
        kind: ``send`` (standalone), ``update`` (a collector's), or ``both``.
        acknowledge: what a finished send means in shared memory: ``installed``, ``published``, or ``both``.
        peer: ``torchrl`` runs it beside, in alternation.
        give: what a call is given: ``module``, or ``tensordict`` made of it on the spot.
        frames: of each worker's batch, in collection.
        acting: updates sent to workers that forward in a tight loop, to find out how they pause; 0: none.
        timeout: seconds for whatever is waited for.
        shared_memory: whether our ``distributed``, ``rpc`` and ``ray`` may use it, ``true`` or ``false`` (then gloo
            carries, as over a network); ``null``: one case for each.
        checksum: whether our updates carry one, ``true`` or ``false``; ``null``: as each scheme has it.
    """

    defaults: list[Any] = field(default_factory=lambda: ["_self_", {"override hydra/job_logging": "disabled"}])
    hydra: Any = field(default_factory=_hydra)
    backends: list[str] = field(default_factory=lambda: list(BACKENDS))
    mib: list[float] = field(default_factory=lambda: [0.0625, 1.0, 64.0])
    tensors: str = "auto"
    policy_mib: list[float] = field(default_factory=lambda: [0.018, 1.0])
    workers: list[int] = field(default_factory=lambda: [1, 2])
    rounds: int = 200
    seconds: float = 20.0
    kind: str = "both"
    acknowledge: str = "both"
    peer: str | None = None
    give: str = "module"
    frames: int = 16
    acting: int = 50
    timeout: float = 60.0
    shared_memory: bool | None = None
    checksum: bool | None = None


def register() -> None:
    """Make ``BenchConfig`` known to Hydra as ``bench_sync``."""
    ConfigStore.instance().store(name="bench_sync", node=BenchConfig)


def check(cfg: BenchConfig) -> None:
    """See that the settings go together.

    Raises:
        BenchError: one does not; says which, and what there is.
    """
    for name, choices in _CHOICES.items():
        value = vars(cfg)[name]
        if value not in choices:
            raise BenchError(f"{name} is one of {', '.join(map(str, choices))}, not {value}")
    if unknown := set(cfg.backends) - set(BACKENDS):
        raise BenchError(f"unknown backend {', '.join(sorted(unknown))}: choose from {', '.join(BACKENDS)}")
    if cfg.tensors != "auto" and not (cfg.tensors.isdecimal() and int(cfg.tensors) > 0):
        raise BenchError(f"tensors is auto or a number, not {cfg.tensors}")
    for name in ("backends", "workers", "policy_mib" if cfg.kind == "update" else "mib"):
        if not vars(cfg)[name]:
            raise BenchError(f"{name} is empty")
    positive = [*cfg.mib, *cfg.policy_mib, *cfg.workers, cfg.rounds, cfg.seconds, cfg.frames, cfg.timeout]
    if min(positive) <= 0 or cfg.acting < 0:
        raise BenchError("sizes, numbers of workers, rounds, frames and seconds are above 0 (acting: 0 or more)")


def cases(cfg: BenchConfig) -> Iterator[Case]:
    """What is to be measured, the small before the large."""
    if cfg.kind in ("send", "both"):
        for mib, backend, workers in product(cfg.mib, cfg.backends, cfg.workers):
            tensors = usual_tensors(mib) if cfg.tensors == "auto" else int(cfg.tensors)
            yield from _variants(cfg, backend, kind="send", mib=mib, tensors=tensors, workers=workers)
    if cfg.kind in ("update", "both"):
        for mib, backend, workers in product(cfg.policy_mib, cfg.backends, cfg.workers):
            tensors = 6 if mib <= 0.1 else 20
            yield from _variants(cfg, backend, kind="update", mib=mib, tensors=tensors, workers=workers)


def _variants(cfg: BenchConfig, backend: str, **rest: Any) -> Iterator[Case]:
    common = {
        "give": cfg.give,
        "frames": cfg.frames,
        "timeout": cfg.timeout,
        "checksum": cfg.checksum,
        "backend": backend,
        **rest,
    }
    if backend in NETWORK:
        ways = (True, False) if cfg.shared_memory is None else (cfg.shared_memory,)
        yield from (Case(shared_memory=shared_memory, **common) for shared_memory in ways)
        return
    if backend != "shared_mem" or cfg.acknowledge in ("installed", "both"):
        yield Case(acknowledge="installed", **common)
    if backend == "shared_mem" and cfg.acknowledge in ("published", "both"):
        yield Case(acknowledge="published", **common)
