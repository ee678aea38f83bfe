"""A worker's side over TCP: find the trainer, join it, serve it."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping

from collectors.distributed import torchrun
from collectors.distributed.doors import Address, Hello, knock
from collectors.workers.lines import StreamLine, serve
from collectors.workers.worker import end_with, leave_signals_to_the_trainer
from wsync import NotConnected

TRAINER, AUTHKEY = "WSYNC_TRAINER", "WSYNC_AUTHKEY"


def is_worker(env: Mapping[str, str] = os.environ) -> bool:
    """Whether this process was started to be a worker: by torchrun with a rank above 0, or with ``WSYNC_TRAINER``."""
    return TRAINER in env or (torchrun.under_torchrun(env) and int(env["RANK"]) > 0)


def join_trainer(*, timeout: float = 60.0) -> int:
    """Be a worker of a ``DistributedCollector(launcher="join")``, until it is shut down.

    It is found under the address in ``WSYNC_TRAINER`` (``host:port``) with the key in ``WSYNC_AUTHKEY``; or, under
    torchrun, where rank 0 has said that it is. If the trainer's process ends, so does this one, at once, with status 1.

    Args:
        timeout: seconds in which the trainer has to be found.

    Returns:
        The exit status for this process: 0. What has gone wrong in this worker is raised in the trainer.

    Raises:
        NotConnected: there is no trainer, or it did not let this worker in.
        SyncTimeout: rank 0 has not said where it is.
        ValueError: an address that is none, or no key.
    """
    leave_signals_to_the_trainer()
    if TRAINER in os.environ:
        address, authkey, worker_idx = _address(os.environ[TRAINER]), own_key(os.environ), -1
    elif is_worker():
        (address, authkey), worker_idx = torchrun.look_up(timeout), torchrun.rank() - 1
    else:
        raise ValueError(f"where is the trainer? Start this under torchrun with a rank above 0, or set {TRAINER}")
    join(address, authkey, worker_idx, timeout)
    return 0


def own_key(env: Mapping[str, str]) -> bytes:
    """The key of ``WSYNC_AUTHKEY``.

    Raises:
        ValueError: there is none.
    """
    if not env.get(AUTHKEY):
        raise ValueError(f"set {AUTHKEY} to a secret of your own, the same for the trainer and its workers")
    return env[AUTHKEY].encode()


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{TRAINER} is host:port, not {text!r}")
    return host.strip("[]"), int(port)


def join(address: Address, authkey: bytes, worker_idx: int, timeout: float) -> None:
    """Join the trainer at ``address``, and serve it until it hangs up."""
    pair, name = secrets.token_bytes(16), f"(process {os.getpid()} on {socket.gethostname()})"
    deadline = time.monotonic() + timeout
    life = knock(address, authkey, Hello("life", pair, worker_idx, name), deadline)
    line = knock(address, authkey, Hello("line", pair, worker_idx, name), deadline)
    try:
        verdict, reason = line.recv()
    except (EOFError, OSError) as error:
        raise NotConnected(f"the trainer has gone, or has its workers already ({error})") from error
    if verdict == "refused":
        raise NotConnected(f"the trainer does not take this worker: {reason}")
    stop = end_with(life.fileno())
    try:
        serve(StreamLine(line))
    finally:
        stop()
        life.close()
