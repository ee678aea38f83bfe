"""A mutex in shared memory that can be locked again after its owner has died, and waits for a word to change.

POSIX robust, process-shared, error-checking mutexes, by way of ``ctypes``: an uncontended lock or unlock is one
atomic instruction and no system call (about a quarter of a microsecond from Python). Robust: if a worker is killed
while it holds the mutex, the next process to lock it gets it. Error-checking: unlocking a mutex that this thread does
not hold has no effect, so ``finally: unlock()`` is right even if a signal came before the lock was taken.

``unlock`` is not a Python function: a signal handler may run at the beginning of one, and if the handler raised, the
mutex would stay locked until this process ends.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time
from collections.abc import Callable
from functools import partial

from wsync.errors import SyncTimeout

SIZE = 64  # bytes reserved; glibc needs 40 (48 on some platforms)

_PROCESS_SHARED, _ROBUST, _ERRORCHECK = 1, 1, 2
_quick = ctypes.PyDLL(None)  # holds the GIL: for calls that never block
_blocking = ctypes.CDLL(None)  # releases it


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _function(library: ctypes.CDLL, name: str, *argtypes: type) -> Callable[..., int]:
    function = library[name]
    function.argtypes = argtypes
    function.restype = ctypes.c_int
    return function


_trylock = _function(_quick, "pthread_mutex_trylock", ctypes.c_void_p)
_unlock = _function(_quick, "pthread_mutex_unlock", ctypes.c_void_p)
_consistent = _function(_quick, "pthread_mutex_consistent", ctypes.c_void_p)
_lock_until = _function(_blocking, "pthread_mutex_clocklock", ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec))


class Mutex:
    """A process's handle on a mutex in shared memory.

    Args:
        address: the address of the mutex in this process.
        keep: an object that keeps that memory mapped.

    Attributes:
        unlock: unlocks the mutex; nothing happens if this thread does not hold it.
    """

    __slots__ = ("_address", "_keep", "unlock")

    def __init__(self, address: int, keep: object) -> None:
        self._address = address
        self._keep = keep
        self.unlock: Callable[[], object] = partial(_unlock, address)

    def initialise(self) -> None:
        """Initialise the mutex in its ``SIZE`` bytes. Called once, before another process uses them.

        Raises:
            OSError: the platform has no such mutexes.
        """
        attributes = ctypes.create_string_buffer(64)
        calls = (
            _quick.pthread_mutexattr_init(attributes),
            _quick.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED),
            _quick.pthread_mutexattr_setrobust(attributes, _ROBUST),
            _quick.pthread_mutexattr_settype(attributes, _ERRORCHECK),
            _quick.pthread_mutex_init(ctypes.c_void_p(self._address), attributes),
        )
        for code in calls:
            if code:
                raise OSError(code, f"cannot make a process-shared mutex: {os.strerror(code)}")

    def lock(self, timeout: float | None = None) -> None:
        """Lock the mutex; at once if its owner has died.

        Args:
            timeout: seconds; None for no limit.

        Raises:
            SyncTimeout: it was not free in time: the process that holds it is stopped.
        """
        try:
            code = _trylock(self._address)
            if code == errno.EBUSY:
                until = time.monotonic() + (31_536_000 if timeout is None else timeout)
                whole = int(until)
                moment = ctypes.byref(_Timespec(whole, int((until - whole) * 1e9)))
                code = _lock_until(self._address, time.CLOCK_MONOTONIC, moment)
            if code == errno.EOWNERDEAD:
                _consistent(self._address)
        except BaseException:  # a signal handler has raised, perhaps before the line above
            _consistent(self._address)  # else unlock() would make it unusable; no effect on any other mutex
            raise
        if code == errno.ETIMEDOUT:
            raise SyncTimeout(f"the worker's process has held its mutex for {timeout} s: is it stopped?")
        if code not in (0, errno.EOWNERDEAD):
            raise OSError(code, f"cannot lock a shared mutex: {os.strerror(code)}")


_FUTEX = {"x86_64": 202, "aarch64": 98}  # the number of the system call futex(2)
_FUTEX_WAIT, _FUTEX_WAKE, _ALL = 0, 1, 2**31 - 1


def wait_while_equal(address: int, value: int, timeout: float | None) -> None:
    """Wait until ``wake_all`` is called, a signal comes, or the time is over; return at once if the word has changed.

    Args:
        address: the address of a word in shared memory, of which the lower 32 bits are compared.
        value: the value that the word had.
        timeout: seconds; None for no limit.
    """
    moment = None if timeout is None else ctypes.byref(_Timespec(int(timeout), int(timeout % 1 * 1e9)))
    number, expected = _FUTEX[platform.machine()], ctypes.c_uint32(value & 0xFFFFFFFF)
    _blocking.syscall(ctypes.c_long(number), ctypes.c_void_p(address), _FUTEX_WAIT, expected, moment, None, 0)


def wake_all(address: int) -> None:
    """Wake all threads, of any process, that wait for a change of the word at ``address``."""
    number = ctypes.c_long(_FUTEX[platform.machine()])
    _blocking.syscall(number, ctypes.c_void_p(address), _FUTEX_WAKE, _ALL, None, None, 0)
