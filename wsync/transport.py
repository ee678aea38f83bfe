"""The interfaces of transports, which carry weights from a sender to a worker. ``TransportBackend`` is TorchRL's name.

A custom backend is a class with the four methods of ``TransportBackend`` (a class that derives from it may leave out
the two set-up methods), and a scheme that returns it from ``create_transport``::

    class MyScheme(WeightSyncScheme):
        name = "mine"

        def create_transport(self, worker_idx=None):
            return MyTransport(self.folder, worker_idx)

The scheme handles versions, acknowledgements, deadlines, deaths, restarts and all-or-nothing updates. A
``TransportBackend`` with resources to release has a method ``close`` as well (``Closable``).

A ``FlatTransport`` is for a medium that sends one tensor asynchronously, such as a process group. It takes the place of
a ``TransportBackend``: instead of a TensorDict or state dict it is given the flat buffer into which all weights are
packed, one ``uint8`` tensor. Which of these protocols a transport implements is tested with ``isinstance``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from wsync.gate import process_gate, without_forward
from wsync.weights.strategy import WeightStrategy


@runtime_checkable
class TransportBackend(Protocol):
    """Moves the weights of one model between a sender and one worker.

    ``scheme.create_transport(worker_idx)`` makes one at each end, for each connection of a worker that does not use
    shared memory. It is called by the thread in ``connect`` or ``readmit``; after ``init_on_worker`` (the older API,
    which connects in the background), by the receiver thread.

    A transport stores no model and no strategy: the receiver's methods are given those to use. Standalone (without a
    scheme) a caller may give both. Under a scheme, ``model`` and the set-up's ``weights`` are always None.
    """

    def setup_connection_and_weights_on_sender(self) -> None:
        """Set up the sender's end.

        Called once per connection, before any ``send_weights``, in a dedicated thread of the trainer (another thread
        calls ``send_weights``). May wait for the worker's end, which is set up at the same time. If the call has not
        returned by the deadline of ``connect``, or the worker dies before that, ``close()`` is called, if there is one.

        After an Exception the worker is disconnected; ``connect`` or ``readmit`` in the trainer raises ``SyncTimeout``
        (if it is one), ``WorkerDied`` (if it is a ``NotConnected``) or ``WorkerFailed``. In a ``readmit`` of another
        worker, the error is only logged.
        """

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """Set up the worker's end.

        Called once per connection, before any ``receive_weights``, in a dedicated thread of the worker (another thread
        calls ``receive_weights``). Under a scheme the result is ignored, and the first weights arrive by
        ``receive_weights`` like all others. A standalone transport may deliver the first weights here. May raise
        anything: ``connect`` in the worker raises ``NotConnected`` with that error, or a ``WeightSyncError`` unchanged.

        Args:
            worker_idx: the worker's index.
            weights: a buffer (TensorDict or state dict) for the first weights.
            model: the model to which the first weights are applied.
            strategy: how they are applied, and the format of the result.

        Returns:
            The first weights, or None.
        """

    @abstractmethod
    def send_weights(self, weights: Any) -> None:
        """Send one version to the worker.

        Each worker has one thread in the trainer that makes these calls, one at a time, once for each update that is
        not sent as a difference (``Delta``). An update that is replaced by a newer one while it waits is never sent.
        May block until the worker receives. If a call of the scheme waits for the update, and this method has not
        returned by that call's deadline, ``close()`` is called, if there is one, and the worker is disconnected.

        Raise ``ConnectionError`` (such as ``BrokenPipeError``) if nothing can be sent to this worker any more: it is
        then disconnected, and named in a ``WorkerDied`` in the trainer. After any other error the worker stays
        connected, and the trainer raises ``WorkerFailed``, or ``WorkerDied`` if the worker is found to have died.

        Args:
            weights: in the scheme's format (``strategy``): its leaves are views of the packed buffer, which stays
                unchanged until the call has returned. They must not be written. The transports of all workers that are
                sent the same update are given the same object. Standalone: a module, a TensorDict or a state dict.
        """
        ...

    @abstractmethod
    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """Return the next version, or None if none arrived within ``timeout`` seconds.

        Under a scheme it is called by the thread that reads the sender's messages: the receiver thread, or the thread
        in ``connect`` for the first weights. While it waits, that thread serves no other model of the process, and
        notices no death: a call that waits has to raise when the other end has gone.

        The medium may deliver an older version first (a stream, after a receive that timed out): the scheme compares
        each result with the update's checksum. For each update (unless a call for an earlier one returned its weights):

        1. The first call comes when the sender announces the update; ``send_weights`` may still run. If it returns the
           update's weights, no other call follows.
        2. Otherwise (it returned None or older weights, or raised), the second call comes when ``send_weights`` has
           returned. While calls return older weights, more follow, up to the ninth.
        3. If one of calls 2 to 9 returns None or raises, or all return older weights, the trainer raises
           ``WorkerFailed``.

        Args:
            timeout: seconds; None for no limit. Under a scheme with a timeout: 80 % of the scheme's timeout, less the
                time since the announcement; never less than 10 % of the scheme's timeout.
            weights: a buffer in the strategy's format, with the layout of the argument of ``send_weights``; a
                transport may copy the received tensors into it and return it, or return tensors of its own.
            model: None under a scheme; otherwise the weights are applied to it, inside ``wsync.gate()``.
            strategy: how they are applied, and the format of the result.
        """
        ...


@runtime_checkable
class Closable(Protocol):
    """A ``TransportBackend`` that has resources to release; ``FlatTransport`` has a ``close`` of its own."""

    def close(self) -> None:
        """Release the resources, and make a call that blocks in another thread return or raise.

        Called when the worker has gone, at a deadline, at shutdown, and after a set-up that failed: by any thread of
        the scheme, more than once, and also while another thread is inside another method; not in a forked child.
        """
        ...


class Transfer(Protocol):
    """The handle of an asynchronous transfer that is in progress (``torch.distributed.Work``)."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Return when the transfer is complete; raises RuntimeError if it failed, or at the timeout.

        Called in the worker, once, with the scheme's timeout, by the thread that reads the sender's messages; the
        result is not used. The sender does not call it: the worker's answer shows that the transfer is complete.
        """
        ...


@runtime_checkable
class FlatTransport(Protocol):
    """A transport that moves the flat buffer of packed weights as one asynchronous message, such as a process group.

    It needs no methods of ``TransportBackend``, except for standalone use (without a scheme).

    Attributes (set by the constructor):
        device: the device on which the packed buffers have to be.
        receives_ahead: whether a worker calls ``begin_receive`` before the sender announces a version: directly after
            each answer (installed, checked or failed) of the worker, and for the first version after it got the layout.
        inline_bytes: updates with at most this many bytes of weights and extra state (or what the empty socket can
            take, if that is less) travel in the message that announces them, and are not given to ``begin_send``,
            except in a transaction. The sender's value is used; it must be 0 if ``device`` is a GPU.
    """

    device: torch.device
    receives_ahead: bool
    inline_bytes: int

    def connect(self, store: Store, rank: int, connection_number: int, host: str, deadline: float | None) -> None:
        """Connect this end to the other end.

        Called once per connection at each end, in a thread for this call only. Both calls run at the same time. If one
        end fails (an error, the deadline, the death of the peer), ``get`` and ``wait`` of ``store`` then raise at both.
        Whatever else this method waits for has to end by ``deadline``. After a failure, ``close`` is called.

        Args:
            store: a ``torch.distributed`` store that only these two processes use, for as long as this call runs at
                both ends. Its messages go over their authenticated control connection.
            rank: 0 on the sender, 1 in the worker.
            connection_number: 1 for the first connection with this worker's index, more for each later one.
            host: the address of this end by which the other end reaches it.
            deadline: on ``time.monotonic``'s clock. It is one second later than the deadline of the scheme, so that the
                thread in ``scheme.connect``, which waits for this call, reports the timeout first; ten minutes, if the
                scheme has no deadline.

        Raises:
            RuntimeError: the connection could not be made.
        """
        ...

    def begin_send(self, flat: Tensor, transfers: list[Transfer]) -> None:
        """Begin to send, and append the transfer to ``transfers``.

        One call at a time, usually by the thread that has called the scheme. If the update had to wait for the
        worker's answer to an earlier one, by the thread that reads that answer (in a scheme's method or the send loop).

        Args:
            flat: ``uint8[nbytes]``; unchanged until the worker has answered.
            transfers: an empty list. A signal handler (Ctrl-C) may raise between two calls: a transfer that
                was started but not appended would be started again. So do both in one call into C, such as
                ``transfers.extend(map(group.send, [[flat]], [rank], [tag]))``.

        Raises:
            RuntimeError: the connection has broken: the scheme then treats the worker as dead.
        """
        ...

    def begin_receive(self, flat: Tensor, transfers: list[Transfer]) -> None:
        """Begin to receive into ``flat``, and append the transfer to ``transfers``, like ``begin_send``.

        Called by the receiver thread or the thread in ``connect``. With ``receives_ahead`` also by the thread that has
        just acknowledged a version, such as one that begins a forward: inside the gate, so it must not wait.

        Raises:
            RuntimeError: the connection has broken.
        """
        ...

    def close(self, pending: Transfer | None = None) -> bool:
        """Release the connection, or what a ``connect`` that failed has left.

        Called once for each transport, after ``connect`` has returned or raised: when the worker has gone, at shutdown,
        and if the set-up failed at either end. If the set-up failed while ``connect`` was running, the thread that ran
        ``connect`` calls this, otherwise any thread. It must work even if ``connect`` has failed early, or was never
        called because no thread could be started.

        Args:
            pending: a transfer that has not been completed.

        Returns:
            If True, the peer may still read or write the buffer of ``pending``: the caller must never reuse it.
        """
        ...


class SenderEnd:
    """Base class of a transport that only sends: its receiver methods raise an error.

    Attributes:
        receive_hint: the end of the error message: where to receive instead.
    """

    receive_hint = "in the worker, by its scheme"

    def receive_weights(self, timeout: float | None = None, **_: Any) -> NoReturn:
        """Raise RuntimeError: this is the sender's end."""
        raise RuntimeError(f"this is the sender's end: receive {self.receive_hint}")

    def setup_connection_and_weights_on_receiver(self, **_: Any) -> NoReturn:
        """Raise RuntimeError: this is the sender's end."""
        raise RuntimeError(f"this is the sender's end: connect {self.receive_hint}")


def apply_received(received: Any, weights: Any, model: nn.Module | None, strategy: WeightStrategy | None) -> Any:
    """Apply received weights to ``weights`` and ``model``, if given, inside the gate. For ``receive_weights``.

    Returns:
        The received weights, in the format of ``strategy``; a TensorDict if ``strategy`` is None.
    """
    chosen = strategy or WeightStrategy()
    with without_forward(), process_gate().hold():
        for destination in (weights, model):
            if destination is not None:
                chosen.apply_weights(destination, received)
    return chosen.extract_weights(received)


def require_transport(made: object) -> TransportBackend | FlatTransport:
    """Return what ``create_transport`` has returned.

    Raises:
        TypeError: it is no transport; names what it lacks.
    """
    if isinstance(made, (TransportBackend, FlatTransport)):
        return made
    kind = FlatTransport if hasattr(made, "begin_send") else TransportBackend
    needed = [name for name in (*kind.__annotations__, *vars(kind)) if name[0] != "_"]
    what = ", ".join(name for name in needed if not hasattr(made, name))
    hint = "" if kind is FlatTransport else " (a class without the worker's methods derives from wsync.SenderEnd)"
    raise TypeError(f"create_transport() returned {made!r}, which lacks {what} of wsync.{kind.__name__}{hint}")


TransportFactory = Callable[[int], TransportBackend | FlatTransport]
"""``scheme.create_transport``, called with the worker's index."""
