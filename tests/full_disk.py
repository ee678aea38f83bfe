"""A disk, or memory, that has no room."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """Have the kernel refuse files (memory files, too) of more than ``size`` bytes, as where there is no room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
