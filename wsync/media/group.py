"""The medium of ``torch.distributed``: large updates go through a process group of two, the sender and one worker.

    trainer   Offer ─→ (first time: form the group) ─→ group.send ─┐
    worker    (first time: form the group) ─→ group.recv ←─────────┘

One group per connection: the members of a group are fixed, so a restarted worker needs a new one. The two processes
find each other by a store whose messages go over their authenticated connection. The group is formed when an update
needs it. Small updates follow their offer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
from torch import distributed
from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed import Store as TorchStore  # pyright: ignore[reportPrivateImportUsage]

from wsync.control.wire import Link, Offer, Side
from wsync.deadlines import as_timeout, deadline_in, remaining
from wsync.media.inline import BlockingMedium
from wsync.media.pair import Pair, device_of, form_pair
from wsync.transport import TransportBackend, apply_received
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.weights.snapshot import snapshot

INLINE_BYTES = 5 << 18  # 1 MiB with some padding: up to this size it was faster than gloo, over loopback
_LONGEST = 600.0  # seconds to form a group, where there is no deadline
_MAX_KEYS = 100

# --- under a scheme ---


class LinkStore(TorchStore):
    """A ``torch.distributed`` store of two processes: a value that one sets, the other can get.

    ``torch.distributed`` calls ``set``, ``get``, ``wait`` and ``check`` in the thread that forms a group; all else
    runs in the control thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Event()
        self._abandoned = False

    def begin(self, link: Link, deadline: float) -> None:
        """Send what is set from now on to the other process, and let every wait end at ``deadline``."""
        self._link, self._deadline = link, deadline

    def put(self, key: str, value: bytes) -> None:
        """Store a value."""
        if len(self._values) > _MAX_KEYS:
            raise ConnectionError("the other end sets more keys than a group needs")
        self._values[key] = value
        self._changed.set()

    def abandon(self) -> None:
        """Let every wait raise, now and later."""
        self._abandoned = True
        self._changed.set()

    async def _set(self, key: str, value: bytes) -> None:
        self.put(key, value)
        await self._link.send(Side(msgspec.msgpack.encode((key, value))))

    async def _until_set(self, keys: Sequence[str]) -> None:
        while not self.check(keys) and not self._abandoned:
            self._changed.clear()
            await self._changed.wait()

    def _run(self, coroutine: Coroutine[Any, Any, None], what: str) -> None:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            future.result(remaining(self._deadline))
        except TimeoutError:
            future.cancel()
            raise RuntimeError(f"the other process did not {what} in time") from None
        if self._abandoned:
            raise RuntimeError("the connection has ended")

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value here and in the other process."""
        self._run(self._set(key, value.encode() if isinstance(value, str) else bytes(value)), f"take {key}")

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        """Wait for keys."""
        self._run(self._until_set(keys), f"set {', '.join(keys)}")

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether there are values for all keys."""
        return all(key in self._values for key in keys)


class GroupMedium(BlockingMedium):
    """One end of a connection whose large updates go through a process group.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        inline_bytes: updates with at most this many bytes of weights and extra state follow their offer; nccl carries
            all.
        timeout: seconds to form a group; None for ten minutes.
    """

    def __init__(self, backend: str = "gloo", inline_bytes: int = INLINE_BYTES, timeout: float | None = None) -> None:
        super().__init__()
        self._backend = backend
        self._inline_bytes = inline_bytes if backend == "gloo" else -1
        self._timeout = timeout
        self._store = LinkStore()
        self._pair: Pair | None = None

    async def send(self, link: Link, offer: Offer, payload: Buffer | bytes) -> None:
        """Send a small update inline, a large one through the group."""
        if isinstance(payload, bytes) or payload.layout.nbytes + len(offer.extra) <= self._inline_bytes:
            await super().send(link, offer, payload)
            return
        await link.send(msgspec.structs.replace(offer, medium=True))
        pair = self._pair or await self._form(link, 0)
        await self._call_group("transfer", pair.send, payload)

    async def receive(self, link: Link, offer: Offer, into: Buffer) -> None:
        """Receive a large update."""
        pair = self._pair or await self._form(link, 1)
        await self._call_group("transfer", pair.receive, into)

    async def _form(self, link: Link, rank: int) -> Pair:
        deadline = deadline_in(as_timeout(self._timeout) or _LONGEST)
        assert deadline is not None
        self._store.begin(link, deadline)
        await self._call_group("transport-setup", self._form_pair, rank, link.host, deadline)
        assert self._pair is not None
        return self._pair

    def _form_pair(self, rank: int, host: str, deadline: float) -> None:
        self._pair = form_pair(self._store, rank, backend=self._backend, host=host, deadline=deadline)
        if self._closed.is_set():  # meanwhile: nobody else closes it
            self._pair.close()

    async def _call_group(self, name: str, function: Callable[..., None], *args: Any) -> None:
        try:
            await self._call(name, function, *args)
        except (RuntimeError, OSError) as error:
            self._require_open()
            raise ConnectionError(f"the process group has broken: {error}") from error

    def on_side(self, data: bytes) -> None:
        """Store what the other end has set."""
        try:
            self._store.put(*msgspec.msgpack.decode(data, type=tuple[str, bytes]))
        except msgspec.DecodeError as error:
            raise ConnectionError(f"the other end has sent something unknown: {error}") from error

    def close(self) -> None:
        """End a transfer, and the forming of the group."""
        super().close()
        self._store.abandon()

    def _release(self) -> None:
        if self._pair is not None:
            self._pair.close()


# --- without a scheme ---


class DistributedTransport(TransportBackend):
    """One end of a process group of two, without a scheme (a ``TransportBackend``).

    Args:
        weights_buffer: weights of the layout that is sent.
        store: a ``torch.distributed`` store by which the two processes find each other, and form a group; None: they
            use the default group, in which the sender has rank 0.
        rank: the worker's in the default group; with ``store``, any number that both processes give for the worker.
        backend: ``"gloo"`` or ``"nccl"``: of the group that is formed.
        host: with ``store``: this process's address, by which the other one reaches it.
    """

    def __init__(
        self,
        *,
        weights_buffer: Any = None,
        store: TorchStore | None = None,
        rank: int = 1,
        backend: str = "gloo",
        host: str = "127.0.0.1",
    ) -> None:
        self._weights_buffer, self._backend = weights_buffer, backend
        self._store, self._rank, self._host = store, rank, host
        self._pair: Pair | None = None
        self._receiving: tuple[Buffer, Future[None]] | None = None  # begun, and not yet returned

    def _formed(self, rank: int) -> Pair:
        if self._pair is None and self._store is not None:
            store = PrefixStore(f"wsync/{self._rank}", self._store)
            self._pair = form_pair(store, rank, backend=self._backend, host=self._host)
        elif self._pair is None:
            group = distributed.distributed_c10d._get_default_group()
            self._pair = Pair(group, self._rank if rank == 0 else 0)
        return self._pair

    def setup_connection_and_weights_on_sender(self) -> None:
        """Form the group by ``store``, unless that has been done."""
        self._formed(0)

    def setup_connection_and_weights_on_receiver(self, *, worker_idx: int | None = None, **into: Any) -> Any | None:
        """Form the group, as on the sender; the first weights arrive by ``receive_weights``, like all others."""
        self._formed(1)

    def send_weights(self, weights: Any) -> None:
        """Send one version, and return when it has been sent.

        Raises:
            LayoutMismatch: the weights are not like ``weights_buffer``.
            RuntimeError: the group has broken.
        """
        pair, buffer = self._formed(0), self._new_buffer(self._weights_buffer)
        buffer.pack(buffer.layout.order(snapshot(weights)))
        pair.send(buffer)

    def receive_weights(self, timeout: float | None = None, *, weights: Any = None, **into: Any) -> Any | None:
        """Return the next version, as in ``TransportBackend``; after None, a later call receives it.

        Raises:
            RuntimeError: the group has broken.
        """
        pair = self._formed(1)
        if self._receiving is None:
            buffer = self._new_buffer(self._weights_buffer if weights is None else weights)
            self._receiving = buffer, _in_thread(pair.receive, buffer)
        buffer, arriving = self._receiving
        try:
            arriving.result(as_timeout(timeout))
        except TimeoutError:
            return None
        self._receiving = None
        return apply_received(dict(zip(buffer.layout.names, buffer.views, strict=True)), weights, **into)

    def _new_buffer(self, like: Any) -> Buffer:
        """Return a buffer with the layout of a module, a TensorDict or a state dict."""
        if like is None:
            raise RuntimeError(
                "without a scheme this transport needs weights_buffer=, weights like those that are sent"
            )
        return Buffer.new(Layout.of(snapshot(like)), device=device_of(self._backend))

    def close(self) -> None:
        """End the group of two, and what waits in it."""
        if self._pair is not None:
            self._pair.close()
        self._pair = None


def _in_thread(function: Callable[[Buffer], None], buffer: Buffer) -> Future[None]:
    future = Future[None]()

    def work() -> None:
        try:
            future.set_result(function(buffer))
        except Exception as error:  # noqa: BLE001  raised where the result is awaited
            future.set_exception(error)

    threading.Thread(target=work, name="wsync-pending-transfer", daemon=True).start()
    return future
