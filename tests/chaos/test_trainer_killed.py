"""The trainer is killed: its workers notice, whatever they do, and nothing is left of either."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from matrix import Cell

pytestmark = pytest.mark.timeout(90)

NOTICE = 10.0  # seconds


def ended(pidfds: list[int], within: float) -> bool:
    """Whether all these processes end in time."""
    deadline = time.monotonic() + within
    waiting = set(pidfds)
    while waiting:
        poller = select.poll()
        for fd in waiting:
            poller.register(fd, select.POLLIN)
        over = poller.poll(max(0.0, deadline - time.monotonic()) * 1e3)
        if not over:
            return False
        waiting -= {fd for fd, _ in over}
    return True


def test_trainer_killed(cell: Cell, backend: str, tmp_path: Path) -> None:
    """The trainer is killed (SIGKILL) while its workers wait for weights without a limit. In each worker `receive`
    raises NotConnected within 10 s (Ray ends its actors by itself), the model keeps its weights, the process can end;
    nothing is left in `/dev/shm`."""
    address = []
    if backend == "ray":
        import ray

        address = [ray.get_runtime_context().gcs_address]
    before = {name for name in os.listdir("/dev/shm") if "wsync" in name}
    here = Path(__file__).parent
    command = [sys.executable, str(here / "trainer.py"), backend, str(tmp_path), *address]
    folders = (here, here.parent, here.parent / "contract")
    paths = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as trainer:
        assert trainer.stdout is not None
        pids = [int(word) for word in trainer.stdout.readline().split()]
        assert len(pids) == 2, "the trainer did not come up"
        pidfds = [os.pidfd_open(pid) for pid in pids]
        killed = time.perf_counter()
        trainer.send_signal(signal.SIGKILL)
        try:
            assert ended(pidfds, NOTICE), "a worker has not noticed"
            cell.detected(time.perf_counter() - killed)
        finally:
            for fd, pid in zip(pidfds, pids, strict=True):
                if not ended([fd], 0.0):
                    os.kill(pid, signal.SIGKILL)
                os.close(fd)
    if backend != "ray":
        for index in range(2):
            told = (tmp_path / str(index)).read_text()
            assert "shut down, or died" in told and "acts on 7.0" in told
    assert {name for name in os.listdir("/dev/shm") if "wsync" in name} <= before
