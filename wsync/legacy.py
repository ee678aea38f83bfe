"""The older API: senders and receivers of their own, and pipes instead of a pickled scheme. A thin layer on schemes.

trainer   init_on_sender(pipes=[…]) ─→ get_sender() ─→ send ─→ (the first one: connect) ─→ scheme.send
worker    init_on_worker(pipe=…) ─→ (a thread: connect) ─→ get_receiver().receive ─→ scheme.receive

One message through each pipe has the sender's address, as plain JSON: nothing is executed. The weights take the usual
way. All else that goes through a pipe is the user's: what is sent before that message must be received before it.
"""

from __future__ import annotations

import json
import select
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from torch import nn

from wsync.control.auth import Address
from wsync.deadlines import deadline_in, readable
from wsync.errors import NotConnected, SyncTimeout
from wsync.paths import RemoteWorker, find_or_none
from wsync.transport import SchemeTransport, TransportBackend

if TYPE_CHECKING:
    from wsync.scheme import WeightSyncScheme
    from wsync.update import SyncReport

_shared = WeakValueDictionary[int, TransportBackend]()  # by the id of its scheme, which it refers to


class WeightSender:
    """Sends one model's weights to its workers; its methods are those of the scheme."""

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme

    def connect(self) -> None:
        """Wait for all workers, if that has not been done; pipes given to ``create_transport`` define the scheme."""
        if self._scheme.model_id is None and self._scheme._pipes:
            self._scheme.init_on_sender(pipes=self._scheme._pipes)
        if self._scheme._sender is None or not self._scheme._sender.connected:
            self._scheme.connect()

    def send(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> SyncReport | None:
        """As ``WeightSyncScheme.send``; the first one waits for every worker (SyncTimeout: names the absent ones)."""
        self.connect()
        return self._scheme.send(weights, worker_ids)

    def send_async(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        self.connect()
        self._scheme.send_async(weights, worker_ids)

    def wait_async(self) -> SyncReport | None:
        return self._scheme.wait_async()

    def register_worker(self, worker_idx: int, pipe_or_context: Any) -> None:
        self._scheme.create_transport(pipe_or_context)

    update_weights = send


class WeightReceiver:
    """Receives one model's weights in one worker."""

    def __init__(self, scheme: WeightSyncScheme) -> None:
        self._scheme = scheme
        self._model: nn.Module | None = None

    def register_model(self, model: nn.Module) -> None:
        self._model = model

    def register_worker_transport(self, pipe: Any) -> None:
        self._scheme.init_on_worker(pipe=pipe, model=self._model)

    def apply_weights(self, weights: Any) -> None:
        self._scheme.apply_weights(weights)

    def receive(self, timeout: float | None = None) -> bool:
        """Wait at most ``timeout`` seconds for weights newer than those of the last call; return whether there are any.

        They are installed as they arrive, also without this call. NotConnected: the sender has shut down.
        """
        scheme = self._scheme
        if not scheme.sends_weights:
            return False
        received = scheme.receive(timeout)
        if received is None and scheme.finished:
            raise NotConnected("the sender has shut down: there will be no more weights")
        return received is not None


# --- methods of a scheme ---


def init_on_worker(
    scheme: WeightSyncScheme,
    model_id: str = "policy",
    context: Any = None,
    *,
    pipe: Any = None,
    model: nn.Module | None = None,
    worker_idx: int | None = None,
) -> None:
    """Set up and begin to connect a worker, without waiting for the sender. ``connect`` need not be called.

    ``pipe`` is the other end of one that ``init_on_sender`` was given, and brings the sender's address and this
    worker's index; without it the scheme is the sender's, pickled, and needs ``worker_idx``. ``context`` has the model
    (at the path ``model_id``, or as ``model``), and may have ``worker_idx`` and ``pipe``.

    NotConnected, SyncTimeout: the sender is gone, or has not called ``init_on_sender`` in time. ValueError: no index;
    or something else came through the pipe. It raises what ``init_on_receiver`` raises.
    """
    pipe = getattr(context, "pipe", None) if pipe is None else pipe
    if pipe is not None:
        if not scheme._inherited:  # a forked worker has the trainer's end, too
            scheme._require_uninitialised()
        invited, scheme._address = _read_invitation(pipe, model_id, scheme.timeout)
        if worker_idx not in (None, invited):
            raise ValueError(f"which worker is this? worker_idx: {worker_idx}, pipe: {invited}")
        worker_idx = invited
    worker_idx = getattr(context, "worker_idx", None) if worker_idx is None else worker_idx
    if worker_idx is None:
        raise ValueError("which worker is this? give init_on_worker() a worker_idx, or a context that has it")
    if model is None and context is not None:
        model = find_or_none(context, model_id) or getattr(context, "model", None)
    scheme.init_on_receiver(model_id, context, model=model, worker_idx=worker_idx)
    scheme.connect(wait=False)


def transport_to(scheme: WeightSyncScheme, given: object) -> TransportBackend:
    """Return the scheme's own way to a worker, or to all of them: one object for all where they share one memory.

    ``given`` is the worker's index; a pipe to it; the worker (``RemoteWorker``); or None or a context, which mean all
    workers. Before ``init_on_sender``, the pipe, or those of the context, are added to the scheme's.
    """
    pipes = [given] if isinstance(given, Connection) else getattr(given, "pipes", None) or ()
    for pipe in [pipe for pipe in pipes if isinstance(pipe, Connection) and pipe not in scheme._pipes]:
        if scheme.model_id is not None:
            raise ValueError("this scheme was not given that pipe: give init_on_sender() all of them, pipes=[…]")
        scheme._pipes.append(pipe)
    if isinstance(given, Connection):
        given = scheme._pipes.index(given)
    elif isinstance(given, RemoteWorker):
        given = given.worker_idx
    if not scheme.binds:
        return SchemeTransport(scheme, [given] if isinstance(given, int) else None)
    return _shared.setdefault(id(scheme), SchemeTransport(scheme))


# --- pipes ---


def pipes_of(scheme: WeightSyncScheme, context: Any, given: Sequence[Connection] | None) -> list[Connection]:
    """Return the pipes that ``init_on_sender`` was given, or that its context has as ``pipes``."""
    found = getattr(context, "pipes", ()) if given is None else given
    are_pipes = isinstance(found, Sequence) and all(isinstance(pipe, Connection) for pipe in found)
    if given is not None and not are_pipes:
        raise TypeError(f"pipes is a list of multiprocessing connections, one for each worker, not {given!r}")
    pipes = [*found] if are_pipes else []  # an attribute of a context with this name may be something else
    if scheme._pipes and pipes != scheme._pipes:
        raise ValueError("give init_on_sender() the pipes that create_transport() was given, in this order")
    return pipes


def invite_all(scheme: WeightSyncScheme) -> None:
    """Tell every worker through its pipe where the sender is.

    NotConnected, SyncTimeout: a pipe is closed, or full and not read; names the worker.
    """
    for worker, pipe in enumerate(scheme._pipes):
        try:
            if readable([pipe.fileno()], deadline_in(scheme.timeout), select.POLLOUT):
                pipe.send_bytes(json.dumps([scheme.model_id, worker, scheme._address.dump()]).encode())
                continue
        except OSError as error:
            raise NotConnected(f"worker {worker}: its pipe is closed, or cannot send ({error})") from error
        raise SyncTimeout(f"worker {worker}: its pipe is full, and is not read", {worker: "does not read its pipe"})


def _read_invitation(pipe: Connection, model_id: str, timeout: float | None) -> tuple[int, Address]:
    """Return this worker's index and the sender's address, as the sender has sent them through ``pipe``."""
    try:
        ready = readable([pipe.fileno()], deadline_in(timeout))
        message = pipe.recv_bytes() if ready else b""
    except (EOFError, OSError) as error:
        raise NotConnected(f"'{model_id}': the sender has closed this pipe, or died ({error})") from error
    if not ready:
        raise SyncTimeout(f"'{model_id}': no invitation came within {timeout} s: call init_on_sender(pipes=[…]) first")
    try:
        invited, worker, address = json.loads(message)
        found = Address.load(address)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"'{model_id}': another message than init_on_sender()'s came through this pipe: receive your own earlier "
            "messages before init_on_worker(), and send later ones after it"
        ) from error
    if invited != model_id:
        raise ValueError(
            f"the sender's message is about '{invited}', this worker about '{model_id}': use one order at both ends"
        )
    return worker, found
