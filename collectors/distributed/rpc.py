"""The collector whose workers are reached by ``torch.distributed.rpc``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Unpack

import wsync
from collectors.crew import CrewCollector, CrewOptions
from collectors.distributed.rpc_pool import RpcPool
from collectors.making import EnvMaker


class RPCCollector(CrewCollector):
    """Gathers batches with workers that are called by RPC (TensorPipe).

    By default it starts its workers itself, on this machine, and a group in which the trainer is ``"trainer"`` and
    they are ``"worker0"``, ``"worker1"`` …; both end with it. Or it uses members of a group that this process has
    joined by ``init_rpc``; those stay in it afterwards.

    Args:
        create_env_fn: one function per worker; each makes an environment (lambdas are fine).
        policy: as ``CrewCollector``.
        sync: whether all workers wait for each other, and for new weights; otherwise a batch is one worker's.
        workers: names in the group that this process belongs to, one per worker.
        host: the interface of a group that is started. Unless ``TP_SOCKET_IFNAME`` says otherwise, a loopback address
            keeps all of its traffic on the loopback interface.
        timeout: seconds in which the workers have to be there.
        options: as ``CrewCollector``.

    Raises:
        RuntimeError: a process has one group: there is one and no ``workers``, or ``workers`` and none.
        wsync.SyncTimeout: a worker did not join in time.
        wsync.NotConnected: it cannot listen on ``host``, or that would be on every interface.
        ValueError: ``on_worker_failure="restart"``.
        Exception: else as ``CrewCollector``.
    """

    def __init__(
        self,
        create_env_fn: EnvMaker | Sequence[EnvMaker],
        policy: Any = None,
        *,
        sync: bool = True,
        workers: Sequence[str] | None = None,
        host: str = "127.0.0.1",
        timeout: float = 60.0,
        **options: Unpack[CrewOptions],
    ) -> None:
        self._refuse_restart(
            options,
            "torch.distributed.rpc does not take a member back into a group, nor lets this process have two: "
            "use on_worker_failure=drop, or a DistributedCollector (weight_sync=distributed)",
        )
        self._host = host
        start = partial(RpcPool, names=workers, host=host, timeout=timeout)
        super().__init__(create_env_fn, policy, sync=sync, start=start, **options)

    def _default_scheme(self) -> wsync.WeightSyncScheme:
        return wsync.DistributedWeightSyncScheme(host=self._host)
