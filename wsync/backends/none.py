"""No synchronization: the control, which shows what the other backends achieve."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from wsync.paths import CollectorContext, find_or_none
from wsync.scheme import WeightSyncScheme
from wsync.transport import TransportBackend
from wsync.weights.strategy import Format


class NoTransport(TransportBackend):
    """Carries nothing (a ``TransportBackend``)."""

    def send_weights(self, weights: Any = None, older_weights: Any = None) -> None:
        """Send nothing."""

    def send_weights_async(self, weights: Any = None, older_weights: Any = None) -> None:
        """Send nothing."""

    def wait_ack(self) -> None:
        """Return at once."""

    def check_connection(self) -> bool:
        """Return True: nothing has to be connected."""
        return True

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> None:
        """Return None at once: nothing ever arrives."""


class NoWeightSyncScheme(WeightSyncScheme):
    """Carries nothing: no call has an effect on another process, and workers keep the weights that they have.

    Args:
        strategy: the format in which weights are returned.
        sync, timeout, bind: accepted, as by every scheme; without effect.
    """

    name = "none"
    sends_weights = False
    collectors: ClassVar[tuple[str, ...]] = (
        *("multi_sync", "multi_async", "single", "distributed", "distributed_async"),
        *("rpc", "rpc_async", "ray", "ray_async"),
    )

    def __init__(
        self, strategy: Format = "tensordict", sync: bool = True, *, timeout: float | None = 60.0, bind: bool = True
    ) -> None:
        super().__init__(strategy, sync, timeout=timeout, bind=bind)
        self._workers = 0  # how many there are; 0 on a receiver
        self._source: Any = None  # what `weights` and `prepare_weights` read

    def create_transport(self, worker_idx: Any = None) -> NoTransport:
        """Return a transport that carries nothing."""
        return NoTransport()

    def init_on_sender(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        model: nn.Module | None = None,
        weights: Any = None,
        num_workers: int | None = None,
        **given: Any,
    ) -> None:
        """Keep the model, for the properties and ``apply_weights``; nothing else is set up.

        Args:
            model_id: the model's name, and its path in ``context``.
            context: any object.
            model: the model; by default the context's, if it has one.
            weights: instead of a model.
            num_workers: how many there are.
            given: other arguments of ``WeightSyncScheme.init_on_sender``, without effect.
        """
        workers = context.remote_workers if isinstance(context, CollectorContext) else ()
        self._keep(model_id, context, model, num_workers or len(workers) or 1, None)
        self._source = self._model if weights is None else weights

    def init_on_receiver(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        model: nn.Module | None = None,
        worker_idx: int | None = None,
        **given: Any,
    ) -> None:
        """Keep the model, for the properties and ``apply_weights``; nothing else is set up.

        Args:
            model_id: the model's name, and its path in ``context``.
            context: any object.
            model: the model; by default the context's, if it has one.
            worker_idx: this worker's index.
            given: other arguments of ``WeightSyncScheme.init_on_receiver``, without effect.
        """
        self._keep(model_id, context, model, 0, worker_idx)

    def init_in_process(self, model_id: str, model: nn.Module, source: Any = None) -> None:
        """Keep the model, for the properties and ``apply_weights``; ``source`` has no effect."""
        self._keep(model_id, None, model, 1, None)

    def init_on_worker(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        pipe: Any = None,
        model: nn.Module | None = None,
        worker_idx: int | None = None,
    ) -> None:
        """``init_on_receiver``; nothing is read from ``pipe``."""
        self.init_on_receiver(model_id, context, model=model, worker_idx=worker_idx)

    def _keep(self, model_id: str, context: Any, model: Any, workers: int, index: int | None) -> None:
        if model is None and context is not None:
            model = find_or_none(context, model_id)
        self._model_id, self._context, self._model, self._index = model_id, context, model, index
        self._workers, self._source = workers, model

    def get_sender(self) -> Any:
        """Return a sender that sends nothing."""
        return self.create_sender()

    def get_receiver(self) -> Any:
        """Return a receiver that receives nothing."""
        return self.create_receiver()

    def connect(self, *, worker_idx: int | None = None, weights: Any = None, processes: Any = None) -> None:
        """Return at once: there is nothing to connect."""
        if worker_idx is not None and not self._workers:
            self._index = worker_idx

    def disconnect(self, worker_idx: int) -> None:
        """Return at once."""

    def continue_from(self, version: int) -> None:
        """Return at once: no update has a number."""

    def pull(self, timeout: float | None = None) -> int:
        """Return 0 at once: there is never a version."""
        return 0

    def readmit(self, worker_idx: int, process: Any = None, timeout: float | None = None) -> None:
        """Return at once."""

    def send(self, weights: Any = None, worker_ids: Any = None, *, partial: bool = False) -> None:
        """Send nothing."""

    def send_async(self, weights: Any = None, worker_ids: Any = None) -> None:
        """Send nothing."""

    def wait_async(self) -> None:
        """Return at once."""

    def receive(self, timeout: float | None = None) -> None:
        """Return None at once: nothing ever arrives."""

    def prepare_weights(self, weights: Any, model_id: str, strategy: Any = None, context: Any = None) -> Any:
        """Return ``weights`` in the strategy's format."""
        return super().prepare_weights(self._source if weights is None else weights, model_id, strategy, context)

    def shutdown(self) -> None:
        """Forget the model."""
        super().shutdown()
        self._workers, self._source, self._index = 0, None, None

    @property
    def is_sender(self) -> bool:
        """Whether this end is the sender's."""
        return self._workers > 0

    @property
    def num_workers(self) -> int:
        """The number of workers; 0 on a receiver, and before init."""
        return self._workers

    @property
    def worker_idx(self) -> int | None:
        """This worker's index; None on the sender."""
        return self._index

    @property
    def weights(self) -> Any:
        """This end's weights, live."""
        return None if self._source is None else self.strategy.extract_weights(self._source)

    @property
    def sender_transports(self) -> dict[int, TransportBackend]:
        """On the sender, one for each worker, which carries nothing."""
        return {worker: NoTransport() for worker in range(self.num_workers)}

    @property
    def shared_transport(self) -> TransportBackend | None:
        """On the sender, one that carries nothing."""
        return NoTransport() if self._workers else None

    @property
    def receiver_transport(self) -> TransportBackend | None:
        """On a receiver, one that carries nothing."""
        return NoTransport() if self._model_id is not None and not self._workers else None
