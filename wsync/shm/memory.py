"""Anonymous memory files and eventfds. The pages of a file are allocated before they are used.

If memory ran out at the first use of a page, the kernel would kill the process with SIGBUS.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

from wsync.errors import WeightSyncError

# Bytes to allocate in one call. When a signal comes, the kernel may undo the call and it is repeated: with a periodic
# signal (a profiler's), a call that takes longer than the period would never finish.
_STEP = 1 << 20
_FULL = (errno.ENOSPC, errno.ENOMEM, errno.EFBIG)
_FORBIDDEN = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def system_call(name: str, purpose: str) -> Iterator[None]:
    """Turn what an operating system refuses into a WeightSyncError: no memory is left, or a call is not permitted.

    Args:
        name: the system call.
        purpose: what it is needed for.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise WeightSyncError(f"no shared memory left: {purpose} ({error})") from error
        if error.errno in _FORBIDDEN:
            raise WeightSyncError(
                f"{name}, which {purpose} needs, is not permitted here ({error}): allow it in the container's seccomp "
                "profile, or set WSYNC_NATIVE=0 in the trainer and its workers, so that weights travel by sockets"
            ) from error
        raise


def whole_pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def event_fd(purpose: str) -> int:
    """Return a new eventfd, which does not block.

    Raises:
        WeightSyncError: it is not permitted here.
    """
    with system_call("eventfd(2)", purpose):
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)


def memory_file(name: str, size: int = 0) -> int:
    """Return a file descriptor of a new memory file of ``size`` bytes.

    The memory is freed when its last descriptor and mapping are closed.

    Raises:
        WeightSyncError: the machine has no memory left for it, or it is not permitted here.
    """
    with system_call("memfd_create(2)", "memory that is shared with workers"):
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        allocate(descriptor, 0, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def allocate(descriptor: int, offset: int, size: int) -> None:
    """Allocate ``size`` bytes of a file. If that fails, the file has the size that it had.

    Raises:
        WeightSyncError: the machine has no memory left for them, or it is not permitted here.
    """
    end, before = offset + size, os.fstat(descriptor).st_size
    try:
        with system_call("fallocate(2)", f"{size / 2**20:.1f} MiB of memory that is shared with workers"):
            for at in range(offset, end, _STEP):
                os.posix_fallocate(descriptor, at, min(_STEP, end - at))
    except BaseException:
        os.ftruncate(descriptor, before)
        raise


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write ``data`` to a file at ``offset``.

    Raises:
        WeightSyncError: the machine has no memory left for it.
    """
    rest = memoryview(data)
    with system_call("pwrite(2)", f"{len(data) / 2**20:.1f} MiB of extra state"):
        while rest:  # Linux writes less than 2 GiB at once, and less than that if it has no memory for the rest
            written = os.pwrite(descriptor, rest, offset)
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            rest, offset = rest[written:], offset + written


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Return ``size`` bytes of a file from ``offset`` on; ValueError if there are fewer."""
    data = bytearray()
    while len(data) < size:  # Linux reads less than 2 GiB at once
        part = os.pread(descriptor, size - len(data), offset + len(data))
        if not part:
            raise ValueError(f"a memory file has {len(data)} bytes at {offset}, not {size}")
        data += part
    return bytes(data)
