"""Trainer and workers on one GPU: weights stay in its memory, which the processes share (CUDA IPC)."""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import struct
from contextlib import suppress
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from wsync.deadlines import remaining
from wsync.errors import NotConnected
from wsync.options import SchemeOptions
from wsync.process_group import with_index
from wsync.scheme import WeightSyncScheme
from wsync.sending.forking import fork_aware
from wsync.transport import Transfer
from wsync.weights.strategy import Format

_INDEX = struct.Struct("<I")  # a message: the index of a buffer; and, the first time, how to map it
_NAME, _CONNECTED = "socket", "connected"  # keys in the store
_CREDENTIALS = struct.Struct("iII")  # SO_PEERCRED: process, user, group
_MESSAGE_SIZE = 1 << 16  # bytes; a message has less than a kilobyte


class CudaTransport:
    """Weights from one process to another, on one GPU (a ``FlatTransport``).

    The worker maps each of the sender's buffers once. After that the sender names the buffer of an update in a few
    bytes over a Unix socket, and the worker copies it, on the GPU.

    Args:
        device: the GPU.
    """

    receives_ahead = False
    inline_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._exported: dict[int, int] = {}  # address of a buffer -> its index; on the sender
        self._mapped: dict[int, Tensor] = {}  # index -> the sender's buffer; in the worker
        fork_aware.add(self)

    def end_in_forked_child(self) -> None:
        """Close the copy of the socket: while one is open, the peer does not see the end of this process."""
        self._socket.close()

    def connect(self, store: Store, rank: int, connection_number: int, host: str, deadline: float | None) -> None:
        """See ``FlatTransport``.

        Raises:
            ConnectionError: a process of another user has connected.
        """
        own = self._socket
        own.settimeout(remaining(deadline))
        if rank == 0:
            own.connect(b"\0" + store.get(_NAME))
            store.set(_CONNECTED, "1")
        else:
            name = f"wsync-{secrets.token_hex(16)}"
            own.bind(b"\0" + name.encode())
            own.listen(1)
            store.set(_NAME, name)
            store.get(_CONNECTED)
            self._socket, _ = own.accept()
            own.close()
        self._socket.settimeout(None)
        _, user, _ = _CREDENTIALS.unpack(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user != os.getuid():
            raise ConnectionError("a process of another user has connected in the other end's place")

    def begin_send(self, flat: Tensor, transfers: list[Any]) -> None:
        """See ``FlatTransport``. ``flat`` has been packed: the copies on the GPU have ended."""
        address = flat.data_ptr()
        known = address in self._exported
        index = self._exported.get(address, len(self._exported))
        message = _INDEX.pack(index) + (b"" if known else bytes(ForkingPickler.dumps(flat)))
        try:
            transfers.extend(map(self._socket.send, [message]))
        except OSError as error:
            raise RuntimeError(f"the worker's socket is closed: {error}") from error
        self._exported[address] = index

    def begin_receive(self, flat: Tensor, transfers: list[Transfer]) -> None:
        """See ``FlatTransport``."""
        transfers.append(_Copy(self, flat))

    def copy_next(self, flat: Tensor, timeout: timedelta) -> None:
        """Copy the next update that the sender announces into ``flat``; on return the copy has ended.

        Raises:
            RuntimeError: the sender has closed the socket, or announced none in time.
        """
        try:
            self._socket.settimeout(timeout.total_seconds())
            message = self._socket.recv(_MESSAGE_SIZE)
        except OSError as error:
            raise RuntimeError(f"the sender's socket is closed, or brought nothing in time: {error}") from error
        if len(message) < _INDEX.size:
            raise RuntimeError("the sender has closed its socket")
        (index,) = _INDEX.unpack_from(message)
        if len(message) > _INDEX.size:
            self._mapped[index] = pickle.loads(memoryview(message)[_INDEX.size :])
        flat.copy_(self._mapped[index])
        torch.cuda.current_stream(flat.device).synchronize()

    def close(self, pending: object = None) -> bool:
        """See ``FlatTransport``. The peer may have begun to copy, so a buffer with a pending transfer is not reused."""
        with suppress(OSError):  # it was never connected
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._mapped.clear()
        return pending is not None


class _Copy:
    """The copy of an update that the sender has announced (a ``Transfer``)."""

    def __init__(self, transport: CudaTransport, flat: Tensor) -> None:
        self._transport = transport
        self._flat = flat

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        """See ``Transfer``."""
        self._transport.copy_next(self._flat, timeout)
        return True


class CudaWeightSyncScheme(WeightSyncScheme):
    """Weight synchronization between processes with models on one GPU.

    An update is copied twice, on the GPU: by the trainer into a buffer, and by each worker from there into a buffer of
    its own, from which it is installed in the gate. Nothing goes through main memory. A worker that is killed keeps the
    memory of the trainer's buffers allocated until the trainer ends, as PyTorch's shared CUDA tensors do.

    Args:
        device: the GPU, as PyTorch names it in the trainer and in each worker. ``"cuda"`` is the current one of the
            thread that initialises the scheme, or connects it.
        checksum: whether each update carries a checksum. It is computed in main memory, which takes longer than the
            update.
        strategy, sync, timeout, options: see ``WeightSyncScheme``.
    """

    name = "cuda"
    collectors: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        strategy: Format = "tensordict",
        sync: bool = True,
        *,
        device: str = "cuda:0",
        timeout: float | None = 60.0,
        checksum: bool = False,
        **options: Unpack[SchemeOptions],
    ) -> None:
        super().__init__(strategy, sync, timeout=timeout, bind=False, **options)
        self.checksum = checksum
        self._device = torch.device(device)
        if self._device.type != "cuda":
            raise ValueError(f"device is a GPU ('cuda:0'), not '{device}'")

    @property
    def device(self) -> torch.device:
        """See ``WeightSyncScheme``."""
        return with_index(self._device)

    def create_transport(self, worker_idx: int | None = None) -> CudaTransport:
        """Return the transport to (or in) a worker.

        Raises:
            NotConnected: there is no GPU here.
        """
        if not torch.cuda.is_available():
            raise NotConnected("there is no GPU that this process can use: use MultiProcessWeightSyncScheme instead")
        return CudaTransport(self.device)
