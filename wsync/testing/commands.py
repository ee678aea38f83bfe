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
from torch import Tensor, nn

import wsync
from wsync.testing.models import WithExtraState
from wsync.testing.models import digest as digest_of

THREAD_PREFIX = "wsync"
"""With which the names of wsync's own threads begin."""


@dataclass
class WorkerState:
    """The schemes and models of one worker, by model id, and what one command keeps for a later one."""

    schemes: dict[str, wsync.WeightSyncScheme] = field(default_factory=dict)
    models: dict[str, nn.Module] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)

    def clear(self) -> None:
        """Drop all of it."""
        for part in (self.schemes, self.models, self.kept):
            part.clear()


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
            pipe.send_bytes(ForkingPickler.dumps(_run(state, *message)))
    except (EOFError, ConnectionError):  # the test's process has ended
        pass
    for scheme in state.schemes.values():
        scheme.shutdown()


def _run(state: WorkerState, path: list[str], request: bytes) -> Outcome:
    sys.path[:] = path  # as in the test's process: the request names its modules
    try:
        command = pickle.loads(request)
    except Exception as error:  # noqa: BLE001  reported to the test, like any other error
        return Outcome(error=[type(error).__name__], message=f"a command could not be unpickled: {error}")
    return execute(state, command)


# --- commands ---


def ping(state: WorkerState) -> None:
    """Do nothing: the worker has started when this returns."""


def init(
    state: WorkerState, scheme: wsync.WeightSyncScheme, make: Callable[[], nn.Module], worker_idx: int, model_id: str
) -> None:
    """Make a model, and initialise the scheme with it; nothing is received."""
    torch.set_num_threads(1)
    WithExtraState.worker_idx = worker_idx
    state.schemes[model_id], state.models[model_id] = scheme, make()
    scheme.init_on_receiver(model_id, model=state.models[model_id], worker_idx=worker_idx)


def connect(state: WorkerState, model_id: str = "policy") -> int:
    """Connect the scheme; returns its version."""
    state.schemes[model_id].connect()
    return state.schemes[model_id].version


def join(
    state: WorkerState, scheme: wsync.WeightSyncScheme, make: Callable[[], nn.Module], worker_idx: int, model_id: str
) -> int:
    """``init`` and ``connect``; returns the version."""
    init(state, scheme, make, worker_idx, model_id)
    return connect(state, model_id)


def output(state: WorkerState, model_id: str = "policy") -> list[float]:
    """The output of one forward."""
    result: Tensor = state.models[model_id]()
    return result.reshape(-1).tolist()


def digest(state: WorkerState, model_id: str = "policy") -> dict[str, Any]:
    """The model's weights, as a forward that starts now would use them."""
    with wsync.gate():
        return digest_of(state.models[model_id])


def plain_digest(state: WorkerState, model_id: str = "policy") -> dict[str, Any]:
    """The model's weights, read without the gate."""
    return digest_of(state.models[model_id])


def version(state: WorkerState, model_id: str = "policy") -> int:
    """The version that a forward that starts now would use."""
    with wsync.gate():
        return state.schemes[model_id].version


def receive(state: WorkerState, timeout: float | None = None, model_id: str = "policy") -> tuple[str, list[str]] | None:
    """``scheme.receive``: the type and the sorted keys of what it returns."""
    weights = state.schemes[model_id].receive(timeout)
    return None if weights is None else (type(weights).__name__, sorted(map(str, weights.keys())))


def finished(state: WorkerState, model_id: str = "policy") -> bool:
    """``scheme.finished``."""
    return state.schemes[model_id].finished


def shutdown(state: WorkerState) -> list[str]:
    """Shut every scheme down, twice; returns the names of wsync's threads that are left."""
    for scheme in state.schemes.values():
        scheme.shutdown()
        scheme.shutdown()
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)]


def reset(state: WorkerState) -> list[str]:
    """``shutdown``, and forget everything: the worker is as good as new if no thread is left."""
    left = shutdown(state)
    state.clear()
    return left
