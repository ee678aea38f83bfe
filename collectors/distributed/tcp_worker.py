"""The worker's side over TCP: find the trainer, join it, execute its commands."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait

from collectors.distributed import torchrun
from collectors.worker import exit_when_readable, serve, set_worker_signals
from collectors.workers.connections import WorkerConnection
from wsync import NotConnected
from wsync.control import Address, Connection, connect

TRAINER, AUTHKEY = "WSYNC_TRAINER", "WSYNC_AUTHKEY"


def is_worker(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started to be a worker: by torchrun with a rank above 0, or with ``WSYNC_TRAINER``."""
    return TRAINER in env or (torchrun.under_torchrun(env) and int(env["RANK"]) > 0)


def join_trainer(*, timeout: float = 60.0) -> int:
    """Run this process as a worker of a ``DistributedCollector(launcher="join")``, until it is shut down.

    The trainer's address is that of ``WSYNC_TRAINER`` (``host:port``), the key that of ``WSYNC_AUTHKEY``; or, under
    torchrun, those that rank 0 has published. If the trainer's process ends, this one ends at once, with status 1;
    if it shuts down and this one does not end in time, because a batch takes longer, with status 0.

    Args:
        timeout: seconds in which the trainer has to be reached.

    Returns:
        The exit status for this process: 0. Errors in this worker are raised in the trainer.

    Raises:
        NotConnected: there is no trainer, or it did not accept this worker.
        SyncTimeout: rank 0 has not published its address, or the trainer's machine did not answer in time.
        ValueError: an address cannot be parsed, or there is no key.
    """
    set_worker_signals()
    if TRAINER in os.environ:
        address, worker_idx = _address(os.environ[TRAINER], key_from_environment(os.environ)), -1
    elif is_worker():
        address, worker_idx = torchrun.look_up(timeout), int(os.environ["RANK"]) - 1
    else:
        raise ValueError(f"no trainer is given: start this under torchrun with a rank above 0, or set {TRAINER}")
    join(address, worker_idx, timeout)
    return 0


def key_from_environment(env: Mapping[str, str]) -> bytes:
    """Return the key in ``WSYNC_AUTHKEY``.

    Raises:
        ValueError: there is none.
    """
    if not env.get(AUTHKEY):
        raise ValueError(f"set {AUTHKEY} to a secret of your own, the same for the trainer and its workers")
    return env[AUTHKEY].encode()


def resolved(host: str) -> str:
    """Return the IP address of ``host``; both ends authenticate by it, whatever name each of them was given."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return host  # the error of listening there, or of connecting, is the better one


def _address(text: str, key: bytes) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{TRAINER} is host:port, not {text!r}")
    return Address(resolved(host.strip("[]")), int(port), key)


def join(address: Address, worker_idx: int, timeout: float) -> None:
    """Join the trainer at ``address``, and execute its commands until it closes the connection.

    Args:
        address: the address of the trainer's listener.
        worker_idx: the index to have; -1: any.
        timeout: seconds in which the trainer has to accept.

    Raises:
        NotConnected: there is no trainer, or it did not accept this worker.
        SyncTimeout: the trainer's machine did not answer in time.
    """
    deadline, key = time.monotonic() + timeout, secrets.token_hex(16)
    name = f"(process {os.getpid()} on {socket.gethostname()})"
    ends: dict[str, Connection] = {}
    try:
        for purpose in ("liveness", "messages"):
            registration = json.dumps({"purpose": purpose, "key": key, "name": name})
            ends[purpose] = connect(address, worker_idx, deadline, registration.encode())
        for end in ends.values():
            _require_accepted(end, address, deadline)
        liveness = ends["liveness"]
        stop_watching = exit_when_readable(*liveness.descriptors, status=partial(_exit_status, liveness.fileno()))
        try:
            serve(WorkerConnection(ends["messages"]))
        finally:
            stop_watching()
    finally:
        for end in ends.values():
            end.close()


def _exit_status(liveness: int) -> int:
    """Return 0 if the trainer has shut down, which it reports by a message: see ``ConnectedWorker.release``."""
    with socket.socket(fileno=socket.dup(liveness)) as sock, suppress(OSError):
        return 0 if sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) else 1
    return 1


def _require_accepted(end: Connection, address: Address, deadline: float) -> None:
    where = f"{address.host}:{address.port}"
    if not wait([end.fileno()], max(0.0, deadline - time.monotonic())):
        raise NotConnected(f"the trainer at {where} does not answer: is it stopped?")
    try:
        verdict, reason, _ = WorkerConnection(end).receive()
    except EOFError as error:
        raise NotConnected(
            f"the trainer at {where} did not accept this worker: another key? Or it has its workers already"
        ) from error
    if verdict == "refused":
        raise NotConnected(f"the trainer does not take this worker: {reason}")
