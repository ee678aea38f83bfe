"""Many more workers than cores, which all connect at once."""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Event

import pytest
from torch import nn

import wsync

WORKERS = 64


def follow(scheme: wsync.WeightSyncScheme, worker_idx: int, started: Event) -> None:
    """Be a worker: connect once all processes have started, and receive until the trainer shuts down."""
    scheme.init_on_receiver("policy", model=nn.Linear(2, 2), worker_idx=worker_idx)
    started.wait()
    scheme.connect()
    while scheme.receive() is not None:
        pass
    assert scheme.finished


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shared_mem", "multiprocess", "distributed"])
def test_sixty_four_workers_that_connect_at_once_all_get_every_update(backend: str) -> None:
    context = multiprocessing.get_context("forkserver")
    started = context.Event()
    scheme = wsync.WeightSyncScheme.from_backend(backend)
    scheme.init_on_sender("policy", model=nn.Linear(2, 2), num_workers=WORKERS)
    processes = [context.Process(target=follow, args=(scheme, worker, started)) for worker in range(WORKERS)]
    try:
        for process in processes:
            process.start()
        started.set()
        scheme.connect(processes=processes)
        report = scheme.send()
        assert report is not None and sorted(report.workers) == list(range(WORKERS))
    finally:
        scheme.shutdown()
        for process in processes:
            process.join()
    assert [process.exitcode for process in processes] == [0] * WORKERS
