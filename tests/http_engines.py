"""Engines for tests over HTTP: commands that serve them in workers' processes, and a trainer."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from asgi_server import serve
from torch import Tensor

import wsync
from wsync.testing import WorkerPool
from wsync.testing.commands import WorkerState
from wsync.testing.models import Small, fill

TOKEN = "a token"


def start_engine(state: WorkerState, port: int = 0, token: str | None = TOKEN) -> str:
    """Serve an engine with a function that keeps copies of what it is given; return its URL."""
    loaded = state.kept["loaded"] = dict[str, Tensor]()

    def load(pairs: Any) -> None:
        if state.kept.pop("refuse", False):
            raise ArithmeticError("the engine refuses")
        loaded.update({name: tensor.clone() for name, tensor in pairs})

    state.kept["app"] = app = wsync.engine_app(load=load, token=token)
    state.kept["server"] = stack = ExitStack()
    return stack.enter_context(serve(app, port=port))


def stop_engine(state: WorkerState) -> None:
    state.kept["server"].close()
    state.kept["app"].close()
    for thread in threading.enumerate():
        if thread.name.startswith("wsync-load"):
            thread.join(30)


def refuse_next(state: WorkerState) -> None:
    state.kept["refuse"] = True


def value(state: WorkerState) -> tuple[str, list[float]]:
    """Return the version, and the weights of a ``Small``."""
    with wsync.gate():
        return state.kept["app"].version, state.kept["loaded"]["weight"].tolist()


def loaded(state: WorkerState) -> dict[str, Tensor]:
    return state.kept["loaded"]


@contextmanager
def trainer(
    urls: Any, model: Any = None, model_id: str = "policy", **options: Any
) -> Iterator[wsync.HTTPWeightSyncScheme]:
    """A sender that is connected, of a model or a dict of weights."""
    with wsync.HTTPWeightSyncScheme(urls, **{"timeout": 30.0, "token": TOKEN, **options}) as scheme:
        given = {"weights": model} if isinstance(model, dict) else {"model": model or fill(Small(), 1)}
        scheme.init_on_sender(model_id, **given)
        scheme.connect()
        yield scheme


@contextmanager
def engines(pool: WorkerPool, count: int) -> Iterator[tuple[Any, list[str]]]:
    with pool.group(count) as workers:
        yield workers, workers.call(start_engine)
        for worker in workers:
            if worker.reusable:
                worker.call(stop_engine)
