"""Pidfds (process descriptors), by which the exit of another process on this machine is noticed."""

from __future__ import annotations

import errno
import os
import socket
import struct
import weakref
from functools import cache
from pathlib import Path

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Errors of system calls that found no descriptor or no memory left."""
_PID = struct.Struct("<i")


@cache
def _pid_namespace() -> bytes:
    """Return the machine's boot id and this process's PID namespace: processes that share both share process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}".encode()


def own_identity() -> bytes:
    """Return the process id and PID namespace, by which another process on this machine can watch this one."""
    return _PID.pack(os.getpid()) + _pid_namespace()


class PeerProcess:
    """The process on the other side of a connection, with its pidfd if it runs on this machine.

    Args:
        identity: the other process's ``own_identity()``; empty if it is not known.

    Attributes:
        pid: its process id; -1 if it is not known, or runs on another machine or in another PID namespace.
        descriptors: its pidfd, readable once the process has exited; an eventfd that is readable at once, if it had
            exited before this object was made. Empty if it runs elsewhere, if this kernel has no
            pidfds, and after ``close``.

    Raises:
        OSError: there is no descriptor left.
    """

    def __init__(self, identity: bytes = b"") -> None:
        here = identity[_PID.size :] == _pid_namespace()
        self.pid: int = _PID.unpack_from(identity)[0] if here else -1
        self.descriptors: tuple[int, ...] = ()
        self._finalizer: weakref.finalize | None = None
        if here:
            self._open()

    @classmethod
    def of_pid(cls, pid: int) -> PeerProcess:
        """Return the process with the id ``pid``, as ``SO_PEERCRED`` gives it: 0 for one of another namespace."""
        peer = cls()
        if pid > 0:
            peer.pid = pid
            peer._open()
        return peer

    def _open(self) -> None:
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:  # it has exited; a forked child of it may keep the connection open
            descriptor = os.eventfd(1, os.EFD_CLOEXEC)
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            return  # the kernel, or a sandbox, has no pidfds: only the end of the connection is noticed
        self.descriptors = (descriptor,)
        self._finalizer = weakref.finalize(self, os.close, descriptor)
        self._finalizer.atexit = False

    def close(self) -> None:
        """Close the pidfd. Idempotent; of several threads, one closes it."""
        self.descriptors = ()
        detached = self._finalizer.detach() if self._finalizer is not None else None
        if detached is not None:
            _, close, (descriptor,), _ = detached
            close(descriptor)


def peer_of(sock: socket.socket, identity: bytes) -> PeerProcess:
    """Return the peer's process; for a Unix socket, as the kernel reports it.

    Raises:
        PermissionError: the peer belongs to another user.
    """
    if sock.family != socket.AF_UNIX:
        return PeerProcess(identity)
    pid, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise PermissionError("the peer process belongs to another user")
    return PeerProcess.of_pid(pid)
