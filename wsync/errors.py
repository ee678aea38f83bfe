"""The exceptions. Each message names the cause, the worker or the key, and the remedy."""

from __future__ import annotations

import errno
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import ParamSpec

P = ParamSpec("P")
_MAX_TEXT = 1 << 16  # characters of an error that travels, of up to four bytes each


class WeightSyncError(RuntimeError):
    """Base of everything that can go wrong on the way from a trainer to its workers.

    Attributes of a trainer's ``SyncTimeout``, ``WorkerFailed`` or ``WorkerDied``; empty, or None, in other errors:
        workers: ``{worker_idx: cause}`` for each worker that failed.
        version: the update that they lack, and the others have; None if no worker was given one.
        failed: those that answered with an error, or could not be sent the update; others died, or did not answer.
    """

    workers: Mapping[int, str] = MappingProxyType({})
    version: int | None = None
    failed: Collection[int] = frozenset()


class NotConnected(WeightSyncError):
    """A call that needs the other end came before ``connect``, or after it went away."""


class LayoutMismatch(WeightSyncError, ValueError):
    """Weights do not fit the model, or the layout agreed on first; nothing was applied."""


class WorkerError(WeightSyncError):
    """Some workers do not have an update; it has the attributes of ``WeightSyncError``."""

    def __init__(
        self,
        message: str,
        workers: Mapping[int, str] | None = None,
        version: int | None = None,
        failed: Collection[int] = (),
    ) -> None:
        super().__init__(message)
        self.workers = dict(workers or {})
        self.version = version
        self.failed = frozenset(failed)


class SyncTimeout(WorkerError, TimeoutError):
    """The deadline passed before a worker answered; the message names the missing workers."""


class WorkerFailed(WorkerError):
    """A worker refused or failed to install an update; carries the remote traceback."""


class WorkerDied(WorkerError):
    """A worker died, or was disconnected; the message says whether the others have the update."""


@contextmanager
def system_call(name: str, what: str) -> Iterator[None]:
    """Turn the error of a system call that finds no memory left, or is not permitted, into a WeightSyncError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise WeightSyncError(f"no shared memory left: {what} ({error})") from error
        if error.errno in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP):
            raise WeightSyncError(
                f"{name}, needed for {what}, is not permitted here ({error}): allow it in the container's seccomp "
                "profile; or set WSYNC_NATIVE=0 in the trainer and its workers: weights then travel by sockets"
            ) from error
        raise


def missing_extra(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """Return the error for the ``error`` of an import that needs the optional dependencies ``extra`` (``"ray"`` …)."""
    package = (error.name or "").split(".")[0]
    return ModuleNotFoundError(
        f"{package} is not installed: pip install -e '.[{extra}]' in a clone of wsync", name=error.name
    )


def error_of(function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> str:
    """Call ``function``; return the traceback if it raised, to be raised at the other end, or else an empty string."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  the code of a model or a user may raise anything
        return as_text(error)
    return ""


def as_text(error: BaseException | str) -> str:
    """Return the end of an error, with its traceback, as a message may have it: not too long, and valid Unicode."""
    text = error if isinstance(error, str) else "".join(traceback.format_exception(error))
    return text[-_MAX_TEXT:].encode(errors="replace").decode()


def last_line(error: str) -> str:
    """Return the last line of an error, which says what it is."""
    return error.strip().rpartition("\n")[2].strip().removeprefix("wsync.errors.")


def join_indices(workers: Collection[int]) -> str:
    """Return worker indices as text."""
    return ", ".join(str(worker) for worker in sorted(workers))
