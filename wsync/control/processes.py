"""The processes of workers that a sender waits for: how each is watched, and how it has ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from numbers import Integral
from typing import Any, Protocol, runtime_checkable

from wsync.deadlines import NOW, wait_readable
from wsync.errors import WorkerDied


@runtime_checkable
class HasFileno(Protocol):
    """An object with a descriptor that becomes readable when a process ends. Whether it does is not checked."""

    def fileno(self) -> int:
        """Return the descriptor."""
        ...


Process = BaseProcess | subprocess.Popen[Any] | HasFileno | int
"""A process of ``multiprocessing`` or ``subprocess``; or a sentinel, a descriptor that is readable when the process has
ended (``Process.sentinel``, a pidfd), as an integer or as an object with ``fileno()``."""
Processes = Sequence[Process] | Mapping[int, Process]
"""Those of all workers, in the order of their indices; or ``{worker_idx: process}`` of some."""


@dataclass(frozen=True)
class _ProcessId:
    """A process of which only the id is known."""

    pid: int


@dataclass(frozen=True)
class _Sentinel:
    """A process of which only a sentinel is known."""

    descriptor: int

    def fileno(self) -> int:
        """See ``HasFileno``."""
        return self.descriptor


_Watched = BaseProcess | subprocess.Popen[Any] | HasFileno | _ProcessId
_EXIT_CODE_TIMEOUT = 1.0  # seconds to wait for the exit code of a process that has ended: some milliseconds are usual


@contextmanager
def watched(processes: Processes | None, num_workers: int) -> Iterator[dict[int, int]]:
    """Yield ``{worker: descriptor}``: each descriptor is readable when the worker's process has ended.

    If the block raises ``WorkerDied``, it is raised again with the exit codes, where known. Not known is that of a
    child given by its ``Process.sentinel`` that ended before this call: multiprocessing may have reaped it already.

    Args:
        processes: those to watch; None for none.
        num_workers: how many workers there are.

    Raises:
        TypeError: one is neither a process nor a sentinel.
        ValueError: a list of another length; an unknown worker; a process that was not started; an integer that is not
            the descriptor of an open pipe, socket, eventfd or pidfd.
    """
    with ExitStack() as opened:
        known = {worker: _as_process(worker, one) for worker, one in _by_worker(processes, num_workers).items()}
        sentinels = {worker: _descriptor_of(worker, one, opened) for worker, one in known.items()}
        try:
            yield sentinels
        except WorkerDied as error:
            ends = [
                f"worker {worker} ({_describe_end(known[worker], sentinels[worker])})"
                for worker in sorted(error.workers)
                if worker in known
            ]
            if not ends:
                raise
            raise WorkerDied(f"{error}: {', '.join(ends)}", error.workers, error.version, error.failed) from error


def _by_worker(processes: Processes | None, num_workers: int) -> Mapping[int, Process]:
    if processes is None:
        return {}
    if isinstance(processes, Mapping):
        unknown = sorted(set(processes) - set(range(num_workers)))
        if unknown:
            raise ValueError(f"there is no worker {unknown[0]}: there are {num_workers}, counted from 0")
        return processes
    if isinstance(processes, str) or not isinstance(processes, Sequence):
        raise TypeError(f"processes is a list, one for each worker, or {{worker_idx: process}}, not {processes!r}")
    if len(processes) != num_workers:
        raise ValueError(
            f"processes has {len(processes)} entries for {num_workers} worker(s): one for each in the order of the "
            "indices, or {worker_idx: process} for some"
        )
    return dict(enumerate(processes))


def _as_process(worker: int, process: Process) -> _Watched:
    """Return the object by which ``process`` is watched, and by which its exit code is read, where possible.

    - for the sentinel of a ``multiprocessing.Process``, the ``Process``, which knows the exit code;
    - for a ``Popen`` that this process has inherited by a fork, a ``_ProcessId``, because ``Popen.poll()`` returns 0
      here although the process still runs.
    """
    if isinstance(process, subprocess.Popen) and process.returncode is None and not _is_child(process.pid):
        return _ProcessId(process.pid)
    if isinstance(process, BaseProcess | subprocess.Popen | HasFileno):
        return process
    if not isinstance(process, Integral) or isinstance(process, bool):
        raise TypeError(
            f"the process of worker {worker} is a multiprocessing.Process, a subprocess.Popen or a sentinel, "
            f"not {process!r}"
        )
    descriptor = int(process)
    if not _may_be_sentinel(descriptor):
        raise ValueError(
            f"worker {worker}: {descriptor} is not the descriptor of an open pipe, socket, eventfd or pidfd; for a "
            "process id, pass open(os.pidfd_open(id))"
        )
    children = (child for child in multiprocessing.active_children() if child.sentinel == descriptor)
    return next(children, _Sentinel(descriptor))


def _may_be_sentinel(descriptor: int) -> bool:
    """Return whether an integer is an open pipe, socket, eventfd or pidfd of this process."""
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return False
    return target.startswith(("pipe:", "socket:", "anon_inode:[pidfd]", "anon_inode:[eventfd]", "pidfd:"))


def _is_child(pid: int) -> bool:
    """Return whether an integer is the id of a child of this process that has not been waited for."""
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (OSError, OverflowError):
        return False
    return True


def _descriptor_of(worker: int, process: _Watched, opened: ExitStack) -> int:
    """Return a descriptor that is readable when ``process`` has ended; ``opened`` closes it if it was made here."""
    if isinstance(process, BaseProcess | subprocess.Popen):
        if process.pid is None:
            raise ValueError(f"the process of worker {worker} has not been started: call its start() before connect()")
        # Not Process.sentinel: that is a pipe, which a child of the worker may keep open after the worker has ended.
        ended, pid = _exit_code(process) is not None, process.pid
    elif isinstance(process, _ProcessId):
        ended, pid = False, process.pid
    else:
        return process.fileno()
    descriptor = -1
    if not ended:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            descriptor = os.pidfd_open(pid)
    if descriptor < 0:
        descriptor = os.eventfd(1, os.EFD_CLOEXEC)  # readable at once
    opened.callback(os.close, descriptor)
    return descriptor


def _exit_code(process: BaseProcess | subprocess.Popen[Any]) -> int | None:
    return process.exitcode if isinstance(process, BaseProcess) else process.poll()


def _describe_end(process: _Watched, sentinel: int) -> str:
    """Return how a process has ended, as far as it can be known here; or that it is still running."""
    if isinstance(process, _ProcessId | HasFileno):
        name = f"process {process.pid}" if isinstance(process, _ProcessId) else f"descriptor {sentinel}"
        code = _exit_code_by_pidfd(sentinel)
    else:
        name, code = f"process {process.pid}", _exit_code(process)
        if code is None and wait_readable([sentinel], NOW):
            if isinstance(process, BaseProcess):
                with suppress(AssertionError):  # join() raises it in a process that has not started `process`
                    process.join(_EXIT_CODE_TIMEOUT)
            else:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_EXIT_CODE_TIMEOUT)
            code = _exit_code(process)
    if code is None and not wait_readable([sentinel], NOW):
        return f"{name}: still running"
    return _describe(name, code)


def _exit_code_by_pidfd(descriptor: int) -> int | None:
    """Return a child's exit code without reaping the child; None if it is not known here."""
    try:
        status = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except OSError:  # not a child of this process, or it has been waited for, or this is no pidfd
        return None
    if status is None:
        return None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def _describe(name: str, code: int | None) -> str:
    if code is None:
        return f"{name} has ended"
    if code >= 0:
        return f"{name} ended with exit code {code}"
    with suppress(ValueError):  # a real-time signal has no name
        return f"{name} was ended by {signal.Signals(-code).name}"
    return f"{name} was ended by signal {-code}"
