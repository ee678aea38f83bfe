"""Processes that torchrun has started meet in its agent's store, which outlives them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import wsync
from wsync import listen_on


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[TCPStore]:
    """What torchrun's agent sets, and keeps."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in (("RUN_ID", "run"), ("RESTART_COUNT", "0")):
        monkeypatch.setenv(f"TORCHELASTIC_{name}", value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    yield store


def sender(timeout: float = 20.0) -> wsync.DistributedWeightSyncScheme:
    scheme = wsync.DistributedWeightSyncScheme(timeout=timeout)
    scheme.init_on_sender("policy", model=nn.Linear(1, 1), num_workers=1)
    return scheme


def test_workers_that_are_started_again_do_not_find_the_trainer_of_before(
    agent: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sender(0.5) as scheme, pytest.raises(wsync.SyncTimeout):
        scheme.connect()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with wsync.DistributedWeightSyncScheme(timeout=20.0) as worker, ThreadPoolExecutor(1) as thread:
        worker.init_on_receiver("policy", model=nn.Linear(1, 1), worker_idx=0)
        joining = thread.submit(worker.connect)
        with sender() as scheme:
            scheme.connect()
            joining.result()


def test_init_does_not_dial_and_connect_has_a_deadline(agent: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with listen_on("127.0.0.1") as door:
        monkeypatch.setenv("MASTER_PORT", str(door.getsockname()[1]))
    with wsync.DistributedWeightSyncScheme(timeout=1.0) as worker, sender(1.0) as scheme:
        worker.init_on_receiver("policy", model=nn.Linear(1, 1), worker_idx=0)
        for end in (worker, scheme):
            with pytest.raises(wsync.NotConnected, match="store"):
                end.connect()
