"""The collector that reaches its workers over TCP, on this machine or on others."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

from collectors.arguments import EnvMaker
from collectors.distributed.tcp_worker import key_from_environment, publish, resolved, trainer_host, under_torchrun
from collectors.worker_collector import WorkerCollector
from collectors.workers.connections import Connection, Disconnected, Greeting, Listener, shared_key
from collectors.workers.pool import WorkerHandle, WorkerPool

Launcher = Literal["local", "join"]
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
    """Waits until all workers have joined, and stops listening on TCP then. A restarted one connects to a Unix socket.

    A worker that this process has started joins with the key that it was started with; one in another program with
    its name, "(process … on …)".
    """

    def __init__(self, count: int, *, host: str, port: int, launcher: Launcher, timeout: float) -> None:
        by_torchrun = launcher == "join" and under_torchrun()
        by_key = shared_key if by_torchrun else lambda: key_from_environment(os.environ)
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

    def _register(self, connection: Connection, greeting: Greeting) -> None:
        """Tell a worker in another program whether it has joined; as which one, if it has named no index."""
        if not greeting.data.startswith(b"("):
            super()._register(connection, greeting)
            return
        missing = self._missing()
        index = greeting.worker if greeting.worker >= 0 or not missing else missing[0]
        is_accepted = index in missing
        reason = f"there is a worker {index} already, or there are only {self._count}"
        with suppress(Disconnected):  # the worker has ended meanwhile; if it was accepted, ``poll`` reports it
            connection.send(*(("accepted", index) if is_accepted else ("refused", reason)))
        if is_accepted:
            self.workers.append(worker := WorkerHandle(index, b"", name=greeting.data.decode()))
            worker.attach(connection)
        else:
            connection.close()
