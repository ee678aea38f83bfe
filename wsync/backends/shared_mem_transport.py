"""Shared memory without a scheme: one set of buffers, which a sender writes and receivers copy."""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import nn

from wsync.deadlines import deadline_in, remaining
from wsync.errors import NotConnected
from wsync.loops.mutex import SIZE, Mutex, wait_while_equal, wake_all
from wsync.transport import TransportBackend, apply_received
from wsync.weights.snapshot import weights_of
from wsync.weights.strategy import WeightStrategy

_MUTEX_TIMEOUT = 60.0  # seconds; a process holds the mutex while it copies the weights


class SharedMemTransport(TransportBackend):
    """Weights in shared memory, without a scheme (a ``TransportBackend``).

    ``SharedMemTransport()`` is handed to worker processes as an argument. Each call of ``receive_weights`` there waits
    for the next version and copies it. A scheme's ``shared_transport`` is a ``SharedMemSenderTransport``.

    The death of a process blocks no other one: the mutex can be locked after its owner has died, and workers wait by
    futex(2) until the version counter has changed. (A ``Condition`` of ``multiprocessing`` waits for dead workers.)
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._memory = context.RawArray("c", SIZE)
        self._mutex().initialise()
        self._counter = context.Value("q", 0, lock=False)  # grows by 2 with each version; odd while one is written
        self._weights: TensorDictBase | None = None
        self._seen = 0

    def _mutex(self) -> Mutex:
        return Mutex(ctypes.addressof(self._memory), self._memory)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        mutex = self._mutex()
        try:
            mutex.lock(_MUTEX_TIMEOUT)
            yield
        finally:
            mutex.unlock()

    def register_weights(self, weights: Any) -> None:
        """Define the shared buffers, before the transport is handed to a process.

        Args:
            weights: a module, a TensorDict or a state dict; copied.
        """
        extracted = WeightStrategy().extract_weights(weights)
        assert isinstance(extracted, TensorDict), "the default strategy's format"
        self._weights = extracted.clone().share_memory_()

    @property
    def unique_weights(self) -> list[TensorDictBase]:
        """The shared buffers, each once."""
        return [] if self._weights is None else [self._weights]

    def send_weights(self, weights: Any = None, older_weights: Any = None) -> None:
        """Publish one version. The older API's ``send_weights(model_id, weights)`` does the same.

        Raises:
            NotConnected: before ``register_weights``.
            LayoutMismatch: the weights do not fit.
            SyncTimeout: a worker that is stopped holds the mutex.
        """
        given, strategy = weights_of(weights, older_weights), WeightStrategy()
        with self._locked():
            strategy.check(self._buffers(), given)  # so that what follows does not fail
            self._counter.value |= 1  # it is odd already if the last sender was killed here
            strategy.apply_weights(self._buffers(), given)
            self._counter.value += 1
        wake_all(ctypes.addressof(self._counter))

    def check_connection(self) -> bool:
        """Return whether there are buffers. Of the older API."""
        return self._weights is not None

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """Wait for the next version; return a copy, applied to ``weights`` and ``model`` if given.

        Raises:
            SyncTimeout: a process that is stopped holds the mutex.
        """
        deadline = deadline_in(timeout)
        while True:
            before, left = self._counter.value, remaining(deadline)  # read before: a later change ends the wait at once
            received = self._copy_newer()
            if received is not None:
                break
            if left == 0.0:
                return None
            wait_while_equal(ctypes.addressof(self._counter), before, left)
        return apply_received(received, weights, model, strategy)

    def _copy_newer(self) -> TensorDictBase | None:
        with self._locked():
            version = self._counter.value
            if version <= self._seen or version % 2:
                return None
            copied = self._buffers().clone()
            self._seen = version  # last: if the copy fails, the next call returns this version
            return copied

    def _buffers(self) -> TensorDictBase:
        if self._weights is None:
            raise NotConnected("this transport has no buffers: call register_weights(weights) on the sender first")
        return self._weights
