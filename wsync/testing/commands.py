"""What a test has its workers do.

A command is an importable function. Its first argument is the worker's ``WorkerState``; the others, and its result,
cross a pipe as pickles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

import wsync
from wsync.testing.models import WithExtraState
from wsync.testing.models import digest as digest_of


@dataclass
class WorkerState:
    """The schemes and models of one worker, by model id, and what one command keeps for a later one."""

    schemes: dict[str, wsync.WeightSyncScheme] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)


def wsync_threads() -> set[threading.Thread]:
    """The threads of wsync in this process."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("wsync")}


def join(
    state: WorkerState, scheme: wsync.WeightSyncScheme, make: Callable[[], Any], worker_idx: int, model_id: str
) -> int:
    """Make a model, initialise the scheme with it, and connect; returns the version."""
    torch.set_num_threads(1)
    WithExtraState.worker_idx = worker_idx
    state.schemes[model_id], state.models[model_id] = scheme, make()
    scheme.init_on_receiver(model_id, model=state.models[model_id], worker_idx=worker_idx)
    return connect(state, model_id)


def connect(state: WorkerState, model_id: str = "policy") -> int:
    """Connect the scheme, which is initialised; returns its version."""
    state.schemes[model_id].connect()
    return state.schemes[model_id].version


def output(state: WorkerState, model_id: str = "policy") -> list[float]:
    """The output of one forward."""
    return state.models[model_id]().reshape(-1).tolist()


def digest(state: WorkerState, model_id: str = "policy", *, in_gate: bool = True) -> dict[str, Any]:
    """The model's weights, as a forward that starts now would use them; or as a plain read outside the gate does."""
    with wsync.gate() if in_gate else nullcontext():
        return digest_of(state.models[model_id])


def version(state: WorkerState, model_id: str = "policy") -> int:
    """The version that a forward that starts now would use."""
    with wsync.gate():
        return state.schemes[model_id].version


def receive(state: WorkerState, timeout: float | None = None, model_id: str = "policy") -> tuple[str, list[str]] | None:
    """``scheme.receive``: the type and the sorted keys of what it returns."""
    weights: Any = state.schemes[model_id].receive(timeout)
    return None if weights is None else (type(weights).__name__, sorted(map(str, weights.keys())))


def pull(state: WorkerState, timeout: float = 60.0, model_id: str = "policy") -> int:
    """``scheme.pull``: the number of the version that is installed."""
    return state.schemes[model_id].pull(timeout)


def shutdown(state: WorkerState) -> list[str]:
    """Shut every scheme down, twice; returns the names of wsync's threads that are left."""
    for scheme in state.schemes.values():
        scheme.shutdown()
        scheme.shutdown()
    return [thread.name for thread in wsync_threads()]


def reset(state: WorkerState) -> list[str]:
    """``shutdown``, and forget everything: the worker is as good as new if no thread is left."""
    left = shutdown(state)
    for part in (state.schemes, state.models, state.kept):
        part.clear()
    return left
