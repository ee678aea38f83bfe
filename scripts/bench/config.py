"""The settings of the benchmark, and the cases that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from harness.backends import BACKENDS, takes
from hydra.core.config_store import ConfigStore

_CHOICES = {
    "kind": ("send", "update", "both"),
    "acknowledge": ("installed", "published", "both"),
    "give": ("module", "tensordict"),
    "peer": (None, "torchrl"),
}
_FOLDER = "outputs/${now:%Y-%m-%d}/${now:%H-%M-%S}-bench_sync"


class BenchError(Exception):
    """A case cannot be run; the message is for users."""


@dataclass(frozen=True)
class Case:
    """One row of the results.

    Attributes:
        kind: a standalone ``send``, or a collector's ``update_policy_weights_``.
        backend: name of the backend.
        acknowledge: when a send is finished; for schemes that have a choice.
        mib: the size in MiB of all weights together.
        tensors: number of tensors.
        workers: number of processes that receive.
        give: the argument of ``send``: the module, or a TensorDict made of it within the timed call.
        frames: the number of frames of each worker's batch, in collection.
        timeout: seconds of every wait.
        checksum: whether updates carry one; None: the scheme's default.
        shared_memory: whether a backend for networks may use shared memory on one machine; for schemes that have a
            choice.
        transport: Ray's transport, where it is not the default: ``"object_store"``.
        device: where the trainer's model is.
        worker_device: where the workers' models are.
        nccl: whether a process group uses NCCL instead of gloo.
    """

    kind: Literal["send", "update"]
    backend: str
    mib: float
    tensors: int
    workers: int
    acknowledge: Literal["installed", "published"] = "installed"
    give: Literal["module", "tensordict"] = "module"
    frames: int = 16
    timeout: float = 60.0
    checksum: bool | None = None
    shared_memory: bool = True
    transport: str | None = None
    device: str = "cpu"
    worker_device: str = "cpu"
    nccl: bool = False

    @property
    def label(self) -> str:
        """The backend and its variant."""
        if takes(self.backend, "acknowledge"):
            return f"{self.backend}, {self.acknowledge}"
        if self.transport is not None:
            return f"{self.backend}, {self.transport.replace('_', ' ')}"
        group = "nccl" if self.nccl else "gloo"
        return self.backend if self.shared_memory else f"{self.backend}, {group}"

    @property
    def title(self) -> str:
        """The case in one line."""
        sealed = {None: "", True: ", checksum", False: ", no checksum"}[self.checksum]
        devices = "" if self.device == self.worker_device == "cpu" else f", {self.device} to {self.worker_device}"
        return (
            f"{self.kind} {self.label}, {self.mib:g} MiB in {self.tensors} tensors to {self.workers}{sealed}{devices}"
        )

    @property
    def scheme_options(self) -> dict[str, Any]:
        """Arguments of our scheme."""
        chosen = {
            "acknowledge": self.acknowledge,
            "shared_memory": self.shared_memory,
            "checksum": self.checksum,
            "transport": self.transport,
            "backend": "nccl" if self.nccl else None,
        }
        given = {name: value for name, value in chosen.items() if value is not None and takes(self.backend, name)}
        return {"timeout": self.timeout, **given}


def _hydra() -> dict[str, Any]:
    return {"job": {"name": "bench_sync", "chdir": False}, "run": {"dir": _FOLDER}, "sweep": {"dir": _FOLDER}}


@dataclass
class BenchConfig:
    """All settings.

    Attributes:
        backends: names of backends.
        mib: sizes of the weights of a standalone send.
        tensors: their number; ``auto``: by the size.
        policy_mib: sizes of the policies of a collector's workers; 0.018 is 2 × 64.
        workers: numbers of workers, one case for each.
        rounds: timed updates of each side of a case.
        seconds: limit for the rounds of a side together; then there are fewer rounds.
        kind: ``send`` (standalone), ``update`` (a collector's), or ``both``.
        acknowledge: when a send through shared memory is finished: ``installed``, ``published``, or ``both``.
        peer: ``torchrl`` measures it as well, in alternation.
        give: the argument of a call: ``module``, or ``tensordict`` made of it within the call.
        frames: the number of frames of each worker's batch, in collection.
        acting: updates sent to workers that forward in a tight loop, to measure their pauses; 0: none.
        timeout: seconds of every wait.
        shared_memory: whether our ``distributed``, ``rpc`` and ``ray`` may use it, ``true`` or ``false`` (then weights
            travel as over a network: by gloo; small ones in a message); ``null``: one case for each. Ray's object store
            has one, unless it is ``true``.
        checksum: whether our updates carry one, ``true`` or ``false``; ``null``: each scheme's default.
        device: where the model of a standalone send's trainer is: ``cpu`` or ``cuda``.
        worker_device: where its workers' models are. ``cuda`` at both ends: with NCCL and ``backends=[cuda]``.
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
    device: str = "cpu"
    worker_device: str = "cpu"


def register() -> None:
    """Register ``BenchConfig`` with Hydra as ``bench_sync``."""
    ConfigStore.instance().store(name="bench_sync", node=BenchConfig)


def check(cfg: BenchConfig) -> None:
    """Check the settings.

    Raises:
        BenchError: a setting is invalid; names the valid values.
    """
    for name, choices in _CHOICES.items():
        value = vars(cfg)[name]
        if value not in choices:
            raise BenchError(f"{name} is one of {', '.join(map(str, choices))}, not {value}")
    known = [*BACKENDS, "cuda"] if _on_gpus(cfg) else BACKENDS
    if unknown := set(cfg.backends) - set(known):
        raise BenchError(f"unknown backend {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    if (cfg.device, cfg.worker_device) != ("cpu", "cpu") and cfg.kind != "send":
        raise BenchError("device and worker_device are settings of kind=send: policies of collectors act on the CPU")
    if cfg.tensors != "auto" and not (cfg.tensors.isdecimal() and int(cfg.tensors) > 0):
        raise BenchError(f"tensors is auto or a number, not {cfg.tensors}")
    for name in ("backends", "workers", "policy_mib" if cfg.kind == "update" else "mib"):
        if not vars(cfg)[name]:
            raise BenchError(f"{name} is empty")
    positive = [*cfg.mib, *cfg.policy_mib, *cfg.workers, cfg.rounds, cfg.seconds, cfg.frames, cfg.timeout]
    if min(positive) <= 0 or cfg.acting < 0:
        raise BenchError("sizes, numbers of workers, rounds, frames and seconds are above 0 (acting: 0 or more)")


def cases(cfg: BenchConfig) -> Iterator[Case]:
    """Yield the cases to measure, small ones before large ones."""
    if cfg.kind in ("send", "both"):
        for mib, backend, workers in product(cfg.mib, cfg.backends, cfg.workers):
            tensors = _usual_tensors(mib) if cfg.tensors == "auto" else int(cfg.tensors)
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
        "device": cfg.device,
        "worker_device": cfg.worker_device,
        "backend": backend,
        **rest,
    }
    if takes(backend, "shared_memory"):
        for shared_memory in (True, False) if cfg.shared_memory is None else (cfg.shared_memory,):
            yield Case(shared_memory=shared_memory, **common)
        if _on_gpus(cfg) and not cfg.shared_memory:
            yield Case(shared_memory=False, nccl=True, **common)
        if takes(backend, "transport") and not cfg.shared_memory:
            yield Case(transport="object_store", **common)
    elif takes(backend, "acknowledge"):
        for acknowledge in ("installed", "published"):
            if cfg.acknowledge in (acknowledge, "both"):
                yield Case(acknowledge=acknowledge, **common)
    else:
        yield Case(**common)


def _on_gpus(cfg: BenchConfig) -> bool:
    return (cfg.device, cfg.worker_device) == ("cuda", "cuda")


def _usual_tensors(mib: float) -> int:
    return 4 if mib <= 0.25 else 20 if mib <= 8 else 100
