"""The two ends of a way through a process group of two, which they form."""

from __future__ import annotations

import ctypes
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import distributed
from torch.distributed import ProcessGroupGloo
from torch.distributed import Store as TorchStore  # pyright: ignore[reportPrivateImportUsage]

from wsync.deadlines import as_timedelta, remaining, time_until
from wsync.weights.packing import Buffer

BACKENDS = ("gloo", "nccl")
_PORT, _PROOF, _READY = "wsync port ", "wsync proof ", "wsync ready "  # keys in the store, with a rank
_PROOF_SIZE, _PROOF_TAG = 32, 1
_PROOF_TIMEOUT = 5.0  # seconds; milliseconds are enough
_SO_ATTACH_FILTER = 26  # of Linux
_NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"  # a watchdog would end this whole process when the other one has died
_making = threading.Lock()  # while a gloo device is made, and while the setting above is in the environment


def check_backend(backend: str) -> str:
    """Return ``backend``; ValueError: it is no backend of ``torch.distributed`` that is supported here."""
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


class Pair:
    """One end of a way through a group of two. Its methods block.

    Args:
        group: the group.
        peer: the rank of the other process.
        connections: gloo's to the other process; None with NCCL.
    """

    def __init__(self, group: Any, peer: int, connections: Sequence[socket.socket] | None) -> None:
        self.group = group
        self._peer, self._connections = peer, connections
        _pairs.add(self)

    def send(self, buffer: Buffer) -> None:
        """Send a version; RuntimeError if the group has broken."""
        if buffer.flat.is_cuda:
            torch.cuda.synchronize(buffer.flat.device)  # it has been packed
        self._finish(lambda group: group.send([buffer.flat], self._peer, 0), buffer)

    def receive(self, buffer: Buffer) -> None:
        """Receive a version; RuntimeError if the group has broken."""
        self._finish(lambda group: group.recv([buffer.flat], self._peer, 0), buffer)

    def _finish(self, begin: Callable[[Any], Any], buffer: Buffer) -> None:
        group = self.group  # kept until the transfer has ended
        if group is None:
            raise RuntimeError("this group was closed")
        transfer = begin(group)
        try:
            transfer.wait(as_timedelta(None))  # gloo gives the group up when a wait times out
        finally:
            del transfer, group  # the traceback of an error would keep them, and the port open
        if buffer.flat.is_cuda:  # there the wait is one of this thread's stream
            torch.cuda.current_stream(buffer.flat.device).synchronize()

    def close(self) -> None:
        """End the group, with what waits in it."""
        group, self.group = self.group, None  # without references to it, gloo closes its port
        for connection in self._connections or ():
            with suppress(OSError):  # the other end has closed it
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if self._connections is None and group is not None:
            group.abort()  # ends kernels of NCCL that wait for the other process


_pairs: WeakSet[Pair] = WeakSet()


def _keep_inherited() -> None:
    """Keep groups from being destroyed in a forked child: their threads are the parent's, which it waits for."""
    for pair in _pairs:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pair.group))


os.register_at_fork(after_in_child=_keep_inherited)


def form_pair(store: TorchStore, rank: int, backend: str, host: str, deadline: float | None) -> Pair:
    """Form one end of a pair; the other process does the same meanwhile.

    Args:
        store: by which the two find each other; not used after this call.
        rank: 0 on the sender, 1 in the worker.
        backend: ``"gloo"`` or ``"nccl"``.
        host: this process's address, by which the other one reaches it.
        deadline: on ``time.monotonic``'s clock; None for none.

    Raises:
        ConnectionError: another process has connected to gloo's port in the other end's place.
        RuntimeError: the group could not be formed.
    """
    if backend == "nccl":
        return Pair(_nccl_group(store, rank, device_of(backend), deadline), 1 - rank, None)
    group, connections = _gloo_group(store, rank, host, deadline)
    return Pair(group, 1 - rank, connections)


def _gloo_group(store: TorchStore, rank: int, host: str, deadline: float | None) -> tuple[Any, list[socket.socket]]:
    """Return a group of two over gloo, and its connections.

    gloo accepts any process that reaches its port while a group is formed. So both ends prove over the group, before
    any weights are sent, that they have what the other end has put into the store. From then on the port takes no
    connection: gloo would keep each for ever, and end this process when it has no descriptor left.
    """
    device, listener = _listening_device(host)
    with listener:
        options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [device]
        options._threads = 1  # sends and receives need no more
        options._timeout = time_until(deadline)
        own_port = listener.getsockname()[1]
        store.set(_PORT + str(rank), str(own_port))
        group = ProcessGroupGloo(store, rank, 2, options)
        _exchange_proofs(store, group, rank, deadline)
        drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # BPF: return 0, for each packet
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(drop_all)))
    other_port = int(store.get(_PORT + str(1 - rank)))
    return group, _tcp_sockets(lambda sock: sock.getpeername()[1] == other_port or sock.getsockname()[1] == own_port)


def _listening_device(host: str) -> tuple[Any, socket.socket]:
    """Return a device of gloo, and the socket on which it listens: the one that is new."""
    known = set[Any]()  # addresses on which this process listens

    def is_new(sock: socket.socket) -> bool:
        address, listens = sock.getsockname(), sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        new = bool(listens) and address not in known
        known.add(address)
        return new

    with _making:
        while True:
            for sock in _tcp_sockets(is_new):
                sock.close()
            device = ProcessGroupGloo.create_device(hostname=host)
            listening = _tcp_sockets(is_new)
            if len(listening) == 1:
                return device, listening[0]
            for sock in listening:
                sock.close()
            time.sleep(0.001)  # another thread has opened one in this moment: make another device


def _tcp_sockets(wanted: Callable[[socket.socket], bool]) -> list[socket.socket]:
    """Return duplicates of those TCP sockets of this process of which ``wanted`` is true, and raises no OSError."""
    found: list[socket.socket] = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, no socket, or not connected
            sock = socket.socket(fileno=int(name))
            try:
                is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
                if is_tcp and wanted(sock):  # `socket.dup` would make it block, and gloo's descriptor with it
                    found.append(socket.socket(fileno=os.dup(int(name))))
            finally:
                sock.detach()  # another object closes it
    return found


def _exchange_proofs(store: TorchStore, group: Any, rank: int, deadline: float | None) -> None:
    """Send over a new group what the other end has put into the store, and check that it does so too.

    Each end puts its value into the store when its half of the group is formed, so the values travel at once.
    """
    own, other = secrets.token_bytes(_PROOF_SIZE), 1 - rank
    store.set(_PROOF + str(rank), own)  # pyright: ignore[reportArgumentType]  bytes are taken as well
    given = torch.frombuffer(bytearray(store.get(_PROOF + str(other))), dtype=torch.uint8)
    shown = torch.zeros(_PROOF_SIZE, dtype=torch.uint8)
    transfers = [group.send([given], other, _PROOF_TAG), group.recv([shown], other, _PROOF_TAG)]
    left = remaining(deadline)
    limit = as_timedelta(_PROOF_TIMEOUT if left is None else max(min(left, _PROOF_TIMEOUT), 0.001))
    try:
        for transfer in transfers:
            transfer.wait(limit)
        proven = hmac.compare_digest(shown.numpy().tobytes(), own)
    except RuntimeError:
        proven = False
    if not proven:
        raise ConnectionError(
            "what is connected to gloo's port did not prove that it is the other end: has another process connected?"
        )


def _nccl_group(store: TorchStore, rank: int, device: torch.device, deadline: float | None) -> Any:
    """Return a group of two over NCCL, connected: later it could not be, without the store.

    NCCL waits for the other process without a deadline, so it begins when both processes have come this far.
    """
    from torch.distributed import ProcessGroupNCCL  # only in builds for CUDA

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = as_timedelta(None)  # deadlines are those of the scheme
    with torch.cuda.device(device):
        with _making:
            before = os.environ.get(_NO_WATCHDOG)
            os.environ[_NO_WATCHDOG] = "1"
            try:
                group: Any = ProcessGroupNCCL(store, rank, 2, options)
            finally:
                del os.environ[_NO_WATCHDOG]
                os.environ.update({} if before is None else {_NO_WATCHDOG: before})
        byte = torch.zeros(1, dtype=torch.uint8, device=device)  # initialises CUDA
        store.set(_READY + str(rank), "")
        store.get(_READY + str(1 - rank))
        group.eager_connect_single_device(device)
        (group.send if rank == 0 else group.recv)([byte], 1 - rank, 0).wait(time_until(deadline))
        torch.cuda.current_stream().synchronize()
    return group
