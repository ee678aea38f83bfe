"""How a scheme is set up, on either end: its options, and which role it takes. Nothing is sent here."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from wsync.counting import agreed_count
from wsync.in_process import InProcessLine
from wsync.leaving import close_at_exit
from wsync.metrics import SyncMetrics
from wsync.paths import find_model, find_or_none
from wsync.receiving.end import ReceiverEnd
from wsync.receiving.receiver import Receiver
from wsync.roles import SchemeView, Trainer, Worker
from wsync.sending.end import SenderEnd
from wsync.sending.sender import Sender
from wsync.sending.source import DeviceMap, Source
from wsync.types import CascadingContext, CollectorContext
from wsync.weights.strategy import Format, WeightStrategy


class SchemeSetup(SchemeView):
    """What is decided before anything is sent. See ``WeightSyncScheme`` for the options."""

    name: ClassVar[str]
    carries: ClassVar[bool] = True  # something; otherwise there is nobody to meet, and nothing to stage
    delivers_at_connect: ClassVar[bool] = True  # the first weights; otherwise with the first send

    def __init__(
        self, strategy: Format = "tensordict", sync: bool = True, *, timeout: float | None = 60.0, bind: bool = True
    ) -> None:
        self._role: Trainer | Worker | None = None
        self._seed: Any = None  # what a worker needs to find the sender
        self._strategy = WeightStrategy(strategy)
        self.sync = sync
        self.timeout = timeout
        self.bind = bind
        self.metrics = SyncMetrics(self.name)

    # --- what a backend says ---

    @abstractmethod
    def _make_sender_end(self, num_workers: int) -> tuple[SenderEnd, Any]:
        """The trainer's end, and the (picklable) seed from which a worker makes its own."""

    @abstractmethod
    def _make_receiver_end(self, seed: Any) -> ReceiverEnd:
        """A worker's end."""

    def _can_meet(self) -> bool:
        """Whether a worker finds the sender without a seed."""
        return False

    def _make_source(self, model_id: str, weights: object, device_map_fn: DeviceMap | None) -> Source:
        return Source(weights, self.strategy, device_map_fn=device_map_fn)

    @property
    def _published(self) -> bool:
        """Whether a send is finished without the workers' answers."""
        return False

    # --- init: local, no communication ---

    def init_on_sender(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        model: nn.Module | None = None,
        weights: Any = None,
        devices: Sequence[Any] | None = None,
        device_map_fn: DeviceMap | None = None,
        num_workers: int | None = None,
        params_map: Mapping[int, Any] | None = None,
    ) -> None:
        """Set up the trainer's end. Nothing is sent, and nothing is copied.

        Args:
            model_id: the model's name, and its path in ``context``.
            context: a collector, or anything that has the model.
            model: the model; read anew for each ``send()`` without arguments.
            weights: instead of a model, its live weights; likewise read anew.
            devices: one per worker (each worker brings weights to its own device).
            device_map_fn: ``(worker_idx, weights) -> weights`` for that worker.
            num_workers: how many there will be; else as many as ``devices``, ``params_map`` or the context's workers.
            params_map: ``{worker_idx: weights}``, for workers that are to have different ones.

        Raises:
            RuntimeError: the scheme is initialised already.
            TypeError: something is not what it is to be.
            ValueError: arguments that contradict one another.
        """
        self._require_fresh()
        given = [
            name
            for name, value in (("model", model), ("weights", weights), ("params_map", params_map))
            if value is not None
        ]
        if len(given) > 1:
            raise ValueError(f"give one of model, weights and params_map, not {' and '.join(given)}")
        workers = context.remote_workers if isinstance(context, CollectorContext) else ()
        count = agreed_count(num_workers, devices, params_map, workers)
        if model is None and not given and context is not None:
            model = find_or_none(context, model_id)
        sentinels = {worker.worker_idx: worker.sentinel for worker in workers}
        source = self._make_source(model_id, params_map or (model if weights is None else weights), device_map_fn)
        end, self._seed = self._make_sender_end(count)  # from here on there is something to let go: nothing may raise
        sender = Sender(
            end,
            source,
            count,
            self.timeout,
            delivers_at_connect=self.delivers_at_connect,
            published=self._published,
            record=self.metrics.record,
        )
        self._role = Trainer(model_id, context, model, sender, end, sentinels, os.getpid())
        close_at_exit(end)

    def init_on_receiver(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        model: nn.Module | None = None,
        worker_idx: int | None = None,
    ) -> None:
        """Set up a worker's end. Nothing is received yet.

        Args:
            model_id: the model's name, and its path in ``context``.
            context: what has the model; if it has workers of its own it is told of every update, to pass it on.
            model: the model itself. It gets memory of its own, if it shares it with another process.
            worker_idx: this worker's index; else ``connect`` is given it.

        Raises:
            RuntimeError: the scheme was never initialised on a sender, or is already on this end.
            LookupError, TypeError: the context has no such model.
            ValueError: neither a model nor a context; or one that passes updates on, which a scheme whose sends wait
                for no answer (``acknowledge="published"``) cannot know of.
        """
        self._require_fresh_worker()
        if self._seed is None and not self._can_meet():
            raise RuntimeError(
                "initialise this scheme on the sender first, then hand it (pickled or forked) to the worker"
            )
        if model is None:
            if context is None:
                raise ValueError(f"init_on_receiver('{model_id}') needs the model, or a context that has it")
            model = find_model(context, model_id)
        cascade = (lambda: context.cascade_weights(model_id)) if isinstance(context, CascadingContext) else None
        if cascade is not None and self._published:
            raise ValueError(
                f"the context of '{model_id}' passes updates on to workers of its own, for which only an answer can "
                "vouch: give the scheme acknowledge='installed'"
            )
        receiver = Receiver(model, self.strategy, self._make_receiver_end(self._seed), bind=self.bind, cascade=cascade)
        self._role = Worker(model_id, context, model, receiver, worker_idx)

    def init_in_process(self, model_id: str, model: nn.Module, source: Any = None) -> None:
        """Set up both ends in this process, and connect them: any scheme, and nothing is carried.

        Args:
            model_id: the model's name.
            model: acts, and is updated through the gate.
            source: the model (or weights) that ``send()`` without arguments reads; its weights are the first ones.

        Raises:
            RuntimeError: the scheme is initialised already.
            LayoutMismatch: the source does not fit the model.
        """
        self._require_fresh()
        line = InProcessLine(arrive=lambda: receiver.connect(0, self.timeout))
        receiver = Receiver(model, self.strategy, line, bind=False)
        sender = Sender(line, self._make_source(model_id, source, None), 1, self.timeout, record=self.metrics.record)
        sender.connect(None, {})
        self._role = Trainer(model_id, None, model, sender, line, {}, os.getpid(), receiver)

    def _require_fresh(self) -> None:
        if self._role is not None:
            end = "sender" if isinstance(self._role, Trainer) else "receiver"
            raise RuntimeError(f"this scheme is already initialised on the {end}, for model '{self._role.model_id}'")

    def _require_fresh_worker(self) -> None:
        if isinstance(self._role, Trainer) and self._role.pid != os.getpid():
            self._role.end.close()  # a forked child has inherited the trainer's end
            self._role = None
        self._require_fresh()
