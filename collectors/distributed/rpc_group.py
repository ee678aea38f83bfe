"""A ``torch.distributed.rpc`` group of the trainer and the workers that it has started.

The trainer's store listens on a port that the system has chosen. A process may form several groups, one after another,
which torch does not support: its per-process counters are reset for each group.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_address
from multiprocessing.connection import wait
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch.distributed import (
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    register_rendezvous_handler,  # pyright: ignore[reportPrivateImportUsage]
    rpc,
)

from collectors.worker import serve
from collectors.workers.connections import Address, Disconnected, Greeting, connect
from collectors.workers.pool import WakeEvent, work
from wsync import SyncTimeout, listen_on

TRAINER = "trainer"
StoreAddress = tuple[str, int]
_LOOPBACK = {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
_stores: dict[str, Store] = {}  # by the name in the address that torch is given


def _existing_store(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
    where = urlparse(url)
    query = parse_qs(where.query)
    # Popped, so that torch's own reference to this generator does not keep the store's port open.
    yield _stores.pop(where.netloc), int(query["rank"][0]), int(query["world_size"][0])


register_rendezvous_handler("wsync", _existing_store)


def host_store(host: str) -> tuple[Store, StoreAddress]:
    """Return a store that listens on a free port of ``host``, and its address."""
    with listen_on(host) as listening:
        address: StoreAddress = listening.getsockname()[:2]
        store = TCPStore(*address, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, address


def is_member() -> bool:
    """Whether this process belongs to an RPC group."""
    try:
        rpc.get_worker_info()
    except RuntimeError:
        return False
    return True


def join_group(name: str, rank: int, size: int, address: StoreAddress, timeout: float) -> None:
    """Join the group that has its store at ``address``; wait for all other members."""
    limit = timedelta(seconds=timeout)
    store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=limit)
    key = f"{name}-{address[1]}"
    _stores[key] = store
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"wsync://{key}", rpc_timeout=timeout)
    with _reset_counters(), _loopback(address), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend", category=UserWarning)
        rpc.init_rpc(name, rank=rank, world_size=size, rpc_backend_options=options)


@contextmanager
def _reset_counters() -> Iterator[None]:
    """Make torch count from 0: the counts are part of keys on which all members must agree."""
    before, gathered = rpc._init_counter, dict(rpc.api._all_gather_sequence_id)
    rpc._init_counter = 0
    rpc.api._all_gather_sequence_id.clear()
    try:
        yield
    finally:
        rpc._init_counter = before
        rpc.api._all_gather_sequence_id.clear()
        rpc.api._all_gather_sequence_id.update(gathered)


@contextmanager
def _loopback(address: StoreAddress) -> Iterator[None]:
    """Make gloo and TensorPipe use the loopback interface if the store does, unless the environment sets another."""
    mine = {name: value for name, value in _LOOPBACK.items() if name not in os.environ}
    if not ip_address(address[0]).is_loopback:
        mine = {}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            del os.environ[name]


def join_or_end(size: int, address: StoreAddress, sentinels: Sequence[int], timeout: float) -> int | None:
    """Join as the trainer; return None, or the descriptor of ``sentinels`` that became readable first.

    torch's call cannot be interrupted: another thread makes it, and ends when the store is closed.
    """
    done, errors = WakeEvent(), []

    def attempt() -> None:
        try:
            join_group(TRAINER, 0, size, address, timeout)
        except Exception as error:  # noqa: BLE001  raised below, in the thread that waits
            errors.append(error)
        finally:
            done.set()

    threading.Thread(target=attempt, name="rpc-join", daemon=True).start()
    ready = wait([done.fileno(), *sentinels], timeout)
    joined = done.fileno() in ready
    if errors:
        raise errors[0]
    if joined:
        return None
    if not ready:
        raise SyncTimeout(f"the RPC group was not complete after {timeout:g} s")
    return next(fd for fd in ready if isinstance(fd, int))


def leave_group() -> None:
    """Leave the group without waiting for its other members.

    A graceful shutdown needs all members, and works once per process. This one makes torch log each connection that it
    closes: these lines are suppressed.
    """
    with _without_lines("tensorpipe_agent.cpp"):
        rpc.shutdown(graceful=False)


@contextmanager
def _without_lines(word: str) -> Iterator[None]:
    """Suppress lines with ``word`` that are written to stderr's descriptor."""
    stderr, held = os.dup(2), os.memfd_create("wsync-stderr", os.MFD_CLOEXEC)
    os.dup2(held, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        with os.fdopen(held, "rb") as file:
            file.seek(0)
            lines = [line for line in file if word.encode() not in line]
        if lines:
            os.write(2, b"".join(lines))


# --- a worker: a member of the group that connects to the trainer over TCP ---


def enlist(address: Address, worker_idx: int, key: bytes) -> None:
    """Start a worker in a thread of this process. Called by the trainer, in a process that a user has started."""
    arguments = (address, worker_idx, key, lambda _: None)
    threading.Thread(target=work, args=arguments, name="collector-worker", daemon=True).start()


def main(address: Address, worker_idx: int, key: bytes, size: int, store: StoreAddress, timeout: float) -> None:
    """Run a worker in a process that the trainer has started: join the group, connect, execute commands.

    The process ends once the trainer has left the group, and closes the connection.
    """
    join_group(f"worker{worker_idx}", worker_idx + 1, size, store, timeout)
    with closing(connect(address, Greeting(worker_idx, key))) as connection:
        serve(connection)
        if connection.told_to_end:
            sys.stderr.flush()
            # torch logs errors when the trainer leaves the group first; this process has nothing more to log.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            with suppress(Disconnected):
                connection.send("ended")
                while True:
                    connection.receive()
    leave_group()
