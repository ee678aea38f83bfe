"""The processes of workers that a sender waits for: how each is watched, and how it has ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import IO, Any

from wsync.deadlines import NOW, wait_readable
from wsync.errors import WorkerDied

Process = BaseProcess | subprocess.Popen[Any] | IO[Any] | int
"""A process of ``multiprocessing`` or ``subprocess``; or a sentinel, a descriptor that is readable when the process has
ended (``Process.sentinel``, a pidfd), as an integer or as an object with ``fileno()``."""
Processes = Sequence[Process] | Mapping[int, Process]
"""Those of all workers, in the order of their indices; or ``{worker_idx: process}`` of some."""
_SENTINELS = ("pipe:", "socket:", *(f"anon_inode:[{kind}]" for kind in ("pidfd", "eventfd", "eventpoll")), "pidfd:")
_EXIT_CODE_TIMEOUT = 1.0  # seconds to wait for the exit code of a process that has ended: some milliseconds are usual


@contextmanager
def watched(processes: Processes | None, num_workers: int) -> Iterator[dict[int, int]]:
    """Yield ``{worker: descriptor}``: each descriptor is readable when the worker's process has ended.

    If the block raises ``WorkerDied``, it is raised again with the exit codes, where known.

    Args:
        processes: those to watch; None for none.
        num_workers: how many workers there are.

    Raises:
        TypeError: one is neither a process nor a sentinel.
        ValueError: a list of another length; an unknown worker; a process that was not started; an integer that is not
            the descriptor of an open pipe, socket, eventfd or pidfd.
    """
    with ExitStack() as opened:
        known = {worker: _checked(worker, one) for worker, one in _by_worker(processes, num_workers).items()}
        sentinels = {worker: _descriptor_of(one, opened) for worker, one in known.items()}
        try:
            yield sentinels
        except WorkerDied as error:
            dead = [worker for worker in sorted(error.workers) if worker in known]
            if not dead:
                raise
            ends = ", ".join(f"worker {one} ({_describe_end(known[one], sentinels[one])})" for one in dead)
            raise WorkerDied(f"{error}: {ends}", error.workers, error.version, error.failed) from error


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


def _checked(worker: int, process: Process) -> Process:
    """Return what is watched: for the sentinel of a ``multiprocessing.Process``, the ``Process``."""
    if isinstance(process, BaseProcess) and process.pid is None:
        raise ValueError(f"the process of worker {worker} has not been started: call its start() before connect()")
    if isinstance(process, BaseProcess | subprocess.Popen) or hasattr(process, "fileno"):  # as `select` takes
        return process
    if not isinstance(process, int):
        raise TypeError(
            f"the process of worker {worker} is a multiprocessing.Process, a subprocess.Popen or a sentinel, "
            f"not {process!r}"
        )
    try:
        is_sentinel = os.readlink(f"/proc/self/fd/{process}").startswith(_SENTINELS)
    except OSError:
        is_sentinel = False
    if not is_sentinel:
        raise ValueError(
            f"worker {worker}: {process} is not the descriptor of an open pipe, socket, eventfd or pidfd; for a "
            "process id, pass open(os.pidfd_open(id))"
        )
    children = (child for child in multiprocessing.active_children() if child.sentinel == process)
    return next(children, process)


def _descriptor_of(process: Process, opened: ExitStack) -> int:
    """Return a descriptor that is readable when ``process`` has ended; ``opened`` closes it if it was made here."""
    if isinstance(process, int):
        return process
    if not isinstance(process, BaseProcess | subprocess.Popen):
        return process.fileno()
    # Not Process.sentinel: that is a pipe, which a child of the worker may keep open after the worker has ended.
    try:
        ended = (process.exitcode if isinstance(process, BaseProcess) else process.poll()) is not None
        descriptor = os.eventfd(1, os.EFD_CLOEXEC) if ended else os.pidfd_open(process.pid or 0)
    except ProcessLookupError:  # it has ended meanwhile
        descriptor = os.eventfd(1, os.EFD_CLOEXEC)  # readable at once
    opened.callback(os.close, descriptor)
    return descriptor


def _describe_end(process: Process, sentinel: int) -> str:
    """Return how a process that has ended did so, as far as that is known here."""
    name, code = f"descriptor {sentinel}", None
    if isinstance(process, BaseProcess):
        process.join(_EXIT_CODE_TIMEOUT)
        name, code = f"process {process.pid}", process.exitcode
    elif isinstance(process, subprocess.Popen):
        with suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_CODE_TIMEOUT)
        name, code = f"process {process.pid}", process.returncode
    else:
        with suppress(OSError):  # not a child of this process, or it has been waited for, or this is no pidfd
            status = os.waitid(os.P_PIDFD, sentinel, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
    if code is None:
        return f"{name} has ended" if wait_readable([sentinel], NOW) else f"{name}: still running"
    if code >= 0:
        return f"{name} ended with exit code {code}"
    names = {one.value: one.name for one in signal.Signals}  # a real-time signal has none
    return f"{name} was ended by {names.get(-code, f'signal {-code}')}"
