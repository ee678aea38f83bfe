"""Weights within a process group of the user's, which outlives the scheme."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import (
    ProcessGroupGloo,
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

import wsync
from wsync.testing.workers import stop_process


def group_of_two(rank: int, port: int) -> Any:
    options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(TCPStore("127.0.0.1", port, is_master=False), rank, 2, options)


class Counted:
    """A process group that counts what is sent through it."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)

    def send(self, *given: Any) -> Any:
        self.sent += 1
        return self.group.send(*given)


def start(target: Any, store: TCPStore) -> tuple[Any, Any]:
    """A worker process, and the test's end of a pipe to it."""
    context = multiprocessing.get_context("forkserver")
    pipe, theirs = context.Pipe()
    worker = context.Process(target=target, args=(store.port, theirs), daemon=True)
    worker.start()
    theirs.close()
    return worker, pipe


def follow_then_use_the_group(port: int, pipe: Any) -> None:
    """Follow a sender to its end; then use the group for something else."""
    group, model, seen = group_of_two(1, port), nn.Linear(3, 1), []
    store = TCPStore("127.0.0.1", port, is_master=False)
    with wsync.DistributedWeightSyncScheme(group=group, store=store, timeout=5.0) as scheme:
        scheme.init_on_receiver("policy", model=model, worker_idx=0)
        scheme.connect()
        pipe.send("connected")
        while scheme.receive() is not None:
            seen.append(float(model.bias))
    pipe.send(seen)
    value = torch.zeros(1)
    group.recv([value], 0, 0).wait()
    pipe.send(float(value))


def test_an_update_in_progress_when_the_sender_shuts_down_leaves_the_group_usable() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    worker, pipe = start(follow_then_use_the_group, store)
    try:
        group, model = Counted(group_of_two(0, store.port)), nn.Linear(3, 1)
        given: Any = group
        with wsync.DistributedWeightSyncScheme(group=given, store=store, timeout=30.0) as scheme:
            scheme.init_on_sender("policy", model=model, num_workers=1)
            scheme.connect()
            assert pipe.recv() == "connected" and group.sent == 1  # the first weights went through it
            stop_process(worker.pid)
            nn.init.constant_(model.bias, 2.0)
            scheme.send_async()
            assert group.sent == 2
        os.kill(worker.pid, signal.SIGCONT)
        assert pipe.recv() == [2.0]  # it had been announced
        group.send([torch.full((1,), 7.0)], 1, 0).wait()
        assert pipe.recv() == 7.0
    finally:
        worker.kill()
        worker.join()


def connect_twice(port: int, pipe: Any) -> None:
    """Follow a sender until it disconnects this worker; connect again, and report the model at each request."""
    group, model = group_of_two(1, port), nn.Linear(3, 1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    with wsync.DistributedWeightSyncScheme(group=group, store=store, timeout=30.0) as scheme:
        scheme.init_on_receiver("policy", model=model, worker_idx=0)
        scheme.connect()
        pipe.send("connected")
        with pytest.raises(wsync.NotConnected):
            while scheme.receive() is not None:
                continue
        scheme.connect()
        pipe.send("connected")
        while pipe.recv() == "report":
            with wsync.gate():
                pipe.send(model.bias.item())


def test_a_worker_that_connects_again_does_not_take_an_older_update() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    worker, pipe = start(connect_twice, store)
    try:
        group, model = group_of_two(0, store.port), nn.Linear(3, 1)
        nn.init.constant_(model.bias, 1.0)
        with wsync.DistributedWeightSyncScheme(group=group, store=store, timeout=30.0) as scheme:
            scheme.init_on_sender("policy", model=model, num_workers=1)
            scheme.connect()
            assert pipe.recv() == "connected"
            stop_process(worker.pid)
            nn.init.constant_(model.bias, 2.0)
            scheme.send_async()
            scheme.disconnect(0)
            os.kill(worker.pid, signal.SIGCONT)
            nn.init.constant_(model.bias, 3.0)
            scheme.readmit(0)
            assert pipe.recv() == "connected"
            for value in (4.0, 5.0):
                nn.init.constant_(model.bias, value)
                scheme.send()
                pipe.send("report")
                assert pipe.recv() == value
            pipe.send("end")
    finally:
        worker.kill()
        worker.join()
