"""The Ray cluster of a collector: the connected one, one to connect to, or one that is started on this machine."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

_CONNECT_TIMEOUT = 5.0  # seconds in which an address has to answer


def starts_one(address: str | None) -> bool:
    """Whether ``Cluster(address)`` would start one on this machine."""
    return not ray.is_initialized() and (address or os.environ.get("RAY_ADDRESS") or "local") == "local"


def connection() -> tuple[str, str] | None:
    """Identify this process's connection to Ray; None: there is none. An actor's handle is valid in one connection."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


class Cluster:
    """A connection of this process to Ray.

    After a SIGKILL of this process, a cluster that it has started ends by itself; its folder in ``/tmp`` stays.

    Args:
        address: the address of a cluster, as ``ray.init`` takes it. None: the connected cluster, or that of
            ``RAY_ADDRESS``; without both, a cluster is started on this machine, and stopped by ``close``.

    Raises:
        ConnectionError: there is no cluster at ``address``, or this process is connected to another one.
    """

    def __init__(self, address: str | None) -> None:
        self._connection: tuple[str, str] | None = None
        self._folder = ""  # of a cluster that this object has started
        self._is_owner = False
        if ray.is_initialized():
            here = ray.get_runtime_context().gcs_address
            if address not in (None, "auto", "local", here):
                raise ConnectionError(f"this process is connected to the Ray cluster at {here}, not at {address}")
            self._connection = connection()
            return
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        options: dict[str, Any] = {"logging_level": logging.WARNING}
        if address == "local":
            # Used by this process alone: no dashboard, no usage reports, and the logs are removed with it. Not in
            # TMPDIR: the paths of Ray's sockets, at most 107 bytes, leave little room.
            self._folder = tempfile.mkdtemp(prefix="wsync-ray-", dir="/tmp")
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options = {"logging_level": logging.ERROR, "include_dashboard": False, "_temp_dir": self._folder}
            options["_node_ip_address"] = "127.0.0.1"
        else:
            _check_reachable(address)
        self._is_owner = True
        try:
            with _signals_kept():
                ray.init(address, **options)
        except BaseException as error:  # Ray raises errors of many classes; this one class is documented
            self.close()
            if not isinstance(error, Exception):
                raise
            raise ConnectionError(f"no Ray cluster can be reached at {address} ({error})") from error
        self._connection = connection()

    @property
    def connected(self) -> bool:
        """Whether the connection still exists: ``ray.shutdown`` was not called."""
        return self._connection is not None and self._connection == connection()

    def require(self) -> None:
        """Raise ConnectionError without a connection: Ray's calls would start another cluster."""
        if not self.connected:
            raise ConnectionError("ray.shutdown() has ended this process's connection to the Ray cluster")

    def close(self) -> None:
        """Disconnect from a cluster that this object has connected to, and stop one that it has started. Idempotent."""
        if self._is_owner:
            self._is_owner = False
            if self.connected or self._connection is None:
                ray.shutdown()
        if self._folder:
            for _ in range(2):  # again: a process of Ray that is ending may have written to it
                shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep the program's signal handlers: Ray installs one for SIGTERM that prints a trace and aborts."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _check_reachable(address: str) -> None:
    """Check that ``host:port`` accepts connections: Ray itself would try for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto" and the like, which Ray answers at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT).close()
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster can be reached at {address} ({error}): start one there (ray start --head), or leave the "
            "address out for one on this machine"
        ) from error
