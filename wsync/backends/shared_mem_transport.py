"""Shared memory without a scheme: one set of buffers, which a sender writes and receivers copy."""

from __future__ import annotations

import ctypes
import multiprocessing
import platform
import threading
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import nn

from wsync.deadlines import deadline_in, remaining
from wsync.errors import NotConnected
from wsync.transport import TransportBackend, apply_received, weights_of
from wsync.weights.layout import Layout
from wsync.weights.snapshot import Snapshot, snapshot
from wsync.weights.strategy import WeightStrategy
from wsync.weights.tensors import copy_all

_LIBC = ctypes.CDLL(None, use_errno=True)
_FUTEX = {"x86_64": 202, "aarch64": 98}  # the number of the system call futex(2)
_FUTEX_WAIT, _FUTEX_WAKE, _ALL = 0, 1, 2**31 - 1


def _fence() -> None:
    """Order the loads and stores before this call before those after it: a processor may reorder them otherwise."""
    turn = threading.Lock()
    with turn:  # what comes before is done when it is released
        pass
    with turn:  # what comes after begins when it is acquired again
        pass


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _futex(word: Any, operation: int, value: int, timeout: float | None = None) -> None:
    moment = None if timeout is None else ctypes.byref(_Timespec(int(timeout), int(timeout % 1 * 1e9)))
    number, expected = ctypes.c_long(_FUTEX[platform.machine()]), ctypes.c_uint32(value & 0xFFFFFFFF)
    _LIBC.syscall(number, ctypes.c_void_p(ctypes.addressof(word)), operation, expected, moment, None, 0)


class SharedMemTransport(TransportBackend):
    """Weights in shared memory, without a scheme (a ``TransportBackend``).

    ``SharedMemTransport()`` is handed to worker processes as an argument. Each call of ``receive_weights`` there waits
    for the next version and copies it. One thread of one process sends. A scheme has a ``shared_transport`` of its own.

    No process can block another one: there is no lock. The sender makes the version counter odd while it writes; a
    receiver that finds another counter after its copy than before drops the copy. It waits by futex(2) until the
    counter has changed.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._counter = context.Value("q", 0, lock=False)  # grows by 2 with each version
        self._weights: TensorDictBase | None = None
        self._seen = 0

    def register_weights(self, weights: Any) -> None:
        """Define the shared buffers by a copy of ``weights``, before the transport is handed to a process."""
        extracted = WeightStrategy().extract_weights(weights)
        assert isinstance(extracted, TensorDict), "the default strategy's format"
        self._weights = extracted.clone().share_memory_()

    @property
    def unique_weights(self) -> list[TensorDictBase]:
        """The shared buffers, each once."""
        return [] if self._weights is None else [self._weights]

    def send_weights(self, weights: Any = None, older_weights: Any = None) -> None:
        """Publish one version; NotConnected: before ``register_weights``. LayoutMismatch: the weights do not fit.

        The older API's ``send_weights(model_id, weights)`` does the same.
        """
        given, own = snapshot(weights_of(weights, older_weights)), snapshot(self._buffers())
        layout = Layout.of(own)
        tensors = layout.order(Snapshot(given.tensors, optional=given.optional))  # what follows does not fail
        self._counter.value |= 1  # it is odd already if the last sender was killed here
        _fence()
        copy_all([own.tensors[name] for name in layout.names], tensors)
        _fence()
        self._counter.value += 1
        _futex(self._counter, _FUTEX_WAKE, _ALL)

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
        """Wait for the next version; return a copy, applied to ``weights`` and ``model`` if given."""
        deadline = deadline_in(timeout)
        while True:
            before, left = self._counter.value, remaining(deadline)  # read before: a later change ends the wait at once
            received = self._copy_newer()
            if received is not None:
                return apply_received(received, weights, model, strategy)
            if left == 0.0:
                return None
            if self._counter.value == before:
                _futex(self._counter, _FUTEX_WAIT, before, left)

    def _copy_newer(self) -> TensorDictBase | None:
        """Return a copy of a version that was not seen before; None if there is none, or it was written meanwhile."""
        version, buffers = self._counter.value, self._buffers()
        if version <= self._seen or version % 2:
            return None
        _fence()
        copied = buffers.clone()
        _fence()
        if self._counter.value != version:
            return None
        self._seen = version  # last: if the copy fails, the next call returns this version
        return copied

    def _buffers(self) -> TensorDictBase:
        if self._weights is None:
            raise NotConnected("this transport has no buffers: call register_weights(weights) on the sender first")
        return self._weights
