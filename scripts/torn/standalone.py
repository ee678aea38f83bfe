"""Workers of our own, who do nothing but forward."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

import numpy as np
import torch

import wsync
from torn.revealing import Revealing, floor, send
from torn.tally import Tally

_PATIENCE = 30.0  # seconds in which a worker has to end


def _forward_on(
    line: Connection, scheme: wsync.WeightSyncScheme, worker: int, mib: float, note: Path, most: int, until: float
) -> None:
    """A worker: forward ``most`` times, or for ``until`` seconds, or until told to stop."""
    torch.set_num_threads(1)
    model = Revealing(mib)
    newest = np.memmap(note, np.int64, "r")
    bypass = most < 0
    tally = Tally()
    with scheme:
        scheme.init_on_receiver("policy", model=model, worker_idx=worker)
        scheme.connect()
        forward = model.forward if bypass else model
        deadline = time.monotonic() + until
        while tally.forwards < abs(most) and time.monotonic() < deadline and not (bypass and tally.mixed >= 10):
            known = int(newest[0])  # before the forward begins
            seen = forward()
            tally.see(float(seen.min()), float(seen.max()), known, worker)
        line.send(tally)
        line.recv()  # stay, and answer sends, until the trainer has stopped sending


def standalone(
    make: Callable[[], wsync.WeightSyncScheme],
    *,
    forwards: int,
    workers: int,
    mib: float,
    seconds: float,
    bypass: bool = False,
) -> Tally:
    """Workers of our own, who do nothing but forward."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["collectors.workers.worker"])  # the same as the collectors': there is one server
    model = Revealing(mib)
    most = -(-forwards // workers) * (-1 if bypass else 1)
    with floor() as (path, note), make() as scheme:
        scheme.init_on_sender("policy", model=model, num_workers=workers)
        lines: list[Connection] = []
        processes = []
        for worker in range(workers):
            mine, theirs = context.Pipe()
            arguments = (theirs, scheme, worker, mib, path, most, seconds)
            process = context.Process(target=_forward_on, args=arguments, daemon=True)
            process.start()
            theirs.close()
            lines.append(mine)
            processes.append(process)
        total = Tally()
        try:
            scheme.connect()
            started, waiting = time.monotonic(), set(lines)
            while waiting:
                total.updates += send(model, scheme, note)
                for line in wait(list(waiting), timeout=0):
                    assert isinstance(line, Connection)
                    total.add(line.recv())
                    waiting.discard(line)
            total.seconds = time.monotonic() - started
            for line in lines:
                line.send(None)
        finally:
            for line in lines:
                line.close()
            for process in processes:
                process.join(_PATIENCE)
                process.kill()
                process.join()
                process.close()
    return total
