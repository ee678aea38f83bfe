"""The interface of transports, which carry weights from a sender to a worker. ``TransportBackend`` is TorchRL's name.

A custom backend is a class with the four methods of ``TransportBackend`` (a class that derives from it may leave out
the two set-up methods), and a scheme that returns it from ``create_transport``::

    class MyScheme(WeightSyncScheme):
        name = "mine"

        def create_transport(self, worker_idx=None):
            return MyTransport(self.folder, worker_idx)

The scheme handles versions, acknowledgements, deadlines, deaths, restarts and all-or-nothing updates. A transport with
resources to release has a method ``close`` as well (``Closable``).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NoReturn, Protocol, runtime_checkable

from torch import nn

from wsync.gate import process_gate, without_forward
from wsync.weights.strategy import WeightStrategy


@runtime_checkable
class TransportBackend(Protocol):
    """Moves the weights of one model between a sender and one worker.

    ``scheme.create_transport(worker_idx)`` makes one at each end, for each connection of a worker that does not use
    shared memory.

    A transport stores no model and no strategy: the receiver's methods are given those to use. Standalone (without a
    scheme) a caller may give both. Under a scheme, ``model`` and the set-up's ``weights`` are always None.
    """

    def setup_connection_and_weights_on_sender(self) -> None:
        """Set up the sender's end.

        Called once per connection, before the first ``send_weights``, in a thread of its own. May wait for the worker's
        end, which is set up at the same time. ``close()``, if there is one, is called at the deadline of the call that
        waits for the update, and when the worker dies.

        After an Exception the worker is disconnected. A call that waits for the update raises ``WorkerFailed``.
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

        Called once per connection, before the first ``receive_weights``, in a thread of its own. Under a scheme the
        result is ignored, and the first weights arrive by ``receive_weights`` like all others. A standalone transport
        may deliver the first weights here. After an Exception the worker is disconnected, and the trainer is told it.

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

        Each connection has one thread in the trainer that makes these calls, one at a time, once for each update that
        is not sent as a difference (``Delta``). An update that is replaced by a newer one while it waits is never sent.
        May block until the worker receives. If this method has not returned at the deadline of a call that waits for
        the update, ``close()`` is called, if there is one, and the worker is disconnected.

        Raise ``ConnectionError`` (such as ``BrokenPipeError``) if nothing can be sent to this worker any more: it is
        then disconnected, and named in a ``WorkerDied`` in the trainer. After any other error the worker stays
        connected, and the trainer raises ``WorkerFailed``.

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

        Under a scheme each connection has one thread in the worker that makes these calls, one at a time. The scheme
        compares each result with the update's checksum:

        1. The first call comes when the sender announces an update; ``send_weights`` may still run. If it returns the
           update's weights, no other call follows.
        2. Otherwise (it returned None or older weights, or raised), the method is called again when ``send_weights``
           has returned, until the deadline. Older weights are skipped, as a stream may have some of an update that
           failed. None before the deadline is waited for again by the next call.
        3. If a call of step 2 raises, or the deadline passes, the trainer raises ``WorkerFailed``.

        Args:
            timeout: seconds; None for no limit. Under a scheme with a timeout: what is left of 80 % of it.
            weights: a buffer in the strategy's format, with the layout of the argument of ``send_weights``; a
                transport may copy the received tensors into it and return it, or return tensors of its own.
            model: None under a scheme; otherwise the weights are applied to it, inside ``wsync.gate()``.
            strategy: how they are applied, and the format of the result.
        """
        ...


@runtime_checkable
class Closable(Protocol):
    """A ``TransportBackend`` that has resources to release."""

    def close(self) -> None:
        """Release the resources, and make a call that blocks in another thread return or raise.

        Called when the worker has gone, at a deadline, at shutdown, and after a set-up that failed: by a thread of its
        own, also while another thread is inside another method; not in a forked child.
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


def weights_of(first: Any, second: Any, model_id: str | None = None) -> Any:
    """Return the weights in ``send_weights(weights)`` or, of the older API, ``send_weights(model_id, weights)``.

    Args:
        first: the first argument.
        second: the second one; None if there is none.
        model_id: the model id of the transport's model, where it is known.

    Raises:
        TypeError: two arguments, and the first is no name.
        ValueError: the name is another model's.
    """
    if not isinstance(first, str):
        if second is not None:
            raise TypeError(
                f"send_weights(weights) or send_weights(model_id, weights), not ({type(first).__name__}, …)"
            )
        return first
    if model_id is not None and first != model_id:
        raise ValueError(f"this transport carries the model '{model_id}', not '{first}'")
    return second


def require_transport(made: object) -> TransportBackend:
    """Return what ``create_transport`` has returned.

    Raises:
        TypeError: it is no transport; names what it lacks.
    """
    if isinstance(made, TransportBackend):
        return made
    lacking = [name for name in vars(TransportBackend) if name[0] != "_" and not hasattr(made, name)]
    raise TypeError(
        f"create_transport() returned {made!r}, which lacks {', '.join(lacking)} of wsync.TransportBackend "
        "(a class without the worker's methods derives from wsync.SenderEnd)"
    )
