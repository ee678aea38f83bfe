"""Weights within a process group of the user's: it is theirs, and goes on when a scheme has ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch
from stopping import stop
from torch import nn
from torch.distributed import (
    ProcessGroupGloo,
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

import wsync
from wsync.backends.distributed import _met

pytestmark = pytest.mark.timeout(60)


def group_of_two(rank: int, port: int) -> Any:
    options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(TCPStore("127.0.0.1", port, is_master=False), rank, 2, options)


def act(port: int, line: Any) -> None:
    """Follow a sender to its end; then use the group for something else."""
    group, model, seen = group_of_two(1, port), nn.Linear(3, 1), []
    store = TCPStore("127.0.0.1", port, is_master=False)
    with wsync.DistributedWeightSyncScheme(group=group, store=store, timeout=5.0) as scheme:
        scheme.init_on_receiver("policy", model=model, worker_idx=0)
        scheme.connect()
        line.send("there")
        with pytest.raises(wsync.NotConnected):
            while scheme.receive() is not None:
                seen.append(float(model.bias))
    line.send(seen)
    word = torch.zeros(1)
    group.recv([word], 0, 0).wait()
    line.send(float(word))


def test_an_update_that_is_on_its_way_when_the_sender_ends_leaves_the_group_whole() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    line, theirs = context.Pipe()
    worker = context.Process(target=act, args=(store.port, theirs), daemon=True)
    worker.start()
    theirs.close()
    try:
        group, model = group_of_two(0, store.port), nn.Linear(3, 1)
        with wsync.DistributedWeightSyncScheme(group=group, store=store, timeout=30.0) as scheme:
            scheme.init_on_sender("policy", model=model, num_workers=1)
            scheme.connect()
            assert line.recv() == "there"
            stop(worker.pid)
            nn.init.constant_(model.bias, 2.0)
            scheme.send_async()
        os.kill(worker.pid, signal.SIGCONT)
        assert line.recv() == [2.0], "it had been announced"
        group.send([torch.full((1,), 7.0)], 1, 0).wait()
        assert line.recv() == 7.0
    finally:
        worker.kill()
        worker.join()


def come_and_go(port: int, line: Any) -> None:
    """Follow a sender, go, and come back to it, as told; say each time what it has brought."""
    group, model = group_of_two(1, port), nn.Linear(3, 1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    for _ in range(2):
        _met.clear()  # or it would wait for the next sender
        with wsync.DistributedWeightSyncScheme(group=group, store=store, timeout=30.0) as scheme:
            scheme.init_on_receiver("policy", model=model, worker_idx=0)
            scheme.connect()
            line.send("there")
            line.recv()
            line.send(model.bias.item())
        line.send("gone")
        line.recv()


def test_who_comes_back_does_not_take_what_was_left_untaken_before() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    line, theirs = context.Pipe()
    worker = context.Process(target=come_and_go, args=(store.port, theirs), daemon=True)
    worker.start()
    theirs.close()
    try:
        group, model = group_of_two(0, store.port), nn.Linear(3, 1)
        nn.init.constant_(model.bias, 1.0)
        with wsync.DistributedWeightSyncScheme(group=group, store=store, timeout=30.0) as scheme:
            scheme.init_on_sender("policy", model=model, num_workers=1)
            scheme.connect()
            assert line.recv() == "there"
            line.send("go")
            assert [line.recv(), line.recv()] == [1.0, "gone"]
            nn.init.constant_(model.bias, 2.0)
            with pytest.raises(wsync.WorkerDied, match="version 2 is missing"):
                scheme.send()  # nobody takes it
            line.send("come back")
            scheme.readmit(0)
            assert line.recv() == "there"
            nn.init.constant_(model.bias, 3.0)
            scheme.send()
            line.send("tell")
            assert line.recv() == 3.0
    finally:
        worker.kill()
        worker.join()
