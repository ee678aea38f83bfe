"""The collector whose workers are reached over TCP: on this machine, or on any."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

import wsync
from collectors.crew import CrewCollector, CrewOptions
from collectors.distributed.tcp_pool import Launcher, TcpPool, default_host
from collectors.making import EnvMaker


class DistributedCollector(CrewCollector):
    """Gathers batches with workers that are reached over TCP; batches come as plain bytes.

    By default it starts its workers itself, on this machine. With ``launcher="join"`` it waits for workers that others
    start, on any machine, and that call ``collectors.distributed.join_trainer``: under torchrun, where this process has
    rank 0, all the other ranks; else processes with ``WSYNC_TRAINER=host:port`` in their environment. Those and this
    process then share a secret in ``WSYNC_AUTHKEY``. Whoever knows it can run code here: see ``doors``.

    Args:
        create_env_fn: one function per worker; each makes an environment (lambdas are fine).
        policy: as ``CrewCollector``.
        sync: whether all workers wait for each other, and for new weights; otherwise a batch is one worker's.
        host: the interface to listen on; by default this machine's own, or torchrun's when there are several nodes.
        port: to listen on; 0: any that is free (it is logged).
        launcher: ``"local"`` or ``"join"``.
        timeout: seconds in which the workers have to join.
        options: as ``CrewCollector``.

    Raises:
        wsync.SyncTimeout: a worker did not join in time; names it.
        wsync.NotConnected: it cannot listen there, or that would be on every interface.
        ValueError: ``on_worker_failure="restart"`` for workers that join.
        Exception: else as ``CrewCollector``.
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
        **options: Unpack[CrewOptions],
    ) -> None:
        if launcher not in ("local", "join"):
            raise ValueError(f"launcher is 'local' or 'join', not {launcher!r}")
        if launcher == "join":
            self._refuse_restart(
                options,
                "workers that join were started by others (torchrun), who alone can start them anew: "
                "use on_worker_failure=drop, or launcher=local",
            )
        self._host = default_host(launcher) if host is None else host
        start = partial(TcpPool, host=self._host, port=port, launcher=launcher, timeout=timeout)
        super().__init__(create_env_fn, policy, sync=sync, start=start, **options)

    def _default_scheme(self) -> wsync.WeightSyncScheme:
        return wsync.DistributedWeightSyncScheme(host=self._host)
