"""The trainer is killed: its workers end, and nothing is left of either."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from cells import Cell
from stopping import has_ended

NOTICE = 60.0  # seconds, so that a busy machine does not fail the test


def test_trainer_killed(cell: Cell, backend_name: str, tmp_path: Path) -> None:
    """The trainer is killed (SIGKILL) while its workers wait for weights without a limit. In each worker `receive`
    raises NotConnected (Ray ends its actors by itself), the model keeps its weights, the process can end;
    nothing is left in `/dev/shm`."""
    address = []
    if backend_name == "ray":
        import ray
        import ray_workers

        ray_workers.start_cluster()
        address = [ray.get_runtime_context().gcs_address]
    before = {name for name in os.listdir("/dev/shm") if "wsync" in name}
    here = Path(__file__).parent
    command = [sys.executable, str(here / "trainer.py"), backend_name, str(tmp_path), *address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pids = [int(word) for word in trainer.stdout.readline().split()]
        assert len(pids) == 2, "the trainer did not come up"
        pidfds = [os.pidfd_open(pid) for pid in pids]
        killed = time.perf_counter()
        trainer.send_signal(signal.SIGKILL)
        try:
            assert all(has_ended(fd, NOTICE) for fd in pidfds), "a worker has not noticed"
            cell.detection = time.perf_counter() - killed
        finally:
            for fd, pid in zip(pidfds, pids, strict=True):
                if not has_ended(fd, 0.0):
                    os.kill(pid, signal.SIGKILL)
                os.close(fd)
    if backend_name != "ray":
        for index in range(2):
            assert (tmp_path / str(index)).read_text().endswith("acts on 7.0")
    assert {name for name in os.listdir("/dev/shm") if "wsync" in name} <= before
