"""The environment that torchrun sets, and the store of its agent, in which the trainer publishes its address."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed import (
    DistNetworkError,
    DistStoreError,
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from wsync import NotConnected, SyncTimeout
from wsync.control import Address, seal, unseal

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_KEY = "trainer"


def under_torchrun(env: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun, or a program that sets the same variables, has started this process."""
    return all(name in env for name in _NAMES)


def trainer_host() -> str:
    """Return the interface on which workers reach the trainer; rank 0 is on the master's node."""
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    return "127.0.0.1" if one_node else os.environ["MASTER_ADDR"]


def _store(timeout: float) -> Store:
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


def publish(address: Address, timeout: float) -> Store:
    """Publish the trainer's address. Keep the returned store until all workers have read it."""
    store = _store(timeout)
    store.set(_KEY, seal(address))
    return store


def look_up(timeout: float) -> Address:
    """Wait until the trainer has published its address; return it.

    Raises:
        NotConnected: the store cannot be reached, or another program, or one with another secret, has written there.
        SyncTimeout: the trainer has published nothing within ``timeout`` seconds.
    """
    store = _store(timeout)
    try:
        return unseal(store.get(_KEY))
    except DistStoreError as error:
        raise SyncTimeout(
            f"rank {os.environ['RANK']}: the trainer (rank 0) did not open a DistributedCollector(launcher='join') "
            f"within {timeout:g} s"
        ) from error
    except ValueError as error:
        raise NotConnected(f"rank {os.environ['RANK']}: the trainer's address in torchrun's store: {error}") from error
