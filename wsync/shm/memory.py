"""Anonymous memory files, of this process or another. Their pages are allocated before they are used.

If memory ran out at the first use of a page, the kernel would kill the process with SIGBUS.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import ExitStack
from typing import NoReturn

from wsync.control.liveness import EXHAUSTED
from wsync.errors import WeightSyncError

# Bytes to allocate in one call. When a signal comes, the kernel may undo the call and it is repeated: with a periodic
# signal (a profiler's), a call that takes longer than the period would never finish.
_STEP = 1 << 20


def whole_pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def memory_file(name: str, size: int = 0) -> int:
    """Return a file descriptor of a new memory file of ``size`` bytes.

    The memory is freed when its last descriptor and mapping are closed.

    Raises:
        WeightSyncError: the machine has no memory left for it.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    if size:
        try:
            allocate(descriptor, 0, size)
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def allocate(descriptor: int, offset: int, size: int) -> None:
    """Allocate ``size`` bytes of a file. If that fails, the file has the size that it had.

    Raises:
        WeightSyncError: the machine has no memory left for them.
    """
    end, before = offset + size, os.fstat(descriptor).st_size
    try:
        for at in range(offset, end, _STEP):
            os.posix_fallocate(descriptor, at, min(_STEP, end - at))
    except BaseException as error:
        os.ftruncate(descriptor, before)
        if isinstance(error, OSError):
            _raise_shortage(error, size)
        raise


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write ``data`` to a file at ``offset``.

    Raises:
        WeightSyncError: the machine has no memory left for it.
    """
    rest = memoryview(data)
    try:
        while rest:  # Linux writes less than 2 GiB at once, and less than that if it has no memory for the rest
            written = os.pwrite(descriptor, rest, offset)
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            rest, offset = rest[written:], offset + written
    except OSError as error:
        _raise_shortage(error, len(data))


def _raise_shortage(error: OSError, size: int) -> NoReturn:
    """Raise WeightSyncError if ``error`` is a lack of memory for ``size`` bytes; else raise ``error``."""
    if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
        raise error
    raise WeightSyncError(f"no shared memory left: {size / 2**20:.1f} MiB more are needed ({error})") from error


def open_handle(handle: tuple[int, int, int, str]) -> tuple[int, int] | None:
    """Open the files of an arena that another process made; return their descriptors, or None if that is impossible.

    It is impossible on another machine, for another user, if the process has ended, or in another PID namespace.

    Raises:
        OSError: there is no descriptor or memory left.
    """
    pid, memory_fd, extra_fd, name = handle
    with ExitStack() as opened:
        fds: list[int] = []
        try:
            for fd in (memory_fd, extra_fd):
                fds.append(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
                opened.callback(os.close, fds[-1])
            if {os.readlink(f"/proc/self/fd/{fd}") for fd in fds} == {f"/memfd:{name} (deleted)"}:
                opened.pop_all()
                return fds[0], fds[1]
        except OSError as error:  # no such process, or another user's
            if error.errno in EXHAUSTED:
                raise
    return None
