"""The worker's side of the contract suite: a process that runs the commands of a test, one after the other.

A command is an importable function. Its first argument is the worker's ``WorkerState``; the others, and its result,
cross a pipe as pickles.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor

import wsync
from wsync.testing.models import Loader, WithExtraState, named_tensors
from wsync.testing.models import digest as digest_of

THREAD_PREFIX = "wsync"
"""With which the names of wsync's own threads begin."""


@dataclass
class WorkerState:
    """The schemes and models of one worker, by model id, and what one command keeps for a later one."""

    schemes: dict[str, wsync.WeightSyncScheme] = field(default_factory=dict)
    models: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Command:
    """A function to call in a worker, and its arguments after the ``WorkerState``."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What came of a command: its value; or the names of the exception's classes, its own first, and its message."""

    value: Any = None
    error: Sequence[str] = ()
    message: str = ""


def execute(state: WorkerState, command: Command) -> Outcome:
    """Run one command."""
    try:
        return Outcome(command.function(state, *command.args, **command.kwargs))
    except Exception as error:  # noqa: BLE001  any error of a command is its outcome, which the test judges
        return Outcome(error=[kind.__name__ for kind in type(error).__mro__], message=str(error))


def serve(pipe: Connection) -> None:
    """A worker's main function: run commands until the test closes its end of the pipe, or sends None."""
    state = WorkerState()
    try:
        while (message := pipe.recv()) is not None:
            path, request = message
            sys.path[:] = path  # as in the test's process: the request names its modules
            pipe.send_bytes(ForkingPickler.dumps(execute(state, Command(_run, (request,)))))
    except (EOFError, ConnectionError):  # the test's process has ended
        pass
    for scheme in state.schemes.values():
        scheme.shutdown()


def _run(state: WorkerState, request: bytes) -> Any:
    command = pickle.loads(request)
    return command.function(state, *command.args, **command.kwargs)


# --- commands ---


def ping(state: WorkerState) -> None:
    """Do nothing: the worker has started when this returns."""


def init(
    state: WorkerState, scheme: wsync.WeightSyncScheme, make: Callable[[], Any], worker_idx: int, model_id: str
) -> None:
    """Make a model (or a ``Loader``), and initialise the scheme with it; nothing is received."""
    torch.set_num_threads(1)
    WithExtraState.worker_idx = worker_idx
    state.schemes[model_id], state.models[model_id] = scheme, (model := make())
    if isinstance(model, Loader):
        scheme.init_on_receiver(model_id, load=model.load, worker_idx=worker_idx)
    else:
        scheme.init_on_receiver(model_id, model=model, worker_idx=worker_idx)


def connect(state: WorkerState, model_id: str = "policy") -> int:
    """Connect the scheme; returns its version."""
    state.schemes[model_id].connect()
    return state.schemes[model_id].version


def join(
    state: WorkerState, scheme: wsync.WeightSyncScheme, make: Callable[[], Any], worker_idx: int, model_id: str
) -> int:
    """``init`` and ``connect``; returns the version."""
    init(state, scheme, make, worker_idx, model_id)
    return connect(state, model_id)


def output(state: WorkerState, model_id: str = "policy") -> list[float]:
    """The output of one forward."""
    return state.models[model_id]().reshape(-1).tolist()


def digest(state: WorkerState, model_id: str = "policy") -> dict[str, Any]:
    """The model's weights, as a forward that starts now would use them."""
    with wsync.gate():
        return digest_of(state.models[model_id])


def plain_digest(state: WorkerState, model_id: str = "policy") -> dict[str, Any]:
    """The model's weights, read without the gate."""
    return digest_of(state.models[model_id])


def tensors(state: WorkerState, model_id: str = "policy") -> dict[str, Tensor]:
    """Copies of the model's weights, as a forward that starts now would use them."""
    with wsync.gate():
        return {name: tensor.detach().clone() for name, tensor in named_tensors(state.models[model_id]).items()}


def version(state: WorkerState, model_id: str = "policy") -> int:
    """The version that a forward that starts now would use."""
    with wsync.gate():
        return state.schemes[model_id].version


def receive(state: WorkerState, timeout: float | None = None, model_id: str = "policy") -> tuple[str, list[str]] | None:
    """``scheme.receive``: the type and the sorted keys (those of a ``Loader``'s version: none) of what it returns."""
    weights: Any = state.schemes[model_id].receive(timeout)
    keys = sorted(map(str, weights.keys())) if hasattr(weights, "keys") else []
    return None if weights is None else (type(weights).__name__, keys)


def pull(state: WorkerState, timeout: float = 60.0, model_id: str = "policy") -> int:
    """``scheme.pull``: the number of the version that is installed."""
    return state.schemes[model_id].pull(timeout)


def shutdown(state: WorkerState) -> list[str]:
    """Shut every scheme down, twice; returns the names of wsync's threads that are left."""
    for scheme in state.schemes.values():
        scheme.shutdown()
        scheme.shutdown()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)]


def reset(state: WorkerState) -> list[str]:
    """``shutdown``, and forget everything: the worker is as good as new if no thread is left."""
    left = shutdown(state)
    for part in (state.schemes, state.models, state.kept):
        part.clear()
    return left
