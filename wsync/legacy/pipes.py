"""The older API's pipes: one message through each has the sender's address. Plain JSON; nothing is executed.

The weights take the usual way. All else that goes through a pipe is the user's: what is sent before that message must
be received before it.
"""

from __future__ import annotations

import json
import select
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from wsync.control.auth import Address
from wsync.deadlines import deadline_in, milliseconds, wait_readable
from wsync.errors import NotConnected, SyncTimeout
from wsync.paths import RemoteWorker
from wsync.scheme_transports import SenderTransport
from wsync.transport import TransportBackend

if TYPE_CHECKING:
    from wsync.scheme import WeightSyncScheme

_MARK = "wsync invitation"


class PipeTransport(SenderTransport):
    """The sender's way to the worker at the other end of a pipe (a ``TransportBackend``).

    The first call initialises the scheme, if it was not, as ``"policy"`` with all pipes that it was given.

    Args:
        scheme: the sender's.
        pipes: the pipes of the scheme, by worker; ``init_on_sender`` may change the list.
        pipe: the pipe to the worker; None for all workers.
    """

    def __init__(self, scheme: WeightSyncScheme, pipes: Sequence[Connection], pipe: Connection | None) -> None:
        super().__init__(scheme)
        self._pipes = pipes
        self._pipe = pipe

    def setup_connection_and_weights_on_sender(self) -> None:
        """Wait for every worker of the scheme, unless that has been done."""
        if self._scheme.model_id is None:
            self._scheme.init_on_sender(pipes=self._pipes)
        self._worker_ids = None if self._pipe is None else [_index_of(self._pipe, self._pipes)]
        super().setup_connection_and_weights_on_sender()


def older_transport(scheme: WeightSyncScheme, pipes: list[Connection], given: object) -> TransportBackend | None:
    """Return what the older API's ``create_transport(pipe_or_context)`` returned; None if it was not meant.

    Args:
        scheme: the scheme of the sender.
        pipes: those that the scheme was given; a new one is added before ``init_on_sender``.
        given: a pipe to one worker, a worker (``RemoteWorker``), or a context, which means all workers.

    Raises:
        ValueError: a pipe, but the scheme is initialised without it.
    """
    if given is None or isinstance(given, int):
        return None
    if isinstance(given, RemoteWorker):
        return scheme.sender_transports[given.worker_idx]
    if not isinstance(given, Connection):
        return scheme.shared_transport
    if scheme.model_id is None and given not in pipes:
        pipes.append(given)
    _index_of(given, pipes)
    return PipeTransport(scheme, pipes, None if scheme.binds else given)


def _index_of(pipe: Connection, pipes: Sequence[Connection]) -> int:
    if pipe not in pipes:
        raise ValueError("this scheme was not given that pipe: give init_on_sender() all of them, pipes=[…]")
    return pipes.index(pipe)


def pipes_of(context: Any, pipes: Sequence[Connection] | None) -> list[Connection]:
    """Return the pipes that ``init_on_sender`` was given, or that its context has as ``pipes``."""
    found = getattr(context, "pipes", ()) if pipes is None else pipes
    # an attribute of this name may be something else
    return [*found] if isinstance(found, Sequence) and all(hasattr(pipe, "fileno") for pipe in found) else []


def invite_all(scheme: WeightSyncScheme, pipes: Sequence[Connection]) -> None:
    """Tell every worker through its pipe where the sender is; a failure shuts the scheme down.

    Raises:
        NotConnected: a pipe is closed; names the worker.
        SyncTimeout: a pipe is full and is not read.
    """
    try:
        for worker, pipe in enumerate(pipes):
            _invite(pipe, str(scheme.model_id), worker, scheme._address, scheme.timeout)
    except Exception:  # of any class: it is raised again
        scheme.shutdown()
        raise


def _invite(pipe: Connection, model_id: str, worker: int, address: Address, timeout: float | None) -> None:
    poller = select.poll()
    try:
        poller.register(pipe.fileno(), select.POLLOUT)
        if not poller.poll(milliseconds(deadline_in(timeout))):
            raise SyncTimeout(f"worker {worker}: its pipe is full, and is not read", {worker: "does not read its pipe"})
        pipe.send_bytes(json.dumps([_MARK, model_id, worker, address.dump()]).encode())
    except OSError as error:
        if isinstance(error, SyncTimeout):
            raise
        raise NotConnected(f"worker {worker}: its pipe is closed, or cannot send ({error})") from error


def read_invitation(pipe: Connection, model_id: str, timeout: float | None) -> tuple[int, Address]:
    """Return this worker's index and the sender's address, as the sender has sent them through ``pipe``.

    Raises:
        NotConnected: the pipe is closed, or cannot receive.
        SyncTimeout: nothing came for ``timeout`` seconds.
        ValueError: another message came, or one about another model.
    """
    try:
        ready = bool(wait_readable([pipe.fileno()], deadline_in(timeout)))
        message = pipe.recv_bytes() if ready else b""
    except (EOFError, OSError) as error:
        raise NotConnected(f"'{model_id}': the sender has closed this pipe, or died ({error})") from error
    if not ready:
        raise SyncTimeout(f"'{model_id}': no invitation came within {timeout} s: call init_on_sender(pipes=[…]) first")
    try:
        mark, invited, worker, address = json.loads(message)
        if mark != _MARK or type(worker) is not int:
            raise ValueError("another message")
        found = Address.load(address)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"'{model_id}': a message of {len(message)} bytes came through this pipe that is not init_on_sender()'s: "
            "receive your own earlier messages before init_on_worker(), and send later ones after it"
        ) from error
    if invited != model_id:
        raise ValueError(
            f"the sender's message is about '{invited}', this worker about '{model_id}': use one order at both ends"
        )
    return worker, found
