"""Where torchrun has put this process, and the store of its agent, in which the trainer says where it is."""

from __future__ import annotations

import json
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

from collectors.distributed.doors import Address
from wsync import NotConnected, SyncTimeout

_NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_KEY = "trainer"


def under_torchrun(env: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun (or somebody who sets what it sets) has started this process."""
    return all(name in env for name in _NAMES)


def rank() -> int:
    """This process's rank; 0 is the trainer."""
    return int(os.environ["RANK"])


def world_size() -> int:
    """The trainer and its workers."""
    return int(os.environ["WORLD_SIZE"])


def trainers_host() -> str:
    """The interface on which workers reach the trainer: rank 0 is on the master's node."""
    one_node = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    return "127.0.0.1" if one_node else os.environ["MASTER_ADDR"]


def _store(timeout: float) -> Store:
    hosts = rank() == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        store = TCPStore(host, port, is_master=hosts, timeout=timedelta(seconds=timeout), wait_for_workers=False)
    except DistNetworkError as error:
        raise NotConnected(
            f"rank {rank()}: the store at {host} port {port} (MASTER_ADDR, MASTER_PORT) cannot be "
            f"{'opened' if hosts else 'reached: has rank 0 been started?'} ({error})"
        ) from error
    # A run that torchrun has started again must not find the trainer of the one before.
    return PrefixStore(f"wsync-collector/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def publish(address: Address, authkey: bytes, timeout: float) -> Store:
    """Say where the trainer is. The store must live until all workers have read it: keep it so long."""
    store = _store(timeout)
    store.set(_KEY, json.dumps([*address, authkey.hex()]))
    return store


def look_up(timeout: float) -> tuple[Address, bytes]:
    """Wait until the trainer has said where it is; its address and key.

    Raises:
        NotConnected: there is no store in which it could.
        SyncTimeout: it did not, in ``timeout`` seconds.
    """
    store = _store(timeout)
    try:
        host, port, key = json.loads(store.get(_KEY))
    except DistStoreError as error:
        raise SyncTimeout(
            f"rank {rank()}: the trainer (rank 0) did not open a DistributedCollector(launcher='join') "
            f"within {timeout:g} s"
        ) from error
    return (host, port), bytes.fromhex(key)
