"""The collector with workers in a ``torch.distributed.rpc`` group, all on this machine.

The trainer's store listens on a port that the system has chosen. A process may form several groups, one after another,
which torch does not support: its per-process counters are reset for each group.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any
from urllib.parse import parse_qs, urlparse

from torch.distributed import (
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    register_rendezvous_handler,  # pyright: ignore[reportPrivateImportUsage]
    rpc,
)

from collectors.arguments import EnvMaker
from collectors.worker import serve
from collectors.worker_collector import WorkerCollector
from collectors.workers import processes
from collectors.workers.connections import connect, milliseconds
from collectors.workers.pool import WakeEvent, WorkerPool
from wsync import SyncTimeout, WorkerDied, listen_on
from wsync.control import Address

StoreAddress = tuple[str, int]
_stores: dict[str, Store] = {}  # by the name in the address that torch is given


class RPCCollector(WorkerCollector):
    """Collects batches with workers that are called by RPC (TensorPipe).

    It starts its workers itself, on this machine, and a group in which the trainer is ``"trainer"`` and they are
    ``"worker0"``, ``"worker1"`` …; both end with it.

    Args:
        create_env_fn: one function per worker; this, ``policy``, ``sync`` and ``options``: see ``WorkerCollector``.
        timeout: seconds in which the workers have to join.

    Raises:
        wsync.SyncTimeout: a worker did not join in time.
        ValueError: ``on_worker_failure="restart"``; or this process belongs to an RPC group already.
        Exception: else as ``WorkerCollector``.
    """

    def __init__(
        self,
        create_env_fn: EnvMaker | Sequence[EnvMaker],
        policy: Any = None,
        *,
        sync: bool = True,
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        self._refuse_restart(
            options,
            "torch.distributed.rpc does not take a member back into a group, nor lets this process have two: "
            "use on_worker_failure=drop, or a DistributedCollector (weight_sync=distributed)",
        )
        super().__init__(create_env_fn, policy, sync=sync, start=partial(RpcPool, timeout=timeout), **options)


class RpcPool(WorkerPool):
    """Processes that form an RPC group with this one."""

    def __init__(self, count: int, *, timeout: float) -> None:
        with suppress(RuntimeError):  # this process belongs to no group
            member = rpc.get_worker_info().name
            raise ValueError(f"this process is '{member}' of an RPC group already: shut the other collector down")
        self._joined = False
        self._store, address = host_store()
        limit = milliseconds(timeout) / 1e3  # torch's RPC counts them in an int, too
        self._arguments = (count + 1, address, limit)
        super().__init__(count)
        try:
            sentinels = {worker.sentinel: worker for worker in self.workers}
            if dead := join_or_end(*self._arguments, [*sentinels]):
                worker = sentinels[dead]
                cause = f"{worker.exit_reason()}, before it had joined"
                raise WorkerDied(f"worker {worker.worker_idx} {cause}", {worker.worker_idx: cause})
            self._joined = True
            self.wait_for_workers(timeout)
        except BaseException:  # also Ctrl-C: a group that has begun to form is left
            self.close()
            raise

    def start_process(self, worker_idx: int, key: bytes) -> BaseProcess:
        """Start a worker, which joins the group and connects to this process."""
        return processes.start(main, worker_idx, self.listener.address, worker_idx, key, *self._arguments)

    def close(self) -> None:
        """End the workers, and the group."""
        with _held_back(b"tensorpipe_agent.cpp"):  # torch logs every connection that ends
            super().close()
            if self._joined:
                self._joined = False
                rpc.shutdown(graceful=False)  # a graceful one needs all members, and works once per process
        self._store = None


@contextmanager
def _held_back(marker: bytes) -> Iterator[None]:
    """Hold back what is written to stderr's descriptor; write it at the end, without the lines that have `marker`."""
    stderr, held = os.dup(2), os.memfd_create("wsync-stderr", os.MFD_CLOEXEC)
    os.dup2(held, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        with os.fdopen(held, "rb") as file:
            file.seek(0)
            os.write(2, b"".join(line for line in file if marker not in line))


def main(address: Address, worker_idx: int, key: bytes, size: int, store: StoreAddress, timeout: float) -> None:
    """Run a worker in a process of its own: join the group, connect, execute commands."""
    join_group(f"worker{worker_idx}", worker_idx + 1, size, store, timeout)
    with closing(connect(address, worker_idx, key)) as connection:
        serve(connection)


# --- the group ---


def _existing_store(url: str, **_: Any) -> Iterator[tuple[Store, int, int]]:
    where = urlparse(url)
    query = parse_qs(where.query)
    # Popped, so that torch's own reference to this generator does not keep the store's port open.
    yield _stores.pop(where.netloc), int(query["rank"][0]), int(query["world_size"][0])


register_rendezvous_handler("wsync", _existing_store)


def host_store() -> tuple[Store, StoreAddress]:
    """Return a store that listens on a free port of this machine, and its address."""
    with listen_on("127.0.0.1") as listening:
        address: StoreAddress = listening.getsockname()[:2]
        store = TCPStore(*address, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())
    return store, address


def join_group(name: str, rank: int, size: int, address: StoreAddress, timeout: float) -> None:
    """Join the group that has its store at ``address``; wait for all other members."""
    limit = timedelta(seconds=timeout)
    store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=limit)
    key = f"{name}-{address[1]}"
    _stores[key] = store
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"wsync://{key}", rpc_timeout=timeout)
    # gloo and TensorPipe use the loopback interface, unless the environment has another.
    loopback = {name: os.environ.get(name, "lo") for name in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")}
    with _reset_counters(), processes.environment(**loopback), warnings.catch_warnings():
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


def join_or_end(size: int, address: StoreAddress, timeout: float, sentinels: Sequence[int]) -> int | None:
    """Join as the trainer; return None, or the descriptor of ``sentinels`` that became readable first.

    torch's call cannot be interrupted: another thread makes it, and ends when the store is closed.
    """
    done, errors = WakeEvent(), []

    def attempt() -> None:
        try:
            join_group("trainer", 0, size, address, timeout)
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
