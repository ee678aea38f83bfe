"""The medium of ``torch.distributed``: large updates go through a process group of two, the sender and one worker.

    trainer   Offer ─→ (first time: form the group) ─→ group.send ─┐
    worker    (first time: form the group) ─→ group.recv ←─────────┘

One group per connection: the members of a group are fixed, so a restarted worker needs a new one. The two processes
find each other by a store whose messages go over their authenticated connection. The group is formed when an update
needs it. Small updates follow their offer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
from torch.distributed import Store as TorchStore  # pyright: ignore[reportPrivateImportUsage]

from wsync.control.wire import Link, Offer, Side
from wsync.deadlines import as_timeout, deadline_in, remaining
from wsync.media.blocking import BlockingMedium
from wsync.media.pair import Pair, form_pair
from wsync.weights.packing import Buffer

INLINE_BYTES = 5 << 18  # 1 MiB with some padding: up to this size it was faster than gloo, over loopback
_LONGEST = 600.0  # seconds to form a group, where there is no deadline
_MAX_KEYS = 100


class LinkStore(TorchStore):
    """A ``torch.distributed`` store of two processes: a value that one sets, the other can get.

    The thread that forms a group calls ``set``, ``get``, ``wait`` and ``check``; all else runs in the control thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._values: dict[str, bytes] = {}
        self._changed = asyncio.Event()
        self._abandoned = False

    def begin(self, link: Link, deadline: float | None) -> None:
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
        """Set a value, here and in the other process."""
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
        inline_bytes: updates with at most this many bytes follow their offer, unless nccl carries all.
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
        pair = await self._formed(link, 0)
        await self._call_group("transfer", pair.send, payload)

    async def receive(self, link: Link, offer: Offer, into: Buffer) -> None:
        """Receive a large update."""
        pair = await self._formed(link, 1)
        await self._call_group("transfer", pair.receive, into)

    async def _formed(self, link: Link, rank: int) -> Pair:
        if self._pair is None:
            deadline = deadline_in(as_timeout(self._timeout) or _LONGEST)
            self._store.begin(link, deadline)
            await self._call_group("transport-setup", self._form, rank, link.host, deadline)
        assert self._pair is not None, "it has been formed"
        return self._pair

    def _form(self, rank: int, host: str, deadline: float | None) -> None:
        self._pair = form_pair(self._store, rank, self._backend, host, deadline)
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
