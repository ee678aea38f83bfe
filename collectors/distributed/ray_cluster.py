"""The Ray cluster of a collector: the connected one, one to connect to, or one that is started on this machine."""

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
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import ray

from collectors.distributed import cluster_cleanup
from collectors.workers.socket_paths import room_for_socket

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


def describe_cluster() -> str:
    """Return how many nodes of the cluster are alive, and their free resources; it may have ended."""
    answers: list[str] = []

    def ask() -> None:
        alive = [node["Alive"] for node in ray.nodes()]
        answers.append(f"{sum(alive)} of {len(alive)} nodes are alive, with {ray.available_resources()}")

    asking = threading.Thread(target=ask, name="describe-cluster", daemon=True)  # Ray waits for a head that has ended
    asking.start()
    asking.join(_CONNECT_TIMEOUT)
    return answers[0] if answers else "the cluster does not answer"


class Cluster:
    """A connection of this process to Ray.

    Args:
        address: the address of a cluster, as ``ray.init`` takes it. None: the connected cluster, or that of
            ``RAY_ADDRESS``; without both, a cluster is started on this machine, and stopped by ``close``.

    Raises:
        ConnectionError: there is no cluster at ``address``, or this process is connected to another one.
    """

    def __init__(self, address: str | None) -> None:
        self._started = False
        self._connection: tuple[str, str] | None = None
        self._cleanup: subprocess.Popen[bytes] | None = None
        if ray.is_initialized():
            here = ray.get_runtime_context().gcs_address
            if address not in (None, "auto", "local", here):
                raise ConnectionError(f"this process is connected to the Ray cluster at {here}, not at {address}")
            self._connection = connection()
            return
        address = address or os.environ.get("RAY_ADDRESS") or "local"
        self._started = True
        if address == "local":
            # Used by this process alone: no dashboard, no usage reports, and the logs are removed with it.
            with room_for_socket("wsync-ray-12345678/session_2000-01-01_00-00-00_123456_1234567/sockets/plasma_store"):
                folder = tempfile.mkdtemp(prefix="wsync-ray-")
            command = [sys.executable, "-I", "-S", cluster_cleanup.__file__, folder]
            self._cleanup = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            options = {"include_dashboard": False, "_temp_dir": folder, "_node_ip_address": "127.0.0.1"}
            self._init(address, logging_level=logging.ERROR, **options)
            return
        _check_reachable(address)
        self._init(address, logging_level=logging.WARNING)

    def _init(self, address: str, **options: Any) -> None:
        with ExitStack() as failing:
            failing.callback(self.close)  # after Ctrl-C, too
            try:
                with _signals_kept():
                    ray.init(address, **options)
            except Exception as error:  # Ray raises errors of many classes; this one class is documented
                raise ConnectionError(f"no Ray cluster can be reached at {address} ({error})") from error
            failing.pop_all()
        self._connection = connection()

    @property
    def connected(self) -> bool:
        """Whether the connection still exists: ``ray.shutdown`` was not called."""
        return self._connection is not None and self._connection == connection()

    def require(self) -> None:
        """Check the connection before a call, which would otherwise start another cluster.

        Raises:
            ConnectionError: the connection has ended.
        """
        if not self.connected:
            raise ConnectionError("ray.shutdown() has ended this process's connection to the Ray cluster")

    def close(self) -> None:
        """Disconnect from a cluster that this object has connected to, and stop one that it has started. Idempotent."""
        if self._started:
            self._started = False
            if self.connected or self._connection is None:
                ray.shutdown()
        if self._cleanup is not None:
            with suppress(ValueError):  # its input is closed: Ctrl-C has ended an earlier call
                self._cleanup.communicate(b"\n")  # a line: a forked child of this process may hold the pipe open
            self._cleanup.wait()
            self._cleanup = None


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
    """Check that ``host:port`` accepts connections: Ray itself would try for a minute.

    Raises:
        ConnectionError: it does not.
    """
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
