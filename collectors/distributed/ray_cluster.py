"""The Ray cluster that a collector's actors live in: the one that there is, one to connect to, or one of its own."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import ray

from collectors.distributed import ray_janitor

_REACH = 5.0  # seconds in which an address has to answer


def starts_one(address: str | None) -> bool:
    """Whether ``Cluster(address)`` would start one on this machine."""
    return not ray.is_initialized() and (address or os.environ.get("RAY_ADDRESS") or "local") == "local"


def connection() -> tuple[str, str] | None:
    """Which connection to Ray this process has; None: it has none. The handle of an actor is good in one only."""
    if not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_job_id()


class Cluster:
    """A connection to Ray, which this process needs only one of.

    Args:
        address: of a cluster, as ``ray.init`` takes it. None: the one that ``ray.init`` or ``RAY_ADDRESS`` has chosen;
            without them, one is started on this machine, and stopped by ``close``.

    Raises:
        ConnectionError: there is no cluster at ``address``; or this process is connected to another one.
    """

    def __init__(self, address: str | None) -> None:
        self._started = False
        self._connection: tuple[str, str] | None = None
        self._janitor: subprocess.Popen[bytes] | None = None
        if ray.is_initialized():
            here = ray.get_runtime_context().gcs_address
            if address not in (None, "auto", "local", here):
                raise ConnectionError(f"this process is connected to the Ray cluster at {here}, not at {address}")
            self._connection = connection()
            return
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        self._started = True
        if address == "local":
            # Nobody else looks at this cluster: no dashboard, no report to anybody, and its logs go with it.
            folder = tempfile.mkdtemp(prefix="wsync-ray-")
            command = [sys.executable, "-I", "-S", ray_janitor.__file__, folder]
            self._janitor = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options = {"include_dashboard": False, "_temp_dir": folder, "_node_ip_address": "127.0.0.1"}
            self._init(address, logging_level=logging.ERROR, **options)
            return
        _reach(address)
        self._init(address, logging_level=logging.WARNING)

    def _init(self, address: str, **options: Any) -> None:
        with ExitStack() as failing:
            failing.callback(self.close)  # after Ctrl-C, too
            try:
                with _signals_kept():
                    ray.init(address, **options)
            except Exception as error:  # Ray raises this very class where a node does not start in time
                raise ConnectionError(f"no Ray cluster can be reached at {address} ({error})") from error
            failing.pop_all()
        self._connection = connection()

    @property
    def connected(self) -> bool:
        """Whether this process still has the connection: nobody has called ``ray.shutdown``."""
        return self._connection is not None and self._connection == connection()

    def require(self) -> None:
        """Before a call through Ray, which would start another cluster where there is no connection.

        Raises:
            ConnectionError: it has ended.
        """
        if not self.connected:
            raise ConnectionError("ray.shutdown() has ended this process's connection to the Ray cluster")

    def close(self) -> None:
        """Disconnect, and stop what was started, if this was the one who did."""
        if self._started:
            self._started = False
            if self.connected or self._connection is None:
                ray.shutdown()
        if self._janitor is not None:
            self._janitor.communicate()  # hangs up, and waits
            self._janitor = None


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Keep the program's handlers: Ray puts one for SIGTERM below Python's, which prints a trace and aborts."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _reach(address: str) -> None:
    """Find out whether anybody listens at ``host:port``: Ray itself would try for a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # "auto" and the like, which Ray answers at once
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH).close()
    except OSError as error:
        raise ConnectionError(
            f"no Ray cluster can be reached at {address} ({error}): start one there (ray start --head), or leave the "
            "address out for one on this machine"
        ) from error
