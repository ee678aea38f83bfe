"""The medium of ``torch.distributed``: large updates go through a process group of two, the sender and one worker.

    trainer   Offer ─→ (first time: form the group) ─→ group.send ─┐
    worker    (first time: form the group) ─→ group.recv ←─────────┘

One group per connection: the members of a group are fixed, so a restarted worker needs a new one. The two processes
find each other by a store whose messages go over their authenticated connection. The group is formed when an update
needs it. Small updates follow their offer. Weights may instead go through a group that the user has made.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import torch
from torch import distributed, nn
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    ProcessGroup,
)
from torch.distributed import Store as TorchStore  # pyright: ignore[reportPrivateImportUsage]

from wsync.control.loop import run_blocking
from wsync.control.session import Medium
from wsync.control.wire import Link, Offer, Side
from wsync.deadlines import deadline_in, remaining
from wsync.media.pair import Pair, device_of, form_pair
from wsync.transport import apply_received, weights_of
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.weights.snapshot import snapshot
from wsync.weights.strategy import WeightStrategy

T = TypeVar("T")
INLINE_BYTES = 5 << 18  # 1 MiB with some padding: up to this size it was faster than gloo, over loopback
_LONGEST = 600.0  # seconds to form a group, where there is no deadline
_MAX_KEYS = 100
_PATIENCE = 2.0  # seconds for a group to end

# --- under a scheme ---


class LinkStore(TorchStore):
    """A ``torch.distributed`` store of two processes: a value that one sets, the other can get.

    Its ``torch.distributed`` methods are called by the thread that forms a group, the others by the control thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._relay: Callable[[str, bytes], None] | None = None
        self._abandoned = False

    def begin(self, relay: Callable[[str, bytes], None], deadline: float | None) -> None:
        """Relay what is set from now on, and let every wait end at ``deadline``."""
        self._relay, self._deadline = relay, deadline

    def put(self, key: str, value: bytes) -> None:
        """Store a value that the other process has set."""
        with self._changed:
            if len(self._values) > _MAX_KEYS:
                raise ConnectionError("the other end sets more keys than a group needs")
            self._values[key] = value
            self._changed.notify_all()

    def abandon(self) -> None:
        """Let every wait raise, now and later."""
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value here and in the other process."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.put(key, data)
        if self._relay is not None:
            self._relay(key, data)

    def get(self, key: str) -> bytes:
        """Wait for a key, and return its value."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        """Wait for keys."""

        def complete() -> bool:
            return self._abandoned or all(key in self._values for key in keys)

        with self._changed:
            if not self._changed.wait_for(complete, remaining(self._deadline)) or self._abandoned:
                raise RuntimeError(f"the other process did not set {', '.join(keys)} in time")

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether there are values for all keys."""
        return all(key in self._values for key in keys)


class GroupMedium(Medium):
    """One end of a connection whose large updates go through a process group.

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        group: the user's, instead of a group of two.
        worker: the worker's index.
        inline_bytes: updates with at most this many bytes of weights and extra state follow their offer; nccl, and the
            user's group, carry all.
        timeout: seconds to form a group; None for ten minutes.
    """

    def __init__(
        self,
        backend: str = "gloo",
        group: ProcessGroup | None = None,
        worker: int = 0,
        inline_bytes: int = INLINE_BYTES,
        timeout: float | None = None,
    ) -> None:
        self._backend, self._users_group, self._worker = backend, group, worker
        self._inline_bytes = inline_bytes if backend == "gloo" and group is None else -1
        self._timeout = timeout
        self._store = LinkStore()
        self._pair: Pair | None = None
        self._work: asyncio.Task[Any] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._closed = asyncio.Event()

    async def send(self, link: Link, offer: Offer, payload: Buffer | bytes) -> None:
        """Send a small update inline, a large one through the group."""
        if isinstance(payload, bytes) or payload.layout.nbytes + len(offer.extra) <= self._inline_bytes:
            await super().send(link, offer, payload)
            return
        await link.send(msgspec.structs.replace(offer, medium=True))
        pair = self._pair or await self._form(link, 0)
        await self._call("transfer", pair.send, payload)

    async def receive(self, link: Link, offer: Offer, into: Buffer) -> None:
        """Receive a large update."""
        pair = self._pair or await self._form(link, 1)
        await self._call("transfer", pair.receive, into)

    async def _form(self, link: Link, rank: int) -> Pair:
        loop, deadline = asyncio.get_running_loop(), deadline_in(self._timeout or _LONGEST)

        def relay(key: str, value: bytes) -> None:
            side = Side(msgspec.msgpack.encode((key, value)))
            asyncio.run_coroutine_threadsafe(link.send(side), loop).result(remaining(deadline))

        def form() -> Pair:
            pair = form_pair(
                self._store, rank, backend=self._backend, group=self._users_group, worker=self._worker,
                host=link.host, deadline=deadline,
            )  # fmt: skip
            if self._closed.is_set():  # meanwhile: nobody else closes it
                pair.close()
            return pair

        self._store.begin(relay, deadline)
        self._pair = await self._call("transport-setup", form)
        return self._pair

    async def _call(self, name: str, function: Callable[..., T], *args: Any) -> T:
        """Call a function in a thread. ``close`` ends the wait; the buffer is kept until the function has returned."""
        work = asyncio.ensure_future(run_blocking(name, function, *args))
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen
        closed = asyncio.ensure_future(self._closed.wait())
        self._work = work
        await asyncio.wait([work, closed], return_when=asyncio.FIRST_COMPLETED)
        closed.cancel()
        if self._closed.is_set():
            raise ConnectionError("the connection has ended")
        try:
            return work.result()
        except (RuntimeError, OSError, TimeoutError) as error:
            raise ConnectionError(f"the process group has broken: {error}") from error

    def on_side(self, data: bytes) -> None:
        """Store what the other end has set."""
        try:
            self._store.put(*msgspec.msgpack.decode(data, type=tuple[str, bytes]))
        except msgspec.DecodeError as error:
            raise ConnectionError(f"the other end has sent something unknown: {error}") from error

    def close(self) -> None:
        """End a transfer, and the forming of the group."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._store.abandon()
        if self._pair is not None:
            self._closing = asyncio.ensure_future(run_blocking("group-close", self._pair.close))

    async def wait_closed(self) -> None:
        """Wait until no thread is in the group."""
        if ending := [task for task in (self._work, self._closing) if task is not None]:
            await asyncio.wait(ending)


# --- without a scheme ---


class DistributedTransport:
    """One end of a process group of two, without a scheme (a ``TransportBackend``).

    Args:
        backend: ``"gloo"`` or ``"nccl"``.
        group: the user's group, instead of a group of two.
        worker: the worker's index. In the user's group the ranks other than the sender's are the workers, in order.
        inline_bytes: of a scheme; without effect here.
        weights_buffer: weights of the layout that is sent.
        store: a ``torch.distributed`` store by which the two processes find each other; None: the default group is
            used.
        rank: the worker's rank in the default group; with ``store``, any number that both processes give for the
            worker.
        host: with ``store``: this process's address, by which the other one reaches it.
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
        self.inline_bytes = inline_bytes
        self._backend, self._users_group, self._worker = backend, group, worker
        self._store, self._rank, self._host = store, rank, host
        self._pair: Pair | None = None
        self._sending: Future[None] | None = None  # of ``send_weights_async``, until ``wait_ack``
        self._receiving: tuple[Buffer, Future[None]] | None = None  # begun, and not yet returned
        self._buffer = None if weights_buffer is None else _buffer_like(weights_buffer, self.device)

    def setup_connection_and_weights_on_sender(self) -> None:
        """Form the group by ``store``, or use the default group; nothing happens if that has been done."""
        self._set_up(0)

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """Form the group, as on the sender; the first weights arrive by ``receive_weights``, like all others."""
        self._set_up(1)
        return None

    def _set_up(self, rank: int) -> Pair:
        if self._pair is not None:
            return self._pair
        if self._store is None:
            group = distributed.distributed_c10d._get_default_group()
            self._pair = Pair(group, self._rank if rank == 0 else 0)
        else:
            store = PrefixStore(f"wsync/{self._rank}", self._store)
            self._pair = form_pair(
                store, rank, backend=self._backend, group=self._users_group, worker=self._worker, host=self._host
            )
        return self._pair

    def check_connection(self) -> bool:
        """Return whether the two ends have formed their group. Of the older API."""
        return self._pair is not None

    def send_weights(self, weights: Any, older_weights: Any = None) -> None:
        """Send one version, and return when it has been sent.

        The older API's ``send_weights(model_id, weights)`` does the same.

        Raises:
            LayoutMismatch: the weights are not like ``weights_buffer``.
            RuntimeError: the group has broken.
        """
        self.send_weights_async(weights, older_weights)
        self.wait_ack()

    def send_weights_async(self, weights: Any, older_weights: Any = None) -> None:
        """Begin to send one version, as ``send_weights`` does; ``wait_ack`` waits. Of the older API."""
        pair, buffer = self._set_up(0), self._require_buffer()
        self.wait_ack()  # what was sent before is in the same buffer
        buffer.pack(buffer.layout.order(snapshot(weights_of(weights, older_weights))))
        self._sending = _in_thread(pair.send, buffer)

    def wait_ack(self) -> None:
        """Wait until what ``send_weights_async`` has begun to send has been sent. Of the older API.

        Raises:
            RuntimeError: the group has broken.
        """
        sending, self._sending = self._sending, None
        if sending is not None:
            sending.result()

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
        pair = self._set_up(1)
        if self._receiving is None:
            buffer = self._require_buffer() if weights is None else _buffer_like(weights, self.device)
            self._receiving = buffer, _in_thread(pair.receive, buffer)
        buffer, arriving = self._receiving
        try:
            arriving.result(remaining(deadline_in(timeout)))
        except TimeoutError:
            return None
        self._receiving = None
        copies = [view.clone() for view in buffer.views]  # the next version may overwrite the buffer
        return apply_received(dict(zip(buffer.layout.names, copies, strict=True)), weights, model, strategy)

    def _require_buffer(self) -> Buffer:
        if self._buffer is None:
            raise RuntimeError(
                "without a scheme this transport needs weights_buffer=, weights like those that are sent"
            )
        return self._buffer

    def close(self) -> None:
        """End the group of two, and what waits in it."""
        if self._pair is not None:
            self._pair.close()
        self._pair = None


def _in_thread(function: Callable[..., None], *args: Any) -> Future[None]:
    future = Future[None]()

    def work() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001  raised where the result is awaited
            future.set_exception(error)

    threading.Thread(target=work, name="wsync-pending-transfer", daemon=True).start()
    return future


def _buffer_like(weights: Any, device: torch.device) -> Buffer:
    """Return a buffer with the layout of a module, a TensorDict or a state dict."""
    return Buffer.new(Layout.of(snapshot(weights)), device=device)
