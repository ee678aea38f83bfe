"""The process of a training run: errors and exit statuses, signals, and the seed of a resumed run."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, NoReturn, Self

import numpy as np

from collectors.errors import ConfigError
from learning.reporting.files import METRICS

CLAIM = ".claim"
"""A file in the folder of a run or sweep, which its process keeps locked until it ends."""
_RUNS_END = 60.0  # seconds in which the runs of a sweep have to end after Ctrl-C

log = logging.getLogger(__name__)
TRACEBACKS = "HYDRA_FULL_ERROR" in os.environ  # set by the user; `run_hydra` sets it for Hydra afterwards

_job_errors: list[Exception] = []

Describe = Callable[[BaseException], str | None]
"""Returns an error that a user can act on in one line, None for any other error."""


def run_command(
    command: Callable[[], None], describe: Describe, on_error: Callable[[], None] = lambda: None
) -> NoReturn:
    """Call `command` and end the process.

    An error with a description is one line on stderr, or a traceback if HYDRA_FULL_ERROR is set; so is an OSError from
    outside of `reported_errors` (a folder that Hydra cannot make). Exit statuses: 1 after an error, 130 after Ctrl-C,
    and 128 + the number of a signal after one that `interrupt_by_signals` has caught.

    Args:
        command: the command.
        describe: describes errors.
        on_error: called after an error, before it is reported.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set while modules were imported
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command()
    except BaseException as error:  # also Ctrl-C and SystemExit: each ends the run by its own rule
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a further Ctrl-C does not wait for `on_error`
        on_error()
        if isinstance(error, KeyboardInterrupt):
            sys.exit(128 + (error.args[0] if error.args else signal.SIGINT))
        message = describe(error)
        if message is None and isinstance(error, OSError) and not any(error is one for one in _job_errors):
            message = str(error)
        if message is None or TRACEBACKS:
            raise
        sys.exit(f"{Path(sys.argv[0]).name}: {message}")
    sys.exit(0)


def interrupt_by_signals(sweep: Path, *, wait_for_runs: bool) -> None:
    """Have SIGTERM and SIGHUP raise ``KeyboardInterrupt``, as Ctrl-C does, unless they are ignored or caught already.

    For a sweep: a launcher that runs jobs in processes of its own (joblib) kills them after a ``KeyboardInterrupt``; a
    signal that ends this process at once would leave them running.

    Args:
        sweep: the folder of the sweep.
        wait_for_runs: whether the first SIGINT raises only when all runs in `sweep` have ended, or after a minute. The
            terminal sends it to their processes as well, and each ends in order.
    """

    def interrupt(number: int, _: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one raises at once
        if number == signal.SIGINT:
            _wait_for_runs(sweep)
        raise KeyboardInterrupt(number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, interrupt)
    if wait_for_runs and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)


def _wait_for_runs(sweep: Path) -> None:
    """Wait until no run in `sweep` has its folder locked (``own_folder``), but not longer than a minute."""
    claims, deadline = [claim for claim in sweep.rglob(CLAIM) if claim.parent != sweep], time.monotonic() + _RUNS_END
    if any(map(_is_locked, claims)):
        os.write(2, b"waiting for the runs to end; Ctrl-C again ends them at once\n")  # print() is not re-entrant
    while any(map(_is_locked, claims)) and time.monotonic() < deadline:
        time.sleep(0.05)  # a blocking flock() would have no deadline


def _is_locked(claim: Path) -> bool:
    try:
        with claim.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the run has ended and removed it, or the file system has no locks
        return False
    return False


@contextmanager
def reported_errors(folder: Path, describe: Describe, *, job: int | None) -> Iterator[None]:
    """Report an error of one job, which has its files in `folder`, and raise it again; `job` is its number in a sweep.

    In a sweep, Hydra continues with the other jobs and raises only the first error, at the end: each error is logged at
    once. In a single run, the error becomes a ``SystemExit`` with a one-line message, to which Hydra adds nothing, and
    a folder without files, except those of Hydra, is removed.
    """
    try:
        yield
    except Exception as error:  # of any class; raised again, as a one-line message where there is one
        _job_errors.append(error)
        message = describe(error)
        if job is not None:
            log.error("run %d (%s): %s", job, folder.name, message or error, exc_info=message is None)
        elif message is not None and not TRACEBACKS:
            if {path.name for path in folder.glob("*")} == {".hydra", CLAIM}:
                shutil.rmtree(folder, ignore_errors=True)  # the run's own error is what is reported
            raise SystemExit(f"{Path(sys.argv[0]).name}: {message}") from error
        raise


class StopRequest:
    """Turns the first SIGINT, SIGTERM or SIGHUP into a request to stop; another SIGINT or SIGTERM has its usual effect.

    SIGHUP comes, often twice, when a terminal is closed or a connection is lost: later ones are ignored, and what is
    written to that terminal is dropped. Under ``nohup`` SIGHUP is ignored from the beginning.

    A context manager, for the main thread. In another thread (a launcher of sweeps may run jobs in threads) Python
    cannot catch signals, and `requested` stays false.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._callbacks: list[Callable[[], object]] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self._terminals: list[int] = []  # of the standard streams, those that are terminals

    @property
    def requested(self) -> bool:
        """Whether a signal has arrived."""
        return self.signal is not None

    @property
    def exit_status(self) -> int:
        """The exit status of a process that a signal ended, 128 + its number; 0 without a signal."""
        return 0 if self.signal is None else 128 + self.signal

    def add_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` when a signal arrives, inside the handler; at once if one has arrived."""
        self._callbacks.append(callback)
        if self.requested:
            self._call_back()

    def _call_back(self) -> None:
        while self._callbacks:
            self._callbacks.pop()()

    def __enter__(self) -> Self:
        self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore(self.SIGNALS)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:  # a library has put this handler back
            raise KeyboardInterrupt(number)
        self.signal = signal.Signals(number)
        self._restore((signal.SIGINT, signal.SIGTERM))
        if signal.SIGHUP in self._handlers:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
        if number == signal.SIGHUP:
            self._drop_output()
        self._call_back()

    def _drop_output(self) -> None:
        """Have writes to a terminal that is gone succeed."""
        null = os.open(os.devnull, os.O_WRONLY)
        for terminal in self._terminals:
            os.dup2(null, terminal)
        os.close(null)

    def _restore(self, numbers: Iterable[signal.Signals]) -> None:
        for number in numbers:
            if number in self._handlers:
                signal.signal(number, self._handlers.pop(number))


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catch requests to stop inside. After a second one the process ends at once; contexts inside are left before."""
    with StopRequest() as stop:
        try:
            yield stop
        except KeyboardInterrupt:
            if not stop.requested:
                raise
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(stop.exit_status)  # without exit handlers: those of other libraries may wait for a server


def resumed_seed(seed: int, frames: int) -> int:
    """Return the seed for a run with the setting `seed` that continues after `frames` frames; `seed` itself for 0.

    A resumed run must not repeat the initial states, noise and minibatches of the first one. The result has 31 bits.
    """
    if frames == 0:
        return seed
    return int(np.random.SeedSequence([seed, frames]).generate_state(1)[0] >> 1)


def claimed(folder: Path, refused: BaseException, mode: Literal["a", "x"] = "a") -> TextIOWrapper:
    """Return the claim of `folder`, locked; raise `refused` if another process has locked it.

    Args:
        folder: of a run or sweep.
        refused: the error.
        mode: "x" to refuse any claim that is there, also that of a process that was killed.
    """
    try:
        claim = open(folder / CLAIM, mode, encoding="utf-8")  # noqa: SIM115  (closed by the caller)
    except FileExistsError as error:
        raise refused from error
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        claim.close()
        raise refused from error
    except OSError as error:  # a file system without locks
        print(f"{folder} cannot be locked ({error.strerror}): start no other run in it now", file=sys.stderr)
    return claim


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Keep the folder of a run in a sweep from other runs: ``hydra.sweep.subdir`` may give it to several of the sweep.

    Raises:
        ConfigError: another run has it or has had it, or an earlier start of this one (a job that Slurm has requeued).
    """
    refused = ConfigError(
        f"{folder} has files of an earlier start of this job, or of another run of this sweep: continue that run by "
        f"resume={folder}, or add ${{hydra:job.num}} to hydra.sweep.subdir"
    )
    with claimed(folder, refused, "x"):
        try:
            if (folder / METRICS).exists():
                raise refused
            yield
        finally:
            (folder / CLAIM).unlink(missing_ok=True)
