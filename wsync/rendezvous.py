"""How a sender and its workers find each other.

A rendezvous has two halves. On the sender it opens what workers connect to, and has an ``address`` that travels in the
pickled scheme. In a worker it makes the connection. A scheme names its rendezvous by ``create_rendezvous``.

    SocketRendezvous      the address in the pickled scheme: a Unix socket, or TCP
    TorchStoreRendezvous  TCP; without a pickled scheme, the sealed address is looked up in a torch.distributed store
    RpcRendezvous         TCP; the address is asked for by a torch.distributed.rpc call (backends/rpc.py)
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import count
from typing import Any, Protocol

from torch import distributed as dist
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from wsync.control import Address, Connection, Listener, connect, seal, unseal
from wsync.deadlines import earlier, remaining, time_until
from wsync.errors import NotConnected, SyncTimeout


class Rendezvous(Protocol):
    """How the two ends of a scheme find each other. Picklable; holds no open resource.

    By default, which is for classes that derive from this one, the address travels in the pickled scheme alone.
    """

    def open(self) -> tuple[Listener, Any]:
        """On the sender: return where workers connect, and its picklable address. Called once, by ``init_on_sender``.

        Raises:
            NotConnected: it cannot be opened; says why.
        """
        ...

    def announce(self, address: Any, model_id: str, deadline: float | None) -> None:
        """On the sender: publish the address. Called by each ``connect`` until all workers have connected."""

    def can_look_up(self) -> bool:
        """In a worker: return whether ``dial`` can find the sender without an address."""
        return False

    def dial(self, address: Any, model_id: str, worker: int, deadline: float | None) -> Connection:
        """In a worker: connect to the sender. Called once per ``connect`` or ``init_on_worker``.

        ``address`` is None only if ``can_look_up()`` is true.

        Raises:
            NotConnected: no sender is there; says why.
            SyncTimeout: it did not appear in time.
        """
        ...

    def connected(self, worker: int) -> None:
        """In a worker: the connection of the last ``dial`` has been accepted by the sender."""


class SocketRendezvous(Rendezvous):
    """Workers find the sender by the address in the pickled scheme.

    Args:
        host: the sender's address for TCP; None for a Unix socket, for workers on the same machine.
    """

    def __init__(self, host: str | None = None) -> None:
        self.host = host

    def open(self) -> tuple[Listener, Any]:
        """See ``Rendezvous``."""
        listener = Listener(self.host)
        return listener, listener.address

    def dial(self, address: Any, model_id: str, worker: int, deadline: float | None) -> Connection:
        """See ``Rendezvous``."""
        return connect(address, worker, deadline)


_used: set[tuple[bytes, int]] = set()  # senders that were looked up, by token; and as which worker
_PATIENCE = 5.0  # seconds for a sender that does not answer, once a further one is announced


class TorchStoreRendezvous(SocketRendezvous):
    """TCP; a worker without an address looks the sender up in a ``torch.distributed`` store of all processes.

    The store holds addresses, sealed with a secret that the processes share (``wsync.control.seal``), and nothing else
    is taken from it: any process may write there. What is not sealed with that secret is passed over. A worker connects
    to the sender of its model that it was connected to last; else to the first one that is still open and that it has
    not been connected to before.

    Args:
        host: the sender's address.
        store: the store; None for that of the default group, or of ``torchrun``.
    """

    def __init__(self, host: str, store: Store | None = None) -> None:
        super().__init__(host)
        self._store = store
        self._agent_store: Store | None = None
        self._found: tuple[str, int, Address] | None = None  # the model, the number of its sender's key, the sender
        self._sealed: tuple[Any, str] | None = None  # the last address, and its text: sealed again it is another one

    def announce(self, address: Any, model_id: str, deadline: float | None) -> None:
        """See ``Rendezvous``."""
        if not self.can_look_up():
            return
        if self._sealed is None or self._sealed[0] != address:
            self._sealed = address, seal(address)
        store, text = self._shared_store(deadline), self._sealed[1]
        for number in count(1):
            if store.compare_set(_key(model_id, number), "", text).decode(errors="replace") == text:
                return

    def can_look_up(self) -> bool:
        """See ``Rendezvous``."""
        return self._store is not None or dist.is_initialized() or "TORCHELASTIC_RUN_ID" in os.environ

    def dial(self, address: Any, model_id: str, worker: int, deadline: float | None) -> Connection:
        """See ``Rendezvous``."""
        if address is not None:
            return connect(address, worker, deadline)
        for number, found in self._candidates(model_id, worker, deadline):
            try:
                connection = self._connect(found, worker, deadline, _key(model_id, number + 1))
            except NotConnected:  # that sender has ended: the next one
                continue
            self._found = model_id, number, found
            return connection
        raise AssertionError("the candidates end by SyncTimeout")

    def _connect(self, address: Address, worker: int, deadline: float | None, next_key: str) -> Connection:
        """Connect to a sender.

        Raises:
            NotConnected: it has ended; or it does not answer, and another one is announced at ``next_key``.
            SyncTimeout: it does not answer before ``deadline``.
        """
        while True:
            limit = time.monotonic() + _PATIENCE
            try:
                return connect(address, worker, earlier(limit, deadline))
            except SyncTimeout as error:
                if remaining(deadline) == 0.0:
                    raise
                if self._shared_store(deadline).check([next_key]):
                    raise NotConnected(str(error)) from error

    def connected(self, worker: int) -> None:
        """See ``Rendezvous``."""
        if self._found is not None:
            _used.add((self._found[2].token, worker))

    def _candidates(self, model_id: str, worker: int, deadline: float | None) -> Iterator[tuple[int, Address]]:
        """Return the announced senders in order, with the numbers of their keys; waits for the next one."""
        if self._found is not None and self._found[0] == model_id:
            yield self._found[1:]
        store = self._shared_store(deadline)
        for number, address in _announced(store, model_id, worker, deadline):
            if (address.token, worker) not in _used:
                yield number, address

    def _shared_store(self, deadline: float | None) -> Store:
        if self._store is not None:
            return self._store
        if dist.is_initialized():
            return dist.distributed_c10d._get_default_store()
        if self._agent_store is None:
            self._agent_store = _agents_store(deadline)
        return self._agent_store

    def __getstate__(self) -> dict[str, Any]:
        """Return the options; stores belong to one process."""
        return {"host": self.host, "_store": None, "_agent_store": None, "_found": None, "_sealed": None}


def _key(model_id: str, number: int) -> str:
    return f"wsync/{model_id}/{number}"


def _announced(store: Store, model_id: str, worker: int, deadline: float | None) -> Iterator[tuple[int, Address]]:
    """Return the addresses under the keys of ``model_id``, with the keys' numbers; waits for the next one.

    Raises:
        SyncTimeout: none appeared before ``deadline``.
        NotConnected: this process has no secret to open them with.
    """
    foreign = ""
    for number in count(1):
        key = _key(model_id, number)
        try:
            if remaining(deadline) == 0.0:
                raise TimeoutError
            store.wait([key], time_until(deadline))
        except (RuntimeError, TimeoutError) as error:
            former = f" ({number - 1} before it have ended, or were used)" if number > 1 and not foreign else ""
            message = f"no {'other ' if foreign else ''}sender has announced itself as '{key}' in time{former}"
            raise SyncTimeout(f"worker {worker}: {foreign}{message}") from error
        try:
            yield number, unseal(store.get(key))
        except ValueError as error:  # another program has written it, or a process with another secret
            foreign = f"'{key}' in the store: {error}; and "


def _agents_store(deadline: float | None) -> Store:
    """Return the store of ``torchrun``.

    Raises:
        NotConnected: it cannot be reached.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(host, port, is_master=False, timeout=time_until(deadline))
    except RuntimeError as error:
        raise NotConnected(f"torchrun's store at {host} port {port} cannot be reached: {error}") from error
    # The store outlives the workers: those of a second attempt must not find the trainer of the first.
    return PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
