"""Who a process is, in words that another one understands, and can watch it by."""

from __future__ import annotations

import os
import struct
from pathlib import Path

_PID = struct.Struct("<i")


def _machine() -> bytes:
    """Equal for two processes that can see each other's process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()


def identity() -> bytes:
    """This process."""
    return _PID.pack(os.getpid()) + _machine()


class PeerProcess:
    """A process descriptor of the process that told its ``identity``, if it runs on this machine.

    Attributes:
        pid: of that process; -1 if it runs elsewhere.
        descriptors: one that is readable when it has ended; none if it runs elsewhere, or has ended already.
    """

    def __init__(self, who: bytes = b"") -> None:
        here = who[_PID.size :] == _machine()
        self.pid: int = _PID.unpack_from(who)[0] if here else -1
        self.descriptors: tuple[int, ...] = ()
        if here:
            try:
                self.descriptors = (os.pidfd_open(self.pid),)
            except OSError:
                return  # it has ended, or is none: its line says so, too

    def close(self) -> None:
        """Let the descriptor go; harmless when repeated."""
        descriptors, self.descriptors = self.descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)
