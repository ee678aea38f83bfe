"""Stop a process, and know that it has stopped."""

import os
import signal
import time
from pathlib import Path


def stop(pid: int, patience: float = 30.0) -> None:
    """SIGSTOP; return when no thread of the process can run any more, which the signal alone does not promise."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + patience
    while any(_state(thread) not in "Tt" for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} did not stop"
        os.sched_yield()


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rsplit(")", 1)[1].split()[0]
