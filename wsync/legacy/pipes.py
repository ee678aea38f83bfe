"""The older API's pipes: one message through each has the sender's address. Plain JSON; nothing is executed.

The weights take the usual way. All else that goes through a pipe is the user's: what is sent before that message must
be received before it.
"""

from __future__ import annotations

import json
import select
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from wsync.control.auth import Address
from wsync.deadlines import deadline_in, milliseconds, wait_readable
from wsync.errors import NotConnected, SyncTimeout
from wsync.paths import RemoteWorker
from wsync.transport import SenderEnd, TransportBackend, weights_of

if TYPE_CHECKING:
    from wsync.scheme import WeightSyncScheme

_MARK = "wsync invitation"


@runtime_checkable
class PipesContext(Protocol):
    """A trainer's context that has a pipe to each worker."""

    pipes: Sequence[Connection]


class PipeTransport(SenderEnd):
    """The sender's way to the worker at the other end of a pipe (a ``TransportBackend``).

    Args:
        scheme: initialised by the first call, if it was not, as ``"policy"`` with all pipes that it was given.
        pipes: the pipes of the scheme, by worker; ``init_on_sender`` may change the list.
        pipe: the pipe to the worker; None for all workers.
    """

    def __init__(self, scheme: WeightSyncScheme, pipes: Sequence[Connection], pipe: Connection | None) -> None:
        self._scheme = scheme
        self._pipes = pipes
        self._pipe = pipe

    def send_weights(self, weights: Any = None, older_weights: Any = None) -> None:
        """Deliver ``weights`` (None: the model's), once all workers are connected.

        The older API's ``send_weights(model_id, weights)`` does the same.
        """
        self.setup_connection_and_weights_on_sender()
        self._scheme.send(weights_of(weights, older_weights, self._scheme.model_id), self._worker_ids)

    @property
    def _worker_ids(self) -> Sequence[int] | None:
        return None if self._pipe is None else [_index_of(self._pipe, self._pipes)]

    def send_weights_async(self, weights: Any = None, older_weights: Any = None) -> None:
        """Begin to deliver ``weights``, once all workers are connected; ``wait_ack`` waits."""
        self.setup_connection_and_weights_on_sender()
        self._scheme.send_async(weights_of(weights, older_weights, self._scheme.model_id), self._worker_ids)

    def wait_ack(self) -> None:
        """Wait until what ``send_weights_async`` has sent is installed; raises as ``wait_async``."""
        self._scheme.wait_async()

    def check_connection(self) -> bool:
        """Return whether all workers of the scheme are connected."""
        sender = self._scheme._sender
        return sender is not None and sender.connected

    def setup_connection_and_weights_on_sender(self) -> None:
        """Wait for every worker of the scheme, unless that has been done."""
        if self._scheme.model_id is None:
            self._scheme.init_on_sender(pipes=self._pipes)
        if not self._scheme.sender.connected:
            self._scheme.connect()


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
    if scheme.model_id is None and all(known is not given for known in pipes):
        pipes.append(given)
    _index_of(given, () if scheme.worker_idx is not None else pipes)
    return PipeTransport(scheme, pipes, None if scheme.binds else given)


def _index_of(pipe: Connection, pipes: Sequence[Connection]) -> int:
    for worker, known in enumerate(pipes):
        if known is pipe:
            return worker
    raise ValueError("this scheme was not given that pipe: give init_on_sender() all of them, pipes=[…]")


def pipes_of(context: Any, pipes: Sequence[Connection] | None) -> list[Connection]:
    """Return the pipes that ``init_on_sender`` was given, or that its context has."""
    if pipes is None and isinstance(context, PipesContext):
        found = context.pipes  # an attribute of this name may be something else
        pipes = found if isinstance(found, Sequence) and all(hasattr(pipe, "fileno") for pipe in found) else None
    return list(pipes or ())


def invite_all(scheme: WeightSyncScheme, pipes: Sequence[Connection]) -> None:
    """Tell every worker through its pipe where the sender is; a failure shuts the scheme down.

    Raises:
        NotConnected: a pipe is closed; names the worker.
        SyncTimeout: a pipe is full and is not read.
    """
    try:
        for worker, pipe in enumerate(pipes):
            _invite(pipe, str(scheme.model_id), worker, scheme._address, scheme.timeout)
    except Exception:
        scheme.shutdown()
        raise


def _invite(pipe: Connection, model_id: str, worker: int, address: Address, timeout: float | None) -> None:
    message = json.dumps([_MARK, model_id, worker, address.dump()])
    poller = select.poll()
    try:
        poller.register(pipe.fileno(), select.POLLOUT)
        ready = poller.poll(milliseconds(deadline_in(timeout)))
        if ready:
            pipe.send_bytes(message.encode())
    except OSError as error:
        raise NotConnected(f"worker {worker}: its pipe is closed, or cannot send ({error})") from error
    if not ready:
        raise SyncTimeout(f"worker {worker}: its pipe is full, and is not read", {worker: "does not read its pipe"})


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
