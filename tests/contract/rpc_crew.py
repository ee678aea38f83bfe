"""Workers that ``torch.distributed.rpc`` knows, and the trainer's session with them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed import TCPStore, register_rendezvous_handler, rpc

os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
_sessions = itertools.count()
_current: _Session | None = None


@dataclass(frozen=True)
class Invitation:
    """By which a process joins the session."""

    port: int
    number: int
    rank: int
    name: str

    def join(self) -> None:
        # RPC puts its count of sessions into every key, and a fresh process has not counted those of before.
        rpc._init_counter = self.number  # pyright: ignore[reportAttributeAccessIssue]
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"known://127.0.0.1:{self.port}",
            num_worker_threads=8,
            rpc_timeout=30,
            _transports=["uv"],
            _channels=["basic"],
        )
        rpc.init_rpc(self.name, rank=self.rank, world_size=None, rpc_backend_options=options)

    def leave(self) -> None:
        rpc.shutdown(graceful=False)


class _Session:
    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.number = next(_sessions)
        self.ranks = itertools.count(1)
        self.depth = 0
        _stores[self.store.port] = self.store
        Invitation(self.store.port, self.number, 0, "trainer").join()


_stores: dict[int, Any] = {}


def _known(url: str, timeout: Any = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """The store that is kept here, or a client of the one that is kept elsewhere."""
    address = url.removeprefix("known://").split("?")[0]
    host, port = address.rsplit(":", 1)
    store = _stores.get(int(port)) or TCPStore(host, int(port), is_master=False)
    yield store, -1, -1


register_rendezvous_handler("known", _known)


@contextmanager
def open_session() -> Iterator[None]:
    """The trainer is in an RPC session; one, however many crews there are."""
    global _current
    session = _current = _current or _Session()
    session.depth += 1
    try:
        yield
    finally:
        session.depth -= 1
        if not session.depth:
            _current = None
            rpc.shutdown(graceful=False)
            del _stores[session.store.port]


def invitations(count: int) -> list[Invitation]:
    """For ``count`` more workers."""
    assert _current is not None
    ranks = [next(_current.ranks) for _ in range(count)]
    return [Invitation(_current.store.port, _current.number, rank, f"worker{rank}") for rank in ranks]
