"""How workers find the sender: by the address in the pickled scheme, or in a store of ``torch.distributed``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

from torch import distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from wsync.control.auth import Address, new_key, shared_key
from wsync.deadlines import remaining, time_until
from wsync.errors import NotConnected, SyncTimeout


class Rendezvous:
    """How workers find the sender. The base class: by the address in the pickled scheme, on one machine.

    Attributes:
        host: the sender's address, by which workers on other machines reach it; None for this machine only.
    """

    host: str | None = None

    def key(self) -> bytes:
        """On the sender: return the key that workers must have."""
        return new_key()

    def pickled(self, address: Address) -> Any:
        """On the sender: return what the pickled scheme has of its address."""
        return address

    def announce(self, address: Address, model_id: str, deadline: float | None) -> None:
        """On the sender: publish the address. Called by each ``connect`` until all workers have connected."""

    def can_look_up(self) -> bool:
        """In a worker: return whether ``addresses`` can find the sender without what was pickled."""
        return False

    def addresses(self, pickled: Any, model_id: str, worker: int, deadline: float | None) -> Iterator[Address]:
        """In a worker: return where to connect, the likeliest first. ``pickled`` is None only if ``can_look_up()``.

        Raises:
            NotConnected: no sender is there; says why.
            SyncTimeout: it did not appear in time.
        """
        yield pickled

    def passes_over(self, error: NotConnected) -> bool:
        """In a worker: return whether to try the next address after an error."""
        return False

    def connected(self, address: Address, worker: int) -> None:
        """In a worker: the sender at ``address`` has accepted it."""


class SocketRendezvous(Rendezvous):
    """Workers find the sender by the address in the pickled scheme.

    Args:
        host: the sender's address for TCP; None for workers on the same machine.
    """

    def __init__(self, host: str | None = None) -> None:
        self.host = host


_used: set[tuple[str, int]] = set()  # senders that were looked up, and by which worker


class TorchStoreRendezvous(SocketRendezvous):
    """TCP; a worker without an address looks the sender up in a ``torch.distributed`` store of all processes.

    The store holds addresses, without a key, and nothing else is taken from it: any process may write there. All
    processes share the key (``WSYNC_AUTHKEY``, or the user's key file), and the handshake proves it. A worker connects
    to the sender of its model that it was connected to last; else to the first one that is still there and that it has
    not been connected to before.

    Args:
        host: the sender's address.
        store: the store; None for that of the default group, or of ``torchrun``.
    """

    def __init__(self, host: str, store: Store | None = None) -> None:
        super().__init__(host)
        self._store = store
        self._found: tuple[str, Address] | None = None  # the last sender, with the model's name
        self._model_id = ""
        self._looked_up = False

    def key(self) -> bytes:
        """Return the shared key where the store is used, else a random one."""
        return shared_key() if self.can_look_up() else new_key()

    def announce(self, address: Address, model_id: str, deadline: float | None) -> None:
        """Write the address under the first free key of the model."""
        if not self.can_look_up():
            return
        store, text = self._shared_store(deadline), address.dump(public=True)
        for number in count(1):
            if store.compare_set(_key(model_id, number), "", text).decode(errors="replace") == text:
                return

    def can_look_up(self) -> bool:
        """Return whether there is a store."""
        return self._store is not None or dist.is_initialized() or "TORCHELASTIC_RUN_ID" in os.environ

    def addresses(self, pickled: Any, model_id: str, worker: int, deadline: float | None) -> Iterator[Address]:
        """Return the pickled address; without one, those in the store, and wait for further ones."""
        self._looked_up, self._model_id = pickled is None, model_id
        if pickled is not None:
            yield pickled
            return
        if self._found is not None and self._found[0] == model_id:
            yield self._found[1]
        store, key, wrong = self._shared_store(deadline), shared_key(), ""
        for number in count(1):
            name = _key(model_id, number)
            try:
                if remaining(deadline) == 0.0:
                    raise TimeoutError
                store.wait([name], time_until(deadline))
            except (RuntimeError, TimeoutError) as error:
                former = f" ({number - 1} before it have ended, or were used)" if number > 1 else ""
                raise SyncTimeout(
                    f"worker {worker}: {wrong}no sender has announced itself as '{name}' in time{former}"
                ) from error
            try:
                address = replace(Address.load(store.get(name)), key=key)
            except ValueError as error:  # another program has written it
                wrong = f"'{name}' in the store: {error}; and "
                continue
            if (address.unix, worker) not in _used:
                yield address

    def passes_over(self, error: NotConnected) -> bool:
        """A sender in the store that has ended, or has another key, is passed over."""
        return self._looked_up

    def connected(self, address: Address, worker: int) -> None:
        """Remember the sender."""
        if self._looked_up:
            _used.add((address.unix, worker))
            self._found = self._model_id, address

    def _shared_store(self, deadline: float | None) -> Store:
        if self._store is not None:
            return self._store
        if dist.is_initialized():
            return dist.distributed_c10d._get_default_store()
        self._store = _agents_store(deadline)
        return self._store

    def __getstate__(self) -> dict[str, Any]:
        """Return the options; stores belong to one process."""
        return {"host": self.host, "_store": None, "_found": None, "_looked_up": False, "_model_id": ""}


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
