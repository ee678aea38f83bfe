"""Stop a process, and know that it has stopped."""

import os
import signal
import subprocess
import time
from pathlib import Path


def stop(pid: int, patience: float = 30.0) -> None:
    """SIGSTOP; return when no thread of the process can run any more, which the signal alone does not promise."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + patience
    while any(_state(thread) not in "Tt" for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} did not stop"
        os.sched_yield()


def wait_until_asleep(thread: int, patience: float = 30.0) -> None:
    """Return when a thread of this process, by its native id, waits in the kernel.

    CPython may lose the wake-up of a signal that arrives between its last look for signals and the system call.
    """
    deadline = time.monotonic() + patience
    while _state(Path(f"/proc/self/task/{thread}")) != "S":
        assert time.monotonic() < deadline, f"thread {thread} did not wait"
        os.sched_yield()


def left_of(group: int, within: float = 10.0) -> list[str]:
    """Processes of the process group `group` that are still there after so many seconds."""
    deadline = time.monotonic() + within
    while True:
        listed = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True).stdout
        left = [line for line in listed.splitlines() if line.split()[0] == str(group) and "Z" not in line.split()[1]]
        if not left or time.monotonic() > deadline:
            return left


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rsplit(")", 1)[1].split()[0]
