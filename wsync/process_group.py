"""Weights through a ``torch.distributed`` process group of two: the sender and one worker.

One group per worker: the members of a group are fixed, so a restarted worker needs a new one. The two processes find
each other by a store over their control connection, so no port is open to other processes. No default group is needed.
Instead, weights may go through a group that the user has made.
"""

from __future__ import annotations

import os
import secrets
import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
)
from torch.distributed import Store as TorchStore  # pyright: ignore[reportPrivateImportUsage]

from wsync.deadlines import as_timeout, time_until
from wsync.errors import NotConnected
from wsync.group_of_two import gloo_group, nccl_group
from wsync.transport import Transfer, apply_received
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.weights.snapshot import snapshot, weights_of
from wsync.weights.strategy import WeightStrategy

BACKENDS = ("gloo", "nccl")
INLINE_BYTES = 5 << 18  # 1 MiB with some padding: up to this size it was faster than gloo, over loopback
_PLACE = "wsync group"  # key in the store: the sender's rank in the user's group, and the tag; empty for a group of two

_inherited: list[Any] = []  # groups that a fork has copied: their threads are the parent's, so they cannot be destroyed
_unfinished: WeakKeyDictionary[Any, list[Transfer]] = WeakKeyDictionary()  # by user's group: kept as long as the group


def check_backend(backend: str) -> str:
    """Return ``backend``.

    Raises:
        ValueError: it is no backend of ``torch.distributed`` that is supported here.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r} of torch.distributed: choose one of {', '.join(BACKENDS)}")
    if backend == "nccl" and not distributed.is_nccl_available():
        raise ValueError("this build of PyTorch has no nccl: choose backend=gloo")
    return backend


def device_of(backend: str) -> torch.device:
    """Return where ``backend`` needs weights to be packed and received."""
    return with_index(torch.device("cuda" if backend == "nccl" else "cpu"))


def with_index(device: torch.device) -> torch.device:
    """Return ``device``; a GPU without an index as the one of this thread: other threads may have another.

    Does not initialise CUDA: before that, each thread has the first GPU.
    """
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


class DistributedTransport:
    """One side of a process group of two (a ``FlatTransport`` and a ``TransportBackend``). See there for threads.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        group: the user's group, instead of a group of two.
        worker: under a scheme, the worker's index. In the user's group the ranks other than the sender's are the
            workers, in order.
        inline_bytes: under a scheme, see ``FlatTransport``; nccl, and the user's group, carry all updates.
        weights_buffer: without a scheme, weights of the layout that is sent.
        store: without a scheme, a ``torch.distributed`` store by which the two processes find each other; None: the
            default group is used.
        rank: without a scheme, the worker's rank in the default group; with ``store``, any number that both processes
            give for the worker.
        host: without a scheme, with ``store``: this process's address, by which the other one reaches it.
    """

    def __init__(
        self,
        *,
        backend: str = "gloo",
        group: ProcessGroup | None = None,
        worker: int = 0,
        inline_bytes: int = INLINE_BYTES,
        weights_buffer: Any = None,
        store: TorchStore | None = None,
        rank: int = 1,
        host: str = "127.0.0.1",
    ) -> None:
        self.device = device_of(backend)
        self.inline_bytes = inline_bytes if backend == "gloo" and group is None else 0
        self.receives_ahead = backend == "gloo" and group is None
        self._backend = backend
        self._users_group = group
        self._group: Any = group
        self._worker = worker
        self._peer = 0
        self._tag = 0
        self._store = store
        self._rank = rank
        self._host = host
        self._pid = os.getpid()
        self._receiving: tuple[Buffer, _PendingTransfer] | None = None  # begun, and not yet returned
        self._sent: list[Transfer] = []  # by ``send_weights_async``, until ``wait_ack``
        self._buffer = None if weights_buffer is None else _buffer_like(weights_buffer, self.device)

    # --- under a scheme: FlatTransport ---

    def connect(self, store: TorchStore, rank: int, connection_number: int, host: str, deadline: float | None) -> None:
        """See ``FlatTransport``.

        Raises:
            NotConnected: one end was given a group by the user, and the other was not.
            ConnectionError: another process has connected to gloo's port in the other end's place.
            RuntimeError: the group could not be formed.
        """
        if self._store is None:  # else it is the user's, and keeps its timeout
            store.set_timeout(time_until(deadline))
        if rank == 0:
            store.set(_PLACE, "" if self._users_group is None else f"{self._users_group.rank()} {secrets.randbits(30)}")
        place = store.get(_PLACE).decode()
        if bool(place) != (self._users_group is not None):
            raise NotConnected("only one end was given a process group: give both ends group=")
        if self._users_group is not None:
            sender, tag = map(int, place.split())
            self._tag = tag  # new for each connection: a restarted worker must not get its predecessor's data
            self._peer = self._worker + (self._worker >= sender) if rank == 0 else sender
            return
        self._peer = 1 - rank
        nccl = self._backend == "nccl"
        self._group = (
            nccl_group(store, rank, self.device, deadline) if nccl else gloo_group(store, rank, host, deadline)
        )

    def begin_send(self, flat: Tensor, transfers: list[Transfer]) -> None:
        """See ``FlatTransport``. One C call extends the list: no signal handler runs between its steps."""
        transfers.extend(map(self._group.send, [[flat]], [self._peer], [self._tag]))

    def begin_receive(self, flat: Tensor, transfers: list[Transfer]) -> None:
        """See ``FlatTransport``, and ``begin_send``."""
        transfers.extend(map(self._group.recv, [[flat]], [self._peer], [self._tag]))

    def close(self, pending: Transfer | None = None) -> bool:
        """See ``FlatTransport``.

        A group of two ends its pending transfer. In the user's group the transfer is kept as long as the group: gloo
        would close the whole group if a transfer were dropped.
        """
        kept = self._users_group is not None and pending is not None
        if kept and pending is not None:
            _unfinished.setdefault(self._users_group, []).append(pending)
        if os.getpid() != self._pid and self._group is not None:
            _inherited.append(self._group)
        elif self._backend == "nccl" and self._group is not None and self._users_group is None:
            self._group.abort()  # ends kernels that wait for the other process
        self._group = self._users_group = None
        return kept

    # --- without a scheme: TransportBackend ---

    def setup_connection_and_weights_on_sender(self) -> None:
        """See ``TransportBackend``: forms the group by ``store``, or uses the default group."""
        self._set_up(0)

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """See ``TransportBackend``; the first weights arrive by ``receive_weights``, like all others."""
        self._set_up(1)
        return None

    def _set_up(self, rank: int) -> None:
        """Connect, unless that has been done; ``rank`` is 0 on the sender and 1 in the worker."""
        if self._group is not None:
            return
        if self._store is not None:
            self.connect(PrefixStore(f"wsync/{self._rank}", self._store), rank, 0, self._host, None)
            return
        self._group = self._users_group = distributed.distributed_c10d._get_default_group()
        self._peer = self._rank if rank == 0 else 0

    def check_connection(self) -> bool:
        """Return whether the two ends have formed their group. Of the older API."""
        return self._group is not None

    def send_weights(self, weights: Any, older_weights: Any = None) -> None:
        """Send one version, and return when it has been sent.

        The older API's ``send_weights(model_id, weights)`` does the same.

        Raises:
            LayoutMismatch: the weights are not like ``weights_buffer``.
            RuntimeError: the group has broken.
        """
        flat = self._packed(weights_of(weights, older_weights))
        self._group.send([flat], self._peer, self._tag).wait()

    def send_weights_async(self, weights: Any, older_weights: Any = None) -> None:
        """Begin to send one version, as ``send_weights`` does; ``wait_ack`` waits. Of the older API.

        Raises:
            LayoutMismatch: the weights are not like ``weights_buffer``.
            RuntimeError: the group has broken.
        """
        self.begin_send(self._packed(weights_of(weights, older_weights)), self._sent)

    def wait_ack(self) -> None:
        """Wait until what ``send_weights_async`` has begun to send has been sent. Of the older API.

        Raises:
            RuntimeError: the group has broken.
        """
        sent, self._sent = self._sent, []
        for transfer in sent:
            transfer.wait()

    def _packed(self, weights: Any) -> Tensor:
        """Return ``weights`` as they are sent, in ``weights_buffer``; set the transport up."""
        self._set_up(0)
        self.wait_ack()  # what ``send_weights_async`` sends is in the same buffer
        buffer = self._require_buffer()
        buffer.pack(buffer.layout.order(snapshot(weights)))
        return buffer.flat

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """Return the next version; None if none arrived in time: a later call receives it.

        Raises:
            RuntimeError: the group has broken.
        """
        self._set_up(1)
        if self._receiving is None:
            buffer = self._require_buffer() if weights is None else _buffer_like(weights, self.device)
            transfer = self._group.recv([buffer.flat], self._peer, self._tag)
            self._receiving = buffer, _PendingTransfer(transfer, self.device)
        buffer, pending = self._receiving
        pending.join(as_timeout(timeout))
        if pending.is_alive():
            return None
        if pending.error is not None:
            raise pending.error
        self._receiving = None
        copies = [view.clone() for view in buffer.views]  # the next version may overwrite the buffer
        return apply_received(dict(zip(buffer.layout.names, copies, strict=True)), weights, model, strategy)

    def _require_buffer(self) -> Buffer:
        if self._buffer is None:
            raise RuntimeError(
                "without a scheme this transport needs weights_buffer=, weights like those that are sent"
            )
        return self._buffer


class _PendingTransfer(threading.Thread):
    """A thread that waits for a transfer: gloo gives a group up when a wait of its own times out.

    Attributes:
        error: with which the transfer has failed; None before its end.
    """

    def __init__(self, transfer: Transfer, device: torch.device) -> None:
        super().__init__(name="wsync-pending-transfer", daemon=True)
        self._transfer, self._device = transfer, device
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Wait, in the thread."""
        try:
            self._transfer.wait()
            if self._device.type == "cuda":  # nccl's wait is one of this thread's stream
                torch.cuda.synchronize(self._device)
        except BaseException as error:  # noqa: BLE001  raised by ``receive_weights``
            self.error = error


def _buffer_like(weights: Any, device: torch.device) -> Buffer:
    """Return a buffer with the layout of a module, a TensorDict or a state dict."""
    return Buffer.new(Layout.of(snapshot(weights)), device=device)
