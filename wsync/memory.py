"""Anonymous memory files: allocated before they are touched, since a page that cannot be had then ends the process."""

from __future__ import annotations

import errno
import mmap
import os
from typing import NoReturn

from wsync.errors import WeightSyncError


def whole_pages(nbytes: int) -> int:
    """So many bytes, rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def memory_file(name: str, size: int = 0) -> int:
    """A descriptor of a new file in memory, with ``size`` bytes; gone with who has it open, or mapped.

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
    """Have ``size`` bytes of a file.

    Raises:
        WeightSyncError: the machine has no memory left for them.
    """
    try:
        os.posix_fallocate(descriptor, offset, size)
    except OSError as error:
        explain(error, size)


def explain(error: OSError, size: int) -> NoReturn:
    """Raise ``error`` again; as a WeightSyncError if it is want of memory for ``size`` bytes."""
    if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
        raise error
    raise WeightSyncError(f"no shared memory left: {size / 2**20:.1f} MiB more are needed ({error})") from error
