"""How workers find the sender: by the address in the pickled scheme, or in a store of ``torch.distributed``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, count
from typing import Any

from torch import distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from wsync.control.auth import Address, new_key, shared_key
from wsync.deadlines import remaining, time_until
from wsync.errors import NotConnected, SyncTimeout

Join = Callable[[Address], int]
"""Connects a worker to the sender at an address; NotConnected: the sender has gone, or has refused the worker."""


class Rendezvous:
    """How workers find the sender: here by the address in the pickled scheme.

    ``host``: the sender's address, by which workers on other machines reach it; None for this machine only. ``port``:
    where it listens there; 0 for any free one.
    """

    def __init__(self, host: str | None = None, port: int = 0) -> None:
        self.host, self.port = host, port

    def key(self) -> bytes:
        """On the sender: return the key that workers must have."""
        return new_key()

    def pickled(self, address: Address) -> Any:
        """On the sender: return what the pickled scheme has of its address."""
        return address

    def announce(self, address: Address, model_id: str, deadline: float | None) -> None:
        """On the sender: publish the address. Called by each ``connect`` until all workers have connected."""

    def can_look_up(self) -> bool:
        """In a worker: return whether ``meet`` can find the sender without what was pickled."""
        return False

    def meet(self, pickled: Any, model_id: str, worker: int, deadline: float | None, join: Join) -> int:
        """In a worker: find the sender, and return what ``join`` returned for its address.

        ``pickled`` is None only if ``can_look_up()``. NotConnected: no sender is there. SyncTimeout: it did not come.
        """
        return join(pickled)

    def close(self) -> None:
        """In a worker: end a ``meet`` that waits in another thread."""


_PAUSE = 0.05  # seconds between two looks into a store
_used: set[tuple[str, int]] = set()  # senders that were looked up, and by which worker


class TorchStoreRendezvous(Rendezvous):
    """TCP; a worker without an address looks the sender up in a ``torch.distributed`` store of all processes.

    The store holds addresses, without a key, and nothing else is taken from it: any process may write there. All
    processes share a key (``shared_key``; that of the run, without a store or port), and the handshake proves it. A
    worker connects to the sender that it was connected to last; else to the first one of its model that is still there
    and that it has not been connected to before. ``store``: None for that of the default group, or of ``torchrun``.
    """

    def __init__(self, host: str, store: Store | None = None, port: int = 0) -> None:
        super().__init__(host, port)
        self._store, self._of_run = store, store is None and not port
        self._last: Address | None = None  # the sender that this worker was connected to
        self._closed = False  # a `meet` has to end

    def key(self) -> bytes:
        """Return the shared key where workers come by a store or the port, else a random one."""
        return shared_key(of_run=self._of_run) if self.port or self.can_look_up() else new_key()

    def announce(self, address: Address, model_id: str, deadline: float | None) -> None:
        """Write the address under the first free key of the model."""
        if not self.can_look_up():
            return
        store, text = self._shared_store(deadline), address.dump(public=True)
        for number in count(1):
            if store.compare_set(_key(model_id, number), "", text).decode(errors="replace") == text:
                return

    def can_look_up(self) -> bool:
        return self._store is not None or dist.is_initialized() or "TORCHELASTIC_RUN_ID" in os.environ

    def meet(self, pickled: Any, model_id: str, worker: int, deadline: float | None, join: Join) -> int:
        """Join the pickled address; without one, those in the store, until one is a sender that has this key."""
        if pickled is not None:
            return join(pickled)
        self._closed = False
        announced = self._announced(self._shared_store(deadline), model_id, worker, deadline)
        addresses = chain([] if self._last is None else [self._last], announced)
        while True:
            address = next(addresses)
            try:
                first = join(address)
            except NotConnected:
                continue
            _used.add((address.unix, worker))
            self._last = address
            return first

    def _announced(self, store: Store, model_id: str, worker: int, deadline: float | None) -> Iterator[Address]:
        """Yield a model's senders that the worker has not used yet, and wait for more; SyncTimeout: none came."""
        for number in count(1):
            name = _key(model_id, number)
            while not store.check([name]):
                if self._closed:
                    raise NotConnected("this end was shut down by another thread")
                if remaining(deadline) == 0.0:
                    former = f" ({number - 1} before it have ended, or were used)" if number > 1 else ""
                    raise SyncTimeout(f"worker {worker}: no sender has announced itself as '{name}' in time{former}")
                time.sleep(_PAUSE)  # the store's own wait ends neither by Ctrl-C nor by `close`
            with suppress(ValueError):  # another program has written it
                address = replace(Address.load(store.get(name)), key=self.key())
                if (address.unix, worker) not in _used:
                    yield address

    def close(self) -> None:
        self._closed = True

    def _shared_store(self, deadline: float | None) -> Store:
        if self._store is None:
            if dist.is_initialized():
                return dist.distributed_c10d._get_default_store()
            self._store = _agents_store(deadline)
        return self._store

    def __getstate__(self) -> dict[str, Any]:
        """Return the options; stores belong to one process."""
        return {**vars(self), "_store": None, "_of_run": not self.port, "_last": None}


def _key(model_id: str, number: int) -> str:
    return f"wsync/{model_id}/{number}"


def _agents_store(deadline: float | None) -> Store:
    """Return the store of ``torchrun``; NotConnected: it cannot be reached."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(host, port, is_master=False, timeout=time_until(deadline))
    except RuntimeError as error:
        raise NotConnected(f"torchrun's store at {host} port {port} cannot be reached: {error}") from error
    # The store outlives the workers: those of a second attempt must not find the trainer of the first.
    return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
