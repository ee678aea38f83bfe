"""The processes of workers that a sender waits for: how each is watched, and what is said when it has ended."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import IO, Any

from wsync.errors import NotConnected, WorkerDied, system_call

Process = BaseProcess | subprocess.Popen[Any] | IO[Any] | int
"""A process of ``multiprocessing`` or ``subprocess``; or a sentinel, a descriptor that is readable when the process has
ended (``Process.sentinel``, a pidfd), as an integer or as an object with ``fileno()``."""
Processes = Sequence[Process] | Mapping[int, Process]
"""Those of all workers, in the order of their indices; or ``{worker_idx: process}`` of some."""
_SPARE = 128  # open files that connections which have proved nothing, and the user's own code, may need
_EXIT_CODE_TIMEOUT = 1.0  # seconds to wait for the exit code of a process that has ended: milliseconds are usual


def require_descriptors(count: int, what: str) -> None:
    """Raise this process's soft limit of open files if ``count`` more are above it; NotConnected: the hard limit is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + count
    if soft == resource.RLIM_INFINITY or needed + _SPARE <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise NotConnected(f"{what} need {needed} open files, and this process may have {hard}: see `ulimit -Hn`")
    limit = needed + _SPARE if hard == resource.RLIM_INFINITY else min(needed + _SPARE, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def pidfd_of(pid: int) -> int:
    """Return a descriptor that is readable when a process has ended; -1 for 0, a process of another machine."""
    try:
        return os.pidfd_open(pid) if pid > 0 else -1
    except ProcessLookupError:
        return os.eventfd(1, os.EFD_CLOEXEC)  # readable at once
    except OSError:  # a container may block the call: as on another machine
        return -1


def may_run(pid: int, process: Process | None) -> bool:
    """Return whether a worker's process can be ``process``, or one that it has started; True if that is not known."""
    wanted = process.pid if isinstance(process, BaseProcess | subprocess.Popen) else None
    try:
        while wanted is not None and pid > 1 and pid != wanted:
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
                pid = int(stat.read().rpartition(")")[2].split()[1])  # its parent
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        return False
    return pid != 1


@contextmanager
def watched(processes: Processes | None, num_workers: int) -> Iterator[dict[int, int]]:
    """Yield ``{worker: descriptor}``: each descriptor is readable when the worker's process has ended.

    If the block raises ``WorkerDied``, it is raised again with the exit codes of processes that were not given by a
    sentinel. TypeError, ValueError: not one running process or sentinel for each worker, or for some of them by index.
    """
    with ExitStack() as opened:
        known = _by_worker(processes, num_workers)
        sentinels = {worker: _descriptor_of(worker, one, opened) for worker, one in known.items()}
        try:
            yield sentinels
        except WorkerDied as error:
            described = {worker: _end_of(known.get(worker)) for worker in sorted(error.workers)}
            ends = [f"worker {worker} ({end})" for worker, end in described.items() if end]
            if not ends:
                raise
            raise WorkerDied(f"{error}: {', '.join(ends)}", error.workers, error.version, error.failed) from error


def _by_worker(processes: Processes | None, num_workers: int) -> Mapping[int, Process]:
    if processes is None:
        return {}
    if isinstance(processes, str) or not isinstance(processes, Mapping | Sequence):
        raise TypeError(f"processes is a list, one for each worker, or {{worker_idx: process}}, not {processes!r}")
    if isinstance(processes, Mapping):
        if unknown := sorted(set(processes) - set(range(num_workers))):
            raise ValueError(f"there is no worker {unknown[0]}: there are {num_workers}, counted from 0")
        return processes
    if len(processes) != num_workers:
        raise ValueError(f"processes has {len(processes)} entries for {num_workers} worker(s): give one for each")
    return dict(enumerate(processes))


def _descriptor_of(worker: int, process: Process, opened: ExitStack) -> int:
    """Return a descriptor that is readable when ``process`` has ended; ``opened`` closes it if it was made here."""
    if isinstance(process, BaseProcess | subprocess.Popen):
        if process.pid is None:
            raise ValueError(f"the process of worker {worker} has not been started: call its start() before connect()")
        ended = process.exitcode if isinstance(process, BaseProcess) else process.poll()
        # Not Process.sentinel: that is a pipe, which a child of the worker may keep open after the worker has ended.
        try:
            if ended is not None:  # its id may be that of another process now
                raise ProcessLookupError
            with system_call("pidfd_open(2)", "`processes`, which can be left out"):
                descriptor = os.pidfd_open(process.pid)
        except ProcessLookupError:
            descriptor = os.eventfd(1, os.EFD_CLOEXEC)  # readable at once
        opened.callback(os.close, descriptor)
        return descriptor
    try:
        descriptor = process if isinstance(process, int) else process.fileno()
        os.fstat(descriptor)
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"the process of worker {worker} is a multiprocessing.Process, a subprocess.Popen or a sentinel, "
            f"not {process!r}"
        ) from error
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"worker {worker}: {process} is not the descriptor of an open pipe, socket, eventfd or pidfd; for a "
            "process id, pass open(os.pidfd_open(id))"
        ) from error
    return descriptor


def _end_of(process: Process | None) -> str:
    """Return how a process that has ended did so; nothing for a sentinel."""
    if isinstance(process, BaseProcess):
        process.join(_EXIT_CODE_TIMEOUT)
        code = process.exitcode
    elif isinstance(process, subprocess.Popen):
        with suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_CODE_TIMEOUT)
        code = process.returncode
    else:
        return ""
    if code is None:
        return f"process {process.pid} has ended"
    if code >= 0:
        return f"process {process.pid} ended with exit code {code}"
    names = {one.value: one.name for one in signal.Signals}  # a real-time signal has none
    return f"process {process.pid} was ended by {names.get(-code, f'signal {-code}')}"
