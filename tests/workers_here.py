"""Trainer and workers of a scheme in one process."""

import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

import wsync
from wsync.testing.models import fill

TIMEOUT = 20.0


def model_of(value: float) -> nn.Linear:
    return fill(nn.Linear(2, 1), value)


def make_worker(
    sender: wsync.WeightSyncScheme,
    index: int,
    *,
    near: bool = True,
    model: Any = None,
    load: Callable[..., None] | None = None,
) -> wsync.WeightSyncScheme:
    """A worker that cannot map the sender's memory unless it is ``near``."""
    worker = pickle.loads(pickle.dumps(sender))
    if isinstance(worker, wsync.DistributedWeightSyncScheme):
        worker.shared_memory = near
    model = model_of(0) if model is None and load is None else model
    worker.init_on_receiver("policy", model=model, load=load, worker_idx=index)
    return worker


def connect(accept: Callable[[], object], *workers: wsync.WeightSyncScheme) -> None:
    connecting = [threading.Thread(target=worker.connect) for worker in workers]
    for thread in connecting:
        thread.start()
    accept()
    for thread in connecting:
        thread.join()


@contextmanager
def both_ends(
    source: nn.Module, *, kind: Any = wsync.SharedMemWeightSyncScheme, near: bool = True, model: Any = None,
    load: Callable[..., None] | None = None, timeout: float = TIMEOUT, **options: Any,
) -> Iterator[tuple[Any, Any]]:  # fmt: skip
    """A sender of ``source``, a scheme with these ``options``, and its one worker; they are connected."""
    with kind(timeout=timeout, **options) as sender:
        sender.init_on_sender("policy", model=source, num_workers=1)
        with make_worker(sender, 0, near=near, model=model, load=load) as worker:
            connect(sender.connect, worker)
            yield sender, worker


@contextmanager
def in_process(
    model: nn.Module, source: Any = None, model_id: str = "policy", **options: Any
) -> Iterator[wsync.WeightSyncScheme]:
    """A scheme with its sender and its only worker, which has this model, in this process."""
    with wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT, **options) as scheme:
        scheme.init_in_process(model_id, model, source)
        yield scheme


def weights_of(worker: wsync.WeightSyncScheme) -> list[float]:
    return [parameter.flatten()[0].item() for parameter in worker.model.parameters()]
