"""The processes of workers that a sender waits for: how each is watched, and how it has ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.process import BaseProcess
from numbers import Integral
from typing import Any

from wsync.errors import WorkerDied

Process = BaseProcess | subprocess.Popen[Any] | int
"""A process of ``multiprocessing`` or ``subprocess``; or an integer: a descriptor (``Process.sentinel``, a pidfd), or
else the id of a process on this machine."""
Processes = Sequence[Process] | Mapping[int, Process]
"""Those of all workers, in the order of their indices; or ``{worker_idx: process}`` of some."""

_REAP = 1.0  # seconds; an ended process can be joined at once, or after a few milliseconds


@contextmanager
def watched(processes: Processes | None, num_workers: int) -> Iterator[dict[int, int]]:
    """Yield ``{worker: descriptor}``: each descriptor is readable when the worker's process has ended.

    A ``WorkerDied`` inside is raised with the exit codes added. An integer that is the ``sentinel`` or the ``pid`` of a
    child process of ``multiprocessing`` stands for that process.

    Args:
        processes: those to watch; None for none.
        num_workers: how many workers there are.

    Raises:
        TypeError: one is neither a process nor an integer.
        ValueError: a list of another length; an unknown worker; a process that was not started; an integer that is both
            the sentinel of a child and the id of another.
    """
    with ExitStack() as opened:
        known = {worker: _resolved(worker, one) for worker, one in _by_worker(processes, num_workers).items()}
        sentinels = {worker: _sentinel(worker, one, opened) for worker, one in known.items()}
        try:
            yield sentinels
        except WorkerDied as error:
            ends = [
                f"worker {worker} ({_ended(known[worker], sentinels[worker])})"
                for worker in sorted(error.workers)
                if worker in known
            ]
            if not ends:
                raise
            raise WorkerDied(f"{error}: {', '.join(ends)}", error.workers, error.version, error.refused) from error


def _by_worker(processes: Processes | None, num_workers: int) -> Mapping[int, Process]:
    if processes is None:
        return {}
    if isinstance(processes, Mapping):
        unknown = sorted(set(processes) - set(range(num_workers)))
        if unknown:
            raise ValueError(f"processes names worker(s) {unknown}, and there are {num_workers}, counted from 0")
        return processes
    if isinstance(processes, str) or not isinstance(processes, Sequence):
        raise TypeError(f"processes is a list, one for each worker, or {{worker_idx: process}}, not {processes!r}")
    if len(processes) != num_workers:
        raise ValueError(
            f"processes has {len(processes)} entries for {num_workers} worker(s): one for each in the order of the "
            "indices, or {worker_idx: process} for some"
        )
    return dict(enumerate(processes))


def _resolved(worker: int, process: Process) -> Process:
    """Return the child process that an integer stands for, if any; else ``process``."""
    if isinstance(process, BaseProcess | subprocess.Popen):
        return process
    if not isinstance(process, Integral) or isinstance(process, bool):
        raise TypeError(
            f"the process of worker {worker} is a multiprocessing.Process, a subprocess.Popen, a sentinel or a process "
            f"id, not {process!r}"
        )
    number, children = int(process), multiprocessing.active_children()
    meant = [child for child in children if number in (child.sentinel, child.pid)]
    if len(meant) > 1:
        raise ValueError(
            f"worker {worker}: {number} is the sentinel of one child process and the id of another: give the Process"
        )
    return meant[0] if meant else number


def _sentinel(worker: int, process: Process, opened: ExitStack) -> int:
    """Return a descriptor that is readable when ``process`` has ended; ``opened`` closes it if it was made here."""
    if isinstance(process, BaseProcess):
        if process.pid is None:
            raise ValueError(f"the process of worker {worker} has not been started: call its start() before connect()")
        return process.sentinel
    pid = process.pid if isinstance(process, subprocess.Popen) else process
    if not isinstance(process, subprocess.Popen) and _is_sentinel(pid):
        return pid
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended: a descriptor that is readable at once
        descriptor = os.eventfd(1, os.EFD_CLOEXEC)
    except OSError as error:
        raise ValueError(f"worker {worker}: {pid} is neither an open descriptor nor the id of a process") from error
    opened.callback(os.close, descriptor)
    return descriptor


def _is_sentinel(descriptor: int) -> bool:
    """Return whether an integer is an open pipe, socket, eventfd or pidfd of this process."""
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return False
    return target.startswith(("pipe:", "socket:", "anon_inode:[pidfd]", "anon_inode:[eventfd]", "pidfd:"))


def _ended(process: Process, sentinel: int) -> str:
    """Return how a process has ended, as far as it can be known here."""
    if isinstance(process, BaseProcess):
        process.join(_REAP)
        return _described(f"process {process.pid}", process.exitcode)
    if isinstance(process, subprocess.Popen):
        with suppress(subprocess.TimeoutExpired):
            process.wait(_REAP)
        return _described(f"process {process.pid}", process.returncode)
    name = f"descriptor {process}" if process == sentinel else f"process {process}"
    try:  # WNOWAIT: the process can still be waited for by its parent
        status = os.waitid(os.P_PIDFD, sentinel, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # not a child of this process, or no pidfd: its exit code is not known here
        return _described(name, None)
    if status is None:
        return _described(name, None)
    return _described(name, status.si_status if status.si_code == os.CLD_EXITED else -status.si_status)


def _described(name: str, code: int | None) -> str:
    if code is None:
        return f"{name} has ended"
    if code < 0:
        return f"{name} was ended by {signal.Signals(-code).name}"
    return f"{name} ended with exit code {code}"
