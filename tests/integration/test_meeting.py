"""Processes that share nothing but a store meet in it."""

from __future__ import annotations

import multiprocessing
from typing import Any

from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import wsync


def follow(port: int, line: Any) -> None:
    """Connect by the transport, which knows which worker this is; say what has come with it."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    with wsync.DistributedWeightSyncScheme(store=store, timeout=10.0) as scheme:
        scheme.init_on_receiver("policy", model=nn.Linear(1, 1))
        transport = scheme.receiver_transport
        assert transport is not None
        line.send(float(transport.setup_connection_and_weights_on_receiver(worker_idx=0)["bias"]))
        line.recv()


def test_transports_meet_in_a_store_as_their_schemes_do() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    line, theirs = context.Pipe()
    worker = context.Process(target=follow, args=(store.port, theirs), daemon=True)
    worker.start()
    model = nn.Linear(1, 1)
    nn.init.constant_(model.bias, 4.0)
    with wsync.DistributedWeightSyncScheme(store=store, timeout=10.0) as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        scheme.sender_transports[0].setup_connection_and_weights_on_sender()
        assert line.recv() == 4.0
    worker.kill()
    worker.join()
