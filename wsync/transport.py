"""The interface of transports, which carry weights from a sender to a worker.

A custom backend is a class with the four methods of ``TransportBackend`` (a class that derives from it may leave out
the two set-up methods), and a scheme that returns it from ``create_transport``: see ``docs/backends.md``. The scheme
handles versions, acknowledgements, deadlines, deaths, restarts and all-or-nothing updates. A transport may have a
``close()``, which makes a call that blocks in another thread end. It is called when the worker has gone, at a deadline,
at shutdown, and after a set-up that failed.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import nn

from wsync.gate import process_gate
from wsync.weights.strategy import WeightStrategy

if TYPE_CHECKING:
    from wsync.scheme import WeightSyncScheme


@runtime_checkable
class TransportBackend(Protocol):
    """Moves the weights of one model between a sender and one worker.

    Under a scheme, ``create_transport(worker_idx)`` makes one at each end of each connection, and threads of the
    library call it, one call at a time. It stores no model and no strategy: the receiver's methods are given those to
    use. Under a scheme, ``model`` and the set-up's ``weights`` are None.
    """

    def setup_connection_and_weights_on_sender(self) -> None:
        """Set up the sender's end, before the first ``send_weights``. May wait for the worker's end.

        After an error the worker is disconnected, and the trainer raises ``WorkerFailed``.
        """

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """Set up the worker's end, before the first ``receive_weights``; errors as on the sender.

        Standalone, it may return the first weights, applied as there; under a scheme the result is ignored.
        """

    @abstractmethod
    def send_weights(self, weights: Any) -> None:
        """Send one version to the worker. May block until the worker receives.

        Not called for differences (``Delta``), nor for an update that a newer one replaces while it waits. If it has
        not returned at the deadline of a call that waits for the update, the worker is disconnected.

        Args:
            weights: in the scheme's format (``strategy``), the same object for all workers: views of the packed
                buffer, not to be written, unchanged until the call has returned. Standalone: any weights.

        A ConnectionError says that nothing can be sent to this worker any more: it is disconnected, and the trainer
        raises ``WorkerDied``. After any other error it stays connected, and the trainer raises ``WorkerFailed``.
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

        Under a scheme it is first called when the sender announces an update, while ``send_weights`` may still run. If
        it raises, or returns anything else (its checksum tells), it is called again when ``send_weights`` has returned,
        and as long as each call then returns other weights: a stream may have some of an update that failed. If such a
        call returns None or raises, or the deadline passes, the trainer raises ``WorkerFailed``.

        Args:
            timeout: seconds; None for no limit. Under a scheme with a timeout: what is left of 80 % of it.
            weights: a buffer like the argument of ``send_weights``; a transport may copy the received tensors into it
                and return it, or return tensors of its own.
            model: None under a scheme; otherwise the weights are applied to it, inside ``wsync.gate()``.
            strategy: how they are applied, and the format of the result.
        """
        ...


def apply_received(
    received: Any, weights: Any = None, model: nn.Module | None = None, strategy: WeightStrategy | None = None
) -> Any:
    """Apply received weights to ``weights`` and ``model``, if given, inside the gate; return them.

    For ``receive_weights`` of standalone transports. ``strategy``: the format; by default a TensorDict.
    """
    chosen = strategy or WeightStrategy()

    def apply() -> None:
        for destination in (weights, model):
            if destination is not None:
                chosen.apply_weights(destination, received)

    process_gate().call_without_forward(apply)
    return chosen.extract_weights(received)


def require_transport(made: object) -> TransportBackend:
    """Return ``made``; TypeError: it is no transport; names what it lacks."""
    if isinstance(made, TransportBackend):
        return made
    lacking = [name for name in vars(TransportBackend) if name[0] != "_" and not hasattr(made, name)]
    raise TypeError(f"create_transport() returned {made!r}, which lacks {', '.join(lacking)} of wsync.TransportBackend")


class SchemeTransport(TransportBackend):
    """One end of a scheme as a transport: what it sends and receives has the scheme's versions, answers and gate.

    The first call of a sender connects the scheme. ``worker_ids``: the sender's workers; None for all.
    """

    def __init__(self, scheme: WeightSyncScheme, worker_ids: Sequence[int] | None = None) -> None:
        self._scheme = scheme
        self._worker_ids = worker_ids

    @property
    def unique_weights(self) -> list[Any]:
        """The published buffers, as TensorDicts, each once; the user's own, where they were registered.

        A manual write into one is visible to bound parameters at once, without a version, at the user's own risk.
        """
        model_id, registered = self._scheme.model_id, self._scheme._registered
        if model_id in (None, *registered):
            return [own for name, own in registered.items() if model_id in (None, name)]
        buffers = self._scheme.sender.outlet.published()
        weights = [dict(zip(one.layout.names, one.views, strict=True)) for one in buffers]
        return [WeightStrategy().extract_weights(one) for one in weights]

    def setup_connection_and_weights_on_sender(self) -> None:
        self._scheme.create_sender().connect()

    def send_weights(self, weights: Any = None) -> None:
        self._scheme.create_sender().send(weights, self._worker_ids)

    def setup_connection_and_weights_on_receiver(self, *, worker_idx: int | None = None, **into: Any) -> Any | None:
        scheme = self._scheme
        if scheme.model_id is None:  # a pickled one, without init_on_receiver
            given = into.get("weights") if into.get("model") is None else into["model"]
            scheme.init_on_receiver(scheme._sender_model_id or "policy", model=given)
        scheme.connect(worker_idx=worker_idx)
        if not scheme.version:  # the first `send` defines the weights
            return self.receive_weights(scheme.timeout, **into)
        return process_gate().call_model(scheme.model, self._copy_to, (), into)

    def receive_weights(self, timeout: float | None = None, **into: Any) -> Any | None:
        if not self._scheme.sends_weights:
            return None
        return self._scheme._as_receiver("receive_weights").receive(timeout, partial(self._copy_to, **into))

    def _copy_to(
        self, weights: Any = None, model: nn.Module | None = None, strategy: WeightStrategy | None = None
    ) -> Any:
        """Apply the model's weights to other destinations; inside the gate, so that they are of one version."""
        receiver, own = self._scheme._as_receiver("receive_weights"), self._scheme.model
        if own is not None:  # else a function has loaded them
            for destination in (weights, model):
                if destination is not None and destination is not own:
                    (strategy or WeightStrategy()).apply_weights(destination, own)
        return receiver.weights() if own is None or strategy is None else strategy.extract_weights(own)


SharedMemTransport = DistributedTransport = RPCTransport = RayTransport = SchemeTransport  # by the documents' names
