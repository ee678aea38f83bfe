"""Both ends of a store in this process, for the model ``"policy"``."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

import wsync
from wsync.testing.models import Small, fill


@contextmanager
def trainer(url: object, model: nn.Module | None = None, **options: Any) -> Iterator[wsync.StoreWeightSyncScheme]:
    """A sender that has published version 1."""
    with wsync.StoreWeightSyncScheme(str(url), **{"timeout": 30.0, **options}) as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1) if model is None else model, num_workers=1)
        scheme.connect()
        yield scheme


def reader(url: object, model: nn.Module | None = None, **options: Any) -> wsync.StoreWeightSyncScheme:
    """A receiver that is connected: the block of a ``with`` statement for it ends with its shutdown."""
    with ExitStack() as on_error:
        scheme = on_error.enter_context(wsync.StoreWeightSyncScheme(str(url), **{"timeout": 30.0, **options}))
        scheme.init_on_receiver("policy", model=Small() if model is None else model, worker_idx=0)
        scheme.connect()
        on_error.pop_all()
    return scheme
