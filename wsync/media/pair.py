"""The two ends of a way through a process group: a group of two that they form, or one that the user has made."""

from __future__ import annotations

import ctypes
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import distributed
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed import Store as TorchStore  # pyright: ignore[reportPrivateImportUsage]

from wsync.deadlines import as_timedelta, remaining, time_until
from wsync.errors import NotConnected
from wsync.weights.packing import Buffer

BACKENDS = ("gloo", "nccl")
# Keys in the store. The place is the sender's rank in the user's group, and the tag; empty for a group of two.
_PLACE = "wsync group"
_PORT, _PROOF, _READY = "wsync port ", "wsync proof ", "wsync ready "  # with a rank
_PROOF_SIZE, _PROOF_TAG = 32, 1
_PROOF_TIMEOUT = 5.0  # seconds; milliseconds are enough
_SO_ATTACH_FILTER = 26  # of Linux
_NCCL_SETTINGS = {  # read when a group is made
    "TORCH_NCCL_BLOCKING_WAIT": "1",  # no watchdog: it would end this whole process when the other one has died
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",  # a group of two sends one tensor at a time
}
_making = threading.Lock()  # while a gloo device is made, and while the settings above are in the environment


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


# --- a pair: the two ends of a way through a group ---


class Pair:
    """One end of a way through a group to one other process. Its methods block.

    Args:
        group: of two, or the user's.
        peer: the rank of the other process.
        tag: of all transfers.
        connections: gloo's to the other process.
        owned: whether it is a group of two.
    """

    def __init__(
        self, group: Any, peer: int, tag: int = 0, connections: Sequence[socket.socket] = (), *, owned: bool = False
    ) -> None:
        self.group = group
        self._peer, self._tag = peer, tag
        self._connections, self._owned = connections, owned
        _pairs.add(self)

    def send(self, buffer: Buffer) -> None:
        """Send a version; RuntimeError if the group has broken."""
        if buffer.flat.is_cuda:
            torch.cuda.synchronize(buffer.flat.device)  # it has been packed
        self._finish(self.group.send([buffer.flat], self._peer, self._tag), buffer)

    def receive(self, buffer: Buffer) -> None:
        """Receive a version; RuntimeError if the group has broken."""
        self._finish(self.group.recv([buffer.flat], self._peer, self._tag), buffer)

    @staticmethod
    def _finish(transfer: Any, buffer: Buffer) -> None:
        transfer.wait(as_timedelta(None))  # gloo gives the group up when a wait times out
        if buffer.flat.is_cuda:  # there the wait is one of this thread's stream
            torch.cuda.current_stream(buffer.flat.device).synchronize()

    def close(self) -> None:
        """End a group of two, with what waits in it. A transfer in the user's group is left to end with that group."""
        for connection in self._connections:
            with suppress(OSError):  # the other end has closed it
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        if self._owned and not self._connections:
            self.group.abort()  # of NCCL: ends kernels that wait for the other process


_pairs: WeakSet[Pair] = WeakSet()


def _keep_inherited() -> None:
    """Keep groups from being destroyed in a forked child: their threads are the parent's, which it waits for."""
    for pair in _pairs:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pair.group))


os.register_at_fork(after_in_child=_keep_inherited)


def form_pair(
    store: TorchStore,
    rank: int,
    *,
    backend: str = "gloo",
    group: ProcessGroup | None = None,
    worker: int = 0,
    host: str = "127.0.0.1",
    deadline: float | None = None,
) -> Pair:
    """Form one end of a pair; the other process does the same meanwhile.

    Args:
        store: by which the two find each other; not used after this call.
        rank: 0 on the sender, 1 in the worker.
        backend: of a group of two.
        group: the user's, instead of a group of two. Its ranks other than the sender's are the workers, in order.
        worker: the worker's index.
        host: this process's address, by which the other one reaches it.
        deadline: on ``time.monotonic``'s clock; None for none.

    Raises:
        NotConnected: one end was given a group by the user, and the other was not.
        ConnectionError: another process has connected to gloo's port in the other end's place.
        RuntimeError: the group could not be formed.
    """
    if rank == 0:
        store.set(_PLACE, "" if group is None else f"{group.rank()} {secrets.randbits(30)}")
    place = store.get(_PLACE).decode()
    if bool(place) != (group is not None):
        raise NotConnected("only one end was given a process group: give both ends group=")
    if group is not None:
        sender, tag = map(int, place.split())  # the tag is new: a restarted worker must not get its predecessor's data
        return Pair(group, worker + (worker >= sender) if rank == 0 else sender, tag)
    if backend == "nccl":
        return Pair(_nccl_group(store, rank, device_of(backend), deadline), 1 - rank, owned=True)
    made, connections = _gloo_group(store, rank, host, deadline)
    return Pair(made, 1 - rank, connections=connections, owned=True)


def _gloo_group(
    store: TorchStore, rank: int, host: str, deadline: float | None
) -> tuple[ProcessGroupGloo, list[socket.socket]]:
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
        port = listener.getsockname()[1]
        store.set(_PORT + str(rank), str(port))
        group = ProcessGroupGloo(store, rank, 2, options)
        _exchange_proofs(store, group, rank, deadline)
        drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # BPF: return 0, for each packet
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(drop_all)))
    return group, _connections_of(port, int(store.get(_PORT + str(1 - rank))))


def _listening_device(host: str) -> tuple[Any, socket.socket]:
    """Return a device of gloo, and the socket on which it listens: the one that is new."""
    with _making:
        while True:
            before = {inode for inode, _ in _inet_sockets()}
            device = ProcessGroupGloo.create_device(hostname=host)
            new = [_kept(sock) for inode, sock in _inet_sockets() if inode not in before and _listens(sock)]
            if len(new) == 1:
                return device, new[0]
            for sock in new:
                sock.close()
            time.sleep(0.001)  # another thread has opened one in this moment: make another device


def _connections_of(own_port: int, other_port: int) -> list[socket.socket]:
    """Return gloo's connection between two ports on which its devices listen, or did; and any to the own one."""
    found = []
    for _, sock in _inet_sockets():
        with suppress(OSError):  # not connected
            if sock.getpeername()[1] == other_port or sock.getsockname()[1] == own_port:
                found.append(_kept(sock))
    return found


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _kept(sock: socket.socket) -> socket.socket:
    """Keep what ``_inet_sockets`` yields: ``socket.dup`` would make it block, and gloo's descriptor with it."""
    return socket.socket(fileno=sock.detach())


def _inet_sockets() -> Iterator[tuple[int, socket.socket]]:
    """Return each TCP socket of this process: its inode, and a duplicate, which is closed before the next one."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            fd = os.dup(int(name))
            try:
                sock = socket.socket(fileno=fd)
            except OSError:
                os.close(fd)
                continue
            with sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    yield os.fstat(fd).st_ino, sock


def _exchange_proofs(store: TorchStore, group: Any, rank: int, deadline: float | None) -> None:
    """Send over a new group of two what the other end has put into the store, and check that it does so too.

    Each end puts its value into the store when its half of the group is formed, so the values travel at once.

    Raises:
        ConnectionError: the other end does not.
        RuntimeError: it has not formed its half.
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

    NCCL waits for the other process without a deadline. So it begins when both processes have come this far.
    """
    from torch.distributed import ProcessGroupNCCL  # only in builds for CUDA

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = as_timedelta(None)  # deadlines are those of the scheme
    with torch.cuda.device(device):
        with _nccl_settings():
            group: Any = ProcessGroupNCCL(store, rank, 2, options)
        byte = torch.zeros(1, dtype=torch.uint8, device=device)  # initialises CUDA
        store.set(_READY + str(rank), "")
        store.get(_READY + str(1 - rank))
        group.eager_connect_single_device(device)
        (group.send if rank == 0 else group.recv)([byte], 1 - rank, 0).wait(time_until(deadline))
        torch.cuda.current_stream().synchronize()
    return group


@contextmanager
def _nccl_settings() -> Iterator[None]:
    with _making:
        before = {name: os.environ.get(name) for name in _NCCL_SETTINGS}
        os.environ.update(_NCCL_SETTINGS)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
