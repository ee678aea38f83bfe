"""Anonymous memory files, whose pages are allocated before they are used.

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


@contextmanager
def _no_memory_for(what: str) -> Iterator[None]:
    """Turn the error of a system call that finds no memory left into a WeightSyncError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise WeightSyncError(f"no shared memory left: {what} ({error})") from error
        raise


def whole_pages(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def memory_file(name: str, size: int = 0) -> int:
    """Return the descriptor of a new memory file of ``size`` bytes; WeightSyncError: no memory is left.

    The memory is freed when its last descriptor and mapping are closed.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        allocate(descriptor, 0, size)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def allocate(descriptor: int, offset: int, size: int) -> None:
    """Allocate bytes of a file; WeightSyncError: no memory is left, and the file has the size that it had."""
    end, before = offset + size, os.fstat(descriptor).st_size
    try:
        with _no_memory_for(f"{size / 2**20:.1f} MiB for weights"):
            for at in range(offset, end, _STEP):
                os.posix_fallocate(descriptor, at, min(_STEP, end - at))
    except BaseException:
        os.ftruncate(descriptor, before)
        raise


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write less than 2 GiB to a file; WeightSyncError: no memory is left."""
    with _no_memory_for(f"{len(data) / 2**20:.1f} MiB of extra state"):
        if os.pwrite(descriptor, data, offset) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
