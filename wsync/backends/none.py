"""No synchronization: the control, which shows what the other backends achieve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from wsync.control.processes import Process, Processes
from wsync.paths import find_or_none
from wsync.roles import Role
from wsync.scheme import WeightSyncScheme
from wsync.transport import TransportBackend
from wsync.types import CollectorContext
from wsync.weights.strategy import Format, WeightStrategy


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


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleRole(Role):
    """Either end of a scheme that carries nothing.

    Attributes:
        source: what ``prepare_weights`` and ``weights`` read: a model, weights or None.
        worker_idx: the worker's index, on a receiver.
        num_workers: the number of workers, on the sender.
    """

    source: Any = None
    worker_idx: int | None = None  # pyright: ignore[reportIncompatibleMethodOverride]
    num_workers: int = 0  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def inherited(self) -> bool:
        """Return False: a forked child may use all that there is."""
        return False

    def source_weights(self) -> Any:
        """See ``Role``."""
        return self.source

    def weights(self, strategy: WeightStrategy) -> Any:
        """See ``Role``."""
        return None if self.source is None else strategy.extract_weights(self.source)


class NoWeightSyncScheme(WeightSyncScheme):
    """Carries nothing: no call has an effect on another process, and workers keep the weights that they have.

    Args:
        strategy: the format in which weights are returned.
        sync, timeout, bind: accepted, as by every scheme; without effect.
    """

    name = "none"
    sends_weights = False
    collectors: ClassVar[tuple[str, ...]] = (
        "multi_sync",
        "multi_async",
        "single",
        "distributed",
        "distributed_async",
        "rpc",
        "rpc_async",
        "ray",
        "ray_async",
    )

    def __init__(
        self, strategy: Format = "tensordict", sync: bool = True, *, timeout: float | None = 60.0, bind: bool = True
    ) -> None:
        super().__init__(strategy, sync, timeout=timeout, bind=bind)

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
        if model is None and context is not None:
            model = find_or_none(context, model_id)
        workers = context.remote_workers if isinstance(context, CollectorContext) else ()
        self._role = IdleRole(
            side="sender",
            model_id=model_id,
            context=context,
            model=model,
            source=model if weights is None else weights,
            num_workers=num_workers or len(workers) or 1,
        )

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
        if model is None and context is not None:
            model = find_or_none(context, model_id)
        self._role = IdleRole(
            side="receiver", model_id=model_id, context=context, model=model, source=model, worker_idx=worker_idx
        )

    def init_in_process(self, model_id: str, model: nn.Module, source: Any = None) -> None:
        """Keep the model, for the properties and ``apply_weights``; ``source`` has no effect."""
        self._role = IdleRole(side="sender", model_id=model_id, model=model, source=model, num_workers=1)

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

    def get_sender(self) -> Any:
        """Return a sender that sends nothing."""
        return self.create_sender()

    def get_receiver(self) -> Any:
        """Return a receiver that receives nothing."""
        return self.create_receiver()

    def connect(
        self, *, worker_idx: int | None = None, weights: Any = None, processes: Processes | None = None
    ) -> None:
        """Return at once: there is nothing to connect."""
        if worker_idx is not None and self._is("receiver"):
            self._role = replace(self._role, worker_idx=worker_idx)

    def disconnect(self, worker_idx: int) -> None:
        """Return at once."""

    def continue_from(self, version: int) -> None:
        """Return at once: no update has a number."""

    def pull(self, timeout: float | None = None) -> int:
        """Return 0 at once: there is never a version."""
        return 0

    def readmit(self, worker_idx: int, process: Process | None = None, timeout: float | None = None) -> None:
        """Return at once."""

    def send(
        self, weights: Any = None, worker_ids: int | Sequence[int] | None = None, *, partial: bool = False
    ) -> None:
        """Send nothing."""

    def send_async(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Send nothing."""

    def wait_async(self) -> None:
        """Return at once."""

    def receive(self, timeout: float | None = None) -> None:
        """Return None at once: nothing ever arrives."""

    @property
    def sender_transports(self) -> dict[int, TransportBackend]:
        """See ``WeightSyncScheme``: transports that carry nothing."""
        return {worker: NoTransport() for worker in range(self.num_workers)}

    @property
    def shared_transport(self) -> TransportBackend | None:
        """See ``WeightSyncScheme``: one that carries nothing."""
        return NoTransport() if self._is("sender") else None

    @property
    def receiver_transport(self) -> TransportBackend | None:
        """See ``WeightSyncScheme``: one that carries nothing."""
        return NoTransport() if self._is("receiver") else None

    def _is(self, side: str) -> bool:
        return isinstance(self._role, IdleRole) and self._role.side == side
