"""The medium of ``torch.distributed``: large updates go through a process group of two, the sender and one worker.

    trainer   Offer ─→ (first time: form the group) ─→ group.send ─┐
    worker    (first time: form the group) ─→ group.recv ←─────────┘

One group per connection: the members of a group are fixed, so a restarted worker needs a new one. The two processes
find each other by a store whose messages go over their authenticated connection. Small updates follow their offer.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.distributed import ProcessGroupGloo
from torch.distributed import Store as TorchStore  # pyright: ignore[reportPrivateImportUsage]

from wsync.control.wire import Link, Offer, Side
from wsync.deadlines import as_timeout, deadline_in, earlier, remaining, time_until
from wsync.media import BlockingMedium
from wsync.weights.layout import Buffer

INLINE_BYTES = 5 << 18  # 1 MiB with some padding: up to this size it was faster than gloo, over loopback
_LONGEST = 600.0  # seconds to form a group, where there is no deadline
_MAX_KEYS = 100
_DEVICES = 100  # of gloo, made to find the socket on which the last one listens
_PORT, _PROOF, _READY = "wsync port ", "wsync proof ", "wsync ready "  # keys in the store, with a rank
_PROOF_SIZE, _PROOF_TAG = 32, 1
_PROOF_TIMEOUT = 5.0  # seconds; milliseconds are enough
_EXIT_TIMEOUT = 2.0  # seconds
_SO_ATTACH_FILTER = 26  # of Linux
_NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"  # a watchdog would end this whole process when the other one has died
_making = threading.Lock()  # while a gloo device is made, and while the setting above is in the environment


class _LinkStore(TorchStore):
    """A ``torch.distributed`` store of two processes: a value that one sets, the other can get.

    The thread that forms a group calls ``set``, ``get``, ``wait`` and ``check``; the control thread calls the others.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()  # guards the values
        self._abandoned = False

    def begin(self, link: Link, deadline: float | None) -> None:
        """Send what is set from now on to the other process, and let every wait end at ``deadline``."""
        self._link, self._deadline, self._loop = link, deadline, asyncio.get_running_loop()

    def put(self, key: str, value: bytes) -> None:
        if len(self._values) > _MAX_KEYS:
            raise ConnectionError("the other end sets more keys than a group needs")
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def abandon(self) -> None:
        """Let every wait raise, now and later."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        content = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, content)
        sending = self._link.send(Side(text=key, data=content))
        try:
            asyncio.run_coroutine_threadsafe(sending, self._loop).result(remaining(self._deadline))
        except TimeoutError:
            raise RuntimeError(f"the other process did not take {key} in time") from None

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or self.check(keys), remaining(self._deadline))
        if self._abandoned:
            raise RuntimeError("the connection has ended")
        if not self.check(keys):
            raise RuntimeError(f"the other process did not set {', '.join(keys)} in time")

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)


class GroupMedium(BlockingMedium):
    """One end of a connection with a process group (``backend``: gloo or nccl) for large updates.

    Updates with at most ``inline_bytes`` follow their offer, unless nccl carries all. ``timeout``: seconds to form a
    group; None for ten minutes.
    """

    def __init__(self, backend: str, inline_bytes: int, timeout: float | None) -> None:
        super().__init__()
        self._backend, self._timeout = backend, timeout
        self._inline_bytes = inline_bytes if backend == "gloo" else -1
        self._store = _LinkStore()
        self._group: Any = None
        self._transfer: Any = None  # that was begun
        self._connections: Callable[[], list[socket.socket]] = list  # returns gloo's, to the other process
        _media.add(self)

    async def send(self, link: Link, offer: Offer, payload: Buffer | bytes) -> None:
        if isinstance(payload, bytes) or payload.layout.nbytes + len(offer.extra) <= self._inline_bytes:
            await super().send(link, offer, payload)
            return
        await link.send(replace(offer, medium=True))
        await self._carry(link, 0, payload)

    async def receive(self, link: Link, offer: Offer, into: Buffer) -> None:
        await self._carry(link, 1, into)

    async def _carry(self, link: Link, rank: int, buffer: Buffer) -> None:
        try:
            if self._group is None:
                deadline = deadline_in(as_timeout(self._timeout) or _LONGEST)
                self._store.begin(link, deadline)
                await self._call(self._form, rank, link.host, buffer.flat.device, deadline)
            if self._backend == "gloo":
                self._begin(rank, buffer)  # gloo only takes note of it
            else:
                await self._call(self._begin, rank, buffer)
            if rank == 1 or self._backend == "nccl":  # what gloo sends, it has sent when the worker answers
                await self._call(self._finish, buffer.flat)
        except (RuntimeError, OSError) as error:
            self._require_open()
            raise ConnectionError(f"the process group has broken: {error}") from error

    def _form(self, rank: int, host: str, device: torch.device, deadline: float | None) -> None:
        """Form this end of the group; the other process forms its end meanwhile."""
        if self._backend == "nccl":
            self._group = _nccl_group(self._store, rank, device, deadline)
        else:
            self._group, self._connections = _gloo_group(self._store, rank, host, deadline)
        if self._ended:  # `close` came before there was a group to close
            self._release()

    def _begin(self, rank: int, buffer: Buffer) -> None:
        group, flat = self._group, buffer.flat
        if group is None:
            raise RuntimeError("this group was closed")
        if rank == 0 and flat.is_cuda:
            torch.cuda.synchronize(flat.device)  # it has been packed
        self._transfer = (group.send if rank == 0 else group.recv)([flat], 1 - rank, 0)

    def _finish(self, flat: Tensor) -> None:
        transfer, self._transfer = self._transfer, None
        try:
            transfer.wait(time_until(None))  # gloo gives the group up when a wait times out
        finally:
            del transfer  # the traceback of an error would keep it, and the port open
        if flat.is_cuda:  # there the wait is one of this thread's stream
            torch.cuda.current_stream(flat.device).synchronize()

    def on_side(self, said: Side) -> None:
        self._store.put(said.text, said.data)

    def close(self) -> None:
        super().close()
        self._store.abandon()

    def _release(self) -> None:
        group, self._group = self._group, None  # without references to it, gloo closes its port
        for connection in self._connections():
            with connection, suppress(OSError):  # the other end has closed it
                connection.shutdown(socket.SHUT_RDWR)
        if group is not None and self._backend == "nccl":
            group.abort()  # ends kernels that wait for the other process


_media: WeakSet[GroupMedium] = WeakSet()


def _keep_inherited() -> None:
    """Keep groups from being destroyed in a forked child: their threads are the parent's, which it waits for."""
    for medium in _media:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(medium._group))


def _join_at_exit() -> None:
    """Let groups that are being destroyed be so: gloo would abort the process if the interpreter ended meanwhile."""
    for medium in [*_media]:
        if medium._ended:
            medium._closing.join(_EXIT_TIMEOUT)
            medium._transfers.join(_EXIT_TIMEOUT)


os.register_at_fork(after_in_child=_keep_inherited)
atexit.register(_join_at_exit)


# --- gloo ---


def _gloo_group(store: TorchStore, rank: int, host: str, deadline: float | None) -> tuple[Any, Callable[[], Any]]:
    """Return a group of two over gloo, and what finds its connections; RuntimeError: it could not be formed.

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
        own_host, own_port, *_ = listener.getsockname()
        store.set(_PORT + str(rank), str(own_port))
        group = ProcessGroupGloo(store, rank, 2, options)
        _exchange_proofs(store, group, rank, deadline)
        drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # BPF: return 0, for each packet
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(drop_all)))
    other_port = int(store.get(_PORT + str(1 - rank)))

    def is_ours(sock: socket.socket) -> bool:
        (_, other, *_), (host, own, *_) = sock.getpeername(), sock.getsockname()
        return host == own_host and (other == other_port or own == own_port)

    return group, partial(_tcp_sockets, is_ours)


def _listening_device(host: str) -> tuple[Any, socket.socket]:
    """Return a device of gloo, and the socket on which it listens: the one that is new."""
    known = set[Any]()  # addresses on which this process listens

    def is_new(sock: socket.socket) -> bool:
        address, listens = sock.getsockname(), sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        new = bool(listens) and address not in known
        known.add(address)
        return new

    with _making:
        for _ in range(_DEVICES):
            for sock in _tcp_sockets(is_new):
                sock.close()
            device = ProcessGroupGloo.create_device(hostname=host)
            listening = _tcp_sockets(is_new)
            if len(listening) == 1:
                return device, listening[0]
            for sock in listening:  # another thread has opened one at the same time: make another device
                sock.close()
    raise RuntimeError("other threads open listening sockets all the time: the one of gloo cannot be found")


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
    """Send over a new group what the other end has put into the store; ConnectionError: that does not do so, too."""
    own, other = secrets.token_bytes(_PROOF_SIZE), 1 - rank
    store.set(_PROOF + str(rank), own)  # pyright: ignore[reportArgumentType]  bytes are taken as well
    given = torch.frombuffer(bytearray(store.get(_PROOF + str(other))), dtype=torch.uint8)
    shown = torch.zeros(_PROOF_SIZE, dtype=torch.uint8)
    transfers = [group.send([given], other, _PROOF_TAG), group.recv([shown], other, _PROOF_TAG)]
    limit = time_until(earlier(deadline, deadline_in(_PROOF_TIMEOUT)))
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


# --- nccl ---


def _nccl_group(store: TorchStore, rank: int, device: torch.device, deadline: float | None) -> Any:
    """Return a group of two over NCCL, connected: later it could not be, without the store.

    NCCL waits for the other process without a deadline, so it begins when both processes have come this far.
    """
    from torch.distributed import ProcessGroupNCCL  # only in builds for CUDA

    options: Any = ProcessGroupNCCL.Options()
    options._timeout = time_until(None)  # deadlines are those of the scheme
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
