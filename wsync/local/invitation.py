"""What a sender says through a user's pipe: where it is, and which worker is at the other end. Plain JSON."""

from __future__ import annotations

import json
import select
from multiprocessing.connection import Connection

from wsync.deadlines import deadline_in, milliseconds
from wsync.errors import NotConnected, SyncTimeout
from wsync.local.rendezvous import Endpoint

_MARK = "wsync invitation"


def invite(pipe: Connection, model_id: str, worker: int, endpoint: Endpoint, timeout: float | None) -> None:
    """Say through ``pipe`` where the sender is, and which worker is at its other end.

    Raises:
        NotConnected: the pipe is closed, or is the end that cannot send.
        SyncTimeout: it was full for ``timeout`` seconds.
    """
    words = json.dumps([_MARK, model_id, worker, endpoint.address.hex(), endpoint.token.hex()])
    poller = select.poll()
    try:
        poller.register(pipe.fileno(), select.POLLOUT)
        ready = poller.poll(milliseconds(deadline_in(timeout)))
        if ready:
            pipe.send_bytes(words.encode())
    except OSError as error:
        raise NotConnected(f"worker {worker}: its pipe is closed, or does not send ({error})") from error
    if not ready:
        raise SyncTimeout(f"worker {worker}: its pipe is full, and nobody reads it", {worker: "does not read its pipe"})


def await_invitation(pipe: Connection, model_id: str, timeout: float | None) -> tuple[int, Endpoint]:
    """Which worker this is, and where the sender is, as ``pipe`` says. Nothing in it is executed.

    Raises:
        NotConnected: the pipe is closed, or is the end that cannot receive.
        SyncTimeout: nothing came for ``timeout`` seconds.
        ValueError: it says something else, or speaks of another model.
    """
    try:
        ready = pipe.poll(timeout)
        words = pipe.recv_bytes() if ready else b""
    except (EOFError, OSError) as error:
        raise NotConnected(f"'{model_id}': the sender has closed this pipe, or died ({error})") from error
    if not ready:
        raise SyncTimeout(f"'{model_id}': no invitation came within {timeout} s: call init_on_sender(pipes=[…]) first")
    try:
        mark, invited, worker, address, token = json.loads(words)
        if mark != _MARK or type(worker) is not int:
            raise ValueError("it is something else")
        endpoint = Endpoint(bytes.fromhex(address), bytes.fromhex(token))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"'{model_id}': a message of {len(words)} bytes came through this pipe that is not init_on_sender()'s: "
            "receive your own messages of before it before init_on_worker(), and send those of after it later"
        ) from error
    if invited != model_id:
        raise ValueError(
            f"the sender speaks of '{invited}' here, and this worker of '{model_id}': same order, both ends"
        )
    return worker, endpoint
