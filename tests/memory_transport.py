"""A transport that carries weights from one thread of a process to another, and a scheme for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import wsync
from wsync.backends.none import NoTransport


class FromMemory(NoTransport):
    """Carries weights from one thread of this process to another."""

    # Not an attribute of the class itself: reading one while another thread replaces it may crash CPython 3.11, because
    # its cache of attributes is invalidated only after the old value is freed, which releases the GIL.
    weights: ClassVar[list[Any]] = [None]

    def send_weights(self, weights: Any = None, older_weights: Any = None) -> None:
        self.weights[0] = {name: tensor.clone() for name, tensor in weights.items()}

    def receive_weights(self, timeout: float | None = None, **_: Any) -> Any:
        return self.weights[0]


class Scheme(wsync.WeightSyncScheme):
    """Makes its transports by a function or class of the test."""

    name = "from memory"

    def __init__(self, transport: Callable[[], Any], **options: Any) -> None:
        super().__init__("state_dict", **{"timeout": 30.0, **options})
        self.transport = transport

    def create_transport(self, worker_idx: int | None = None) -> Any:
        return self.transport()
