"""The collector that reaches its workers over TCP, on this machine or on others, and how a worker joins it."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

from torch.distributed import (
    DistNetworkError,
    DistStoreError,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from collectors.arguments import EnvMaker
from collectors.worker import serve
from collectors.worker_collector import WorkerCollector
from collectors.workers.connections import Connection, Listener, connect
from collectors.workers.pool import WorkerHandle, WorkerPool
from collectors.workers.processes import exit_when_readable, set_worker_signals
from wsync import NotConnected, SyncTimeout
from wsync.control import Address, shared_key

Launcher = Literal["local", "join"]
TRAINER, AUTHKEY = "WSYNC_TRAINER", "WSYNC_AUTHKEY"
_STORE_KEY = "trainer"
_log = logging.getLogger(__name__)


class DistributedCollector(WorkerCollector):
    """Collects batches with workers that are reached over TCP; batches are sent as plain bytes.

    By default it starts its workers itself, on this machine. With ``launcher="join"`` it waits for workers that are
    started elsewhere, on any machine, and call ``collectors.distributed.join_trainer``: under torchrun, where this
    process has rank 0, all the other ranks; else processes with ``WSYNC_TRAINER=host:port`` in their environment, which
    share a secret in ``WSYNC_AUTHKEY`` with this process. A process with that secret can run code here, and
    nothing is encrypted: batches must not cross a network that others can read.

    Args:
        create_env_fn: one function per worker; this, ``policy``, ``sync`` and ``options``: see ``WorkerCollector``.
        host: the interface to listen on; by default loopback, or torchrun's master address if there are several nodes.
        port: the port to listen on; 0: any free port (it is logged).
        launcher: ``"local"`` or ``"join"``.
        timeout: seconds in which the workers have to join.

    Raises:
        wsync.SyncTimeout: a worker did not join in time; names it.
        wsync.NotConnected: it cannot listen there, or that would be on every interface.
        ValueError: ``on_worker_failure="restart"`` for workers that join.
        Exception: else as ``WorkerCollector``.
    """

    def __init__(
        self,
        create_env_fn: EnvMaker | Sequence[EnvMaker],
        policy: Any = None,
        *,
        sync: bool = True,
        host: str | None = None,
        port: int = 0,
        launcher: Launcher = "local",
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        if launcher not in ("local", "join"):
            raise ValueError(f"launcher is 'local' or 'join', not {launcher!r}")
        if launcher == "join":
            self._refuse_restart(
                options,
                "workers that join were started by another program (torchrun), which alone can restart them: "
                "use on_worker_failure=drop, or launcher=local",
            )
        if host is None:
            host = trainer_host() if launcher == "join" and under_torchrun() else "127.0.0.1"
        self._host = host
        start = partial(TcpPool, host=host, port=port, launcher=launcher, timeout=timeout)
        super().__init__(create_env_fn, policy, sync=sync, start=start, **options)


class TcpPool(WorkerPool):
    """Stops listening on TCP when all workers have joined; a restarted one connects to a Unix socket.

    A worker that this process has started joins with its key; one in another program with a name, "(process … on …)".
    """

    def __init__(self, count: int, *, host: str, port: int, launcher: Launcher, timeout: float) -> None:
        by_torchrun = launcher == "join" and under_torchrun()
        by_key = shared_key if by_torchrun else key_from_environment
        key = None if launcher == "local" else by_key()
        if by_torchrun and (started := int(os.environ["WORLD_SIZE"])) != count + 1:
            raise ValueError(
                f"torchrun has started {started} processes: a trainer and {started - 1} workers, not {count}; "
                "set num_workers to that"
            )
        listener = Listener(host and resolved(host), port, key)  # refuses an empty host, which might be resolved
        super().__init__(count, listener, start=launcher == "local")
        store: Any = None
        try:
            if by_torchrun:
                store = publish(self.listener.address, timeout)
            elif launcher == "join":
                own = self.listener.address
                _log.info("waiting at %s:%s for %d workers to join", own.host, own.port, count)
            self.wait_for_workers(timeout)
            self.listener.close()
            self.listener = Listener()
        except BaseException:  # also Ctrl-C: the workers that have been started are ended
            self.close()
            raise
        finally:
            del store  # which had to live until all workers have read it

    def _register(self, connection: Connection, worker_idx: int, name: bytes) -> None:
        if not name.startswith(b"("):
            super()._register(connection, worker_idx, name)
            return
        missing = self._missing()
        index = worker_idx if worker_idx >= 0 or not missing else missing[0]
        is_accepted = index in missing
        reason = f"there is a worker {index} already, or there are only {self._count}"
        with suppress(ConnectionError):  # the worker has ended meanwhile; if it was accepted, ``poll`` reports it
            connection.send(*(("accepted", index) if is_accepted else ("refused", reason)))
        if is_accepted:
            self.workers.append(worker := WorkerHandle(index, b"", name=name.decode()))
            worker.attach(connection)
        else:
            connection.close()


# --- a worker in another program ---


def is_worker(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started to be a worker: by torchrun with a rank above 0, or with ``WSYNC_TRAINER``."""
    return TRAINER in env or (under_torchrun(env) and int(env["RANK"]) > 0)


def join_trainer(*, timeout: float = 60.0) -> int:
    """Run this process as a worker of a ``DistributedCollector(launcher="join")``, until it is shut down.

    The trainer's address is that of ``WSYNC_TRAINER`` (``host:port``), the key that of ``WSYNC_AUTHKEY``; or, under
    torchrun, those that rank 0 has published. If the trainer's process ends, this one ends at once, with status 1.

    Args:
        timeout: seconds in which the trainer has to be reached.

    Returns:
        The exit status for this process: 0. Errors in this worker are raised in the trainer.

    Raises:
        NotConnected: there is no trainer, or it did not accept this worker.
        SyncTimeout: rank 0 has not published its address, or the trainer's machine did not answer in time.
        ValueError: an address cannot be parsed, or there is no key.
    """
    set_worker_signals()
    if TRAINER in os.environ:
        host, _, port = os.environ[TRAINER].rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"{TRAINER} is host:port, not {os.environ[TRAINER]!r}")
        address = Address(resolved(host.strip("[]")), int(port), "", key_from_environment())
        join(address, -1, timeout)
    elif is_worker():
        join(look_up(timeout), int(os.environ["RANK"]) - 1, timeout)
    else:
        raise ValueError(f"no trainer is given: start this under torchrun with a rank above 0, or set {TRAINER}")
    return 0


def key_from_environment() -> bytes:
    """Return the key in ``WSYNC_AUTHKEY``."""
    if not (key := os.environ.get(AUTHKEY)):
        raise ValueError(f"set {AUTHKEY} to a secret of your own, the same for the trainer and its workers")
    return key.encode()


def resolved(host: str) -> str:
    """Return the IP address of ``host``; both ends authenticate by it, whatever name each of them was given."""
    try:
        return host if "%" in host else str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return host  # the error of listening there, or of connecting, is the better one


def join(address: Address, worker_idx: int, timeout: float) -> None:
    """Join the trainer at ``address``, and execute its commands until it closes the connection."""
    deadline, where = time.monotonic() + timeout, f"{address.host}:{address.port}"
    name = f"(process {os.getpid()} on {socket.gethostname()})"
    connection = connect(address, worker_idx, name.encode(), deadline)
    try:
        verdict, reason = connection.receive(deadline)
        if verdict == "refused":
            raise NotConnected(f"the trainer does not take this worker: {reason}")
        stop_watching = exit_when_readable(connection.sentinel, status=lambda: 0 if connection.told_to_end else 1)
        try:
            serve(connection)
        finally:
            stop_watching()
    except TimeoutError as error:
        raise NotConnected(f"the trainer at {where} does not answer: is it stopped?") from error
    except ConnectionError as error:
        raise NotConnected(
            f"the trainer at {where} did not accept this worker: another key? Or it has its workers already"
        ) from error
    finally:
        connection.close()


# --- torchrun ---


def under_torchrun(env: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or a program that sets the same variables, has started this process."""
    return all(name in env for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def trainer_host() -> str:
    """Return the interface on which workers reach the trainer; rank 0 is on the master's node."""
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    return "127.0.0.1" if one_node else os.environ["MASTER_ADDR"]


def publish(address: Address, timeout: float) -> Store:
    """Publish the trainer's address. Keep the returned store until all workers have read it."""
    store = _store(timeout)
    store.set(_STORE_KEY, address.dump(public=True))
    return store


def look_up(timeout: float) -> Address:
    """Wait until the trainer has published its address; return it."""
    store = _store(timeout)
    try:
        return replace(Address.load(store.get(_STORE_KEY)), key=shared_key())
    except DistStoreError as error:
        raise SyncTimeout(
            f"rank {os.environ['RANK']}: the trainer (rank 0) did not open a DistributedCollector(launcher='join') "
            f"within {timeout:g} s"
        ) from error
    except ValueError as error:
        raise NotConnected(f"rank {os.environ['RANK']}: the trainer's address in torchrun's store: {error}") from error


def _store(timeout: float) -> Store:
    """Return the store of torchrun's agent, or open one in rank 0 if the agent has none."""
    hosts = int(os.environ["RANK"]) == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(host, port, is_master=hosts, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    except DistNetworkError as error:
        raise NotConnected(
            f"rank {os.environ['RANK']}: the store at {host} port {port} (MASTER_ADDR, MASTER_PORT) cannot be "
            f"{'opened' if hosts else 'reached: has rank 0 been started?'} ({error})"
        ) from error
    # After torchrun has restarted the processes, workers must not find the address of the trainer before.
    return PrefixStore(f"wsync-collector/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
