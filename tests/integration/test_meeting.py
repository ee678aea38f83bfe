"""Processes that share nothing but a store meet in it: which process means which."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import nn
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

import wsync


def follow(port: int, prefix: str, line: Any) -> None:
    """Follow one sender after the other, as often as it is told to, and say what each has brought."""
    store = PrefixStore(prefix, TCPStore("127.0.0.1", port, is_master=False))
    for timeout in iter(line.recv, None):
        with wsync.DistributedWeightSyncScheme(store=store, timeout=timeout) as scheme:
            model = nn.Linear(1, 1)
            scheme.init_on_receiver("policy", model=model, worker_idx=0)
            try:
                scheme.connect()
                line.send(float(model.bias))
            except wsync.WeightSyncError as error:
                line.send(str(error))


def follow_by_its_line(port: int, _: str, line: Any) -> None:
    """Connect by the transport, which knows which worker this is; say what has come with it."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    with wsync.DistributedWeightSyncScheme(store=store, timeout=line.recv()) as scheme:
        scheme.init_on_receiver("policy", model=nn.Linear(1, 1))
        transport = scheme.receiver_transport
        assert transport is not None
        line.send(float(transport.setup_connection_and_weights_on_receiver(worker_idx=0)["bias"]))
        line.recv()


@contextmanager
def worker(store: TCPStore, prefix: str = "", target: Callable[[int, str, Any], None] = follow) -> Iterator[Any]:
    context = multiprocessing.get_context("forkserver")
    line, theirs = context.Pipe()
    process = context.Process(target=target, args=(store.port, prefix, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield line
    finally:
        process.kill()
        process.join()


@contextmanager
def sender(store: Any, value: float) -> Iterator[None]:
    """The sender of ``value``, which has met its worker."""
    with wsync.DistributedWeightSyncScheme(store=store, timeout=30.0) as scheme:
        model = nn.Linear(1, 1)
        nn.init.constant_(model.bias, value)
        scheme.init_on_sender("policy", model=model, num_workers=1)
        scheme.connect()
        yield


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_transports_meet_in_a_store_as_their_schemes_do(store: TCPStore) -> None:
    with (
        worker(store, target=follow_by_its_line) as line,
        wsync.DistributedWeightSyncScheme(store=store, timeout=10.0) as scheme,
    ):
        line.send(10.0)
        model = nn.Linear(1, 1)
        nn.init.constant_(model.bias, 4.0)
        scheme.init_on_sender("policy", model=model, num_workers=1)
        scheme.sender_transports[0].setup_connection_and_weights_on_sender()
        assert line.recv() == 4.0
