"""Looking at many descriptors at once."""

from __future__ import annotations

import select
from array import array
from contextlib import suppress


class PeerWatch:
    """Tells by one system call whether anything has happened to any of many descriptors.

    Args:
        descriptors: an ``array("i")``, as bytes. They remain the caller's; one may occur twice.

    Raises:
        OSError: no descriptor is left for the watch, or one of them is closed.
    """

    def __init__(self, descriptors: bytes, /) -> None:
        self._epoll = select.epoll()
        for descriptor in array("i", descriptors):
            with suppress(FileExistsError):
                self._epoll.register(descriptor, select.EPOLLIN)

    def has_events(self) -> bool:
        """Whether one of them is readable or has ended."""
        return bool(self._epoll.poll(0, 1))
