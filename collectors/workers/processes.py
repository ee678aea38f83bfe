"""Processes on the trainer's machine: how they start, how they end, and how they notice the trainer's end."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

SHUTDOWN_GRACE = 5.0  # seconds in which a worker has to end after the message to end
PRELOAD = ["collectors.worker"]
"""Modules that the fork server imports once, so that a worker starts in a fraction of a second."""

_OURS = "wsync, before: "  # begins the value of PYTHONSAFEPATH that `start` sets; any value has the same meaning
_starting = threading.Lock()  # several threads may make collectors at once; there is one __main__, and one environment

if (given := os.environ.get("PYTHONSAFEPATH", "")).startswith(_OURS):  # in the fork server, which may have other users
    os.environ["PYTHONPATH"] = given.removeprefix(_OURS)
    del os.environ["PYTHONSAFEPATH"]


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables for a while."""
    former = {name: os.environ[name] for name in variables if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]
        os.environ.update(former)


@contextmanager
def _prepared_to_start() -> Iterator[None]:
    """Change what a new process takes over from this one.

    It does not run the trainer's script again: what is sent from ``__main__`` is pickled by value, and a script without
    ``if __name__ == "__main__"`` works. It has this process's ``sys.path`` from its beginning: the current folder would
    come first, and a file ``queue.py`` there would be imported. And it knows its default start method: joblib's,
    "loky", is known to joblib alone.
    """
    path = {"PYTHONSAFEPATH": _OURS + os.environ.get("PYTHONPATH", ""), "PYTHONPATH": os.pathsep.join(sys.path)}
    names, method = vars(sys.modules["__main__"]), multiprocessing.get_start_method(allow_none=True)
    is_foreign = method not in (None, *multiprocessing.get_all_start_methods())
    hidden = {name: names[name] for name in ("__spec__", "__file__") if name in names}
    with environment(**path):
        names["__spec__"] = None
        names.pop("__file__", None)
        if is_foreign:
            multiprocessing.set_start_method("spawn", force=True)
        try:
            yield
        finally:
            names.update(hidden)
            if is_foreign:
                multiprocessing.set_start_method(method, force=True)


def start(target: Callable[..., None], worker_idx: int, *arguments: Any) -> BaseProcess:
    """Start a process that runs ``target(*arguments)`` in this environment and ends when this process ends."""
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "a collector starts processes, and this one is daemonic, which may have none: start it with daemon=False, "
            "or use Collector, which acts in this process"
        )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(
        target=_run, args=(target, os.getpid(), dict(os.environ), arguments), name=f"collector-worker-{worker_idx}"
    )
    with _starting, _prepared_to_start():
        process.start()
    return process


def _run(target: Callable[..., None], trainer: int, environment: Mapping[str, str], arguments: tuple[Any, ...]) -> None:
    set_worker_signals()
    try:
        exit_when_readable(os.pidfd_open(trainer))
    except ProcessLookupError:
        os._exit(1)
    os.environ.clear()
    os.environ.update(environment)  # the fork server has the environment of the time when it was started
    torch.seed()  # all children of a fork server inherit the same state of the generators
    np.random.seed()
    target(*arguments)


def set_worker_signals() -> None:
    """Ignore what the process group gets: SIGINT by Ctrl-C, SIGUSR1 by Slurm; let SIGTERM end the process."""
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def exit_when_readable(descriptor: int, status: Callable[[], int] = lambda: 1) -> Callable[[], None]:
    """Start a thread that ends this process, with ``status()``, when ``descriptor`` is readable.

    Returns:
        A function that ends the thread.
    """
    stopped = os.eventfd(0, os.EFD_CLOEXEC)

    def watch() -> None:
        poller = select.poll()
        for one in (descriptor, stopped):
            poller.register(one, select.POLLIN)
        if stopped not in (ready for ready, _ in poller.poll()):
            os._exit(status())

    thread = threading.Thread(target=watch, name="trainer-watch", daemon=True)
    thread.start()

    def stop() -> None:
        os.eventfd_write(stopped, 1)
        thread.join()
        os.close(stopped)

    return stop


def exit_reason(process: BaseProcess) -> str:
    """Return how a process has ended, as text to follow "worker 3 "; wait for its end, but not for ever."""
    process.join(SHUTDOWN_GRACE)
    if process.exitcode is None:
        return f"(process {process.pid}) has lost its connection, and has not ended"
    return f"(process {process.pid}) died with exit code {process.exitcode}"


def join_or_kill(processes: Collection[BaseProcess]) -> None:
    """Wait for processes that are to end; kill those that exceed the grace period, all if interrupted."""
    deadline = time.monotonic() + SHUTDOWN_GRACE
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:  # also after a second Ctrl-C: the interpreter would wait at exit for a process that is left
        for process in processes:
            kill(process)


def kill(process: BaseProcess) -> None:
    """Kill a process and release its resources."""
    process.join(0)  # the fork server may have reaped it, and another process may have its id: no signal is sent then
    process.kill()
    process.join()
    process.close()
