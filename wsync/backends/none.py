"""No synchronization: the control, which shows what the other backends achieve."""

from __future__ import annotations

from typing import Any, ClassVar

from wsync.paths import CollectorContext, find_or_none
from wsync.scheme import WeightSyncScheme


class NoWeightSyncScheme(WeightSyncScheme):
    """Carries nothing: no call has an effect on another process, and workers keep the weights that they have.

    It takes the arguments of every scheme. The model is kept for the properties and ``apply_weights``.
    """

    name = "none"
    sends_weights = False
    collectors: ClassVar[tuple[str, ...]] = (
        *("multi_sync", "multi_async", "single", "distributed", "distributed_async"),
        *("rpc", "rpc_async", "ray", "ray_async"),
    )
    _workers = 0  # 0 on a receiver
    _source: Any = None  # what `weights` and `prepare_weights` read

    def init_on_sender(self, model_id: str = "policy", context: Any = None, **given: Any) -> None:
        self.init_on_receiver(model_id, context, model=given.get("model"))
        workers = context.remote_workers if isinstance(context, CollectorContext) else ()
        self._workers = given.get("num_workers") or len(workers) or 1
        weights = given.get("weights")
        self._source = self.model if weights is None else weights

    def init_on_receiver(self, model_id: str = "policy", context: Any = None, **given: Any) -> None:
        model = given.get("model")
        if model is None and context is not None:
            model = find_or_none(context, model_id)
        self.model_id, self.context, self.model, self._source = model_id, context, model, model
        self._workers, self._index = 0, given.get("worker_idx")

    init_on_worker = init_on_receiver

    def init_in_process(self, model_id: str, model: Any, source: Any = None) -> None:
        self.init_on_sender(model_id, model=model)

    def connect(self, *, worker_idx: int | None = None, weights: Any = None, processes: Any = None) -> None:
        self._index = self._index if worker_idx is None else worker_idx

    def _nothing(self, *_: Any, **__: Any) -> None:
        return

    disconnect = readmit = continue_from = send = send_async = wait_async = _nothing

    def receive(self, timeout: float | None = None) -> bool:
        """Return False at once: nothing ever arrives."""
        return False

    def pull(self, timeout: float | None = None) -> int:
        return 0

    def prepare_weights(self, weights: Any, model_id: str, strategy: Any = None, context: Any = None) -> Any:
        return super().prepare_weights(self._source if weights is None else weights, model_id, strategy, context)

    def shutdown(self) -> None:
        super().shutdown()
        self._workers, self._source = 0, None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_workers": 0, "_source": None}

    get_sender, get_receiver = WeightSyncScheme.create_sender, WeightSyncScheme.create_receiver

    @property
    def is_sender(self) -> bool:
        return self._workers > 0

    @property
    def num_workers(self) -> int:
        return self._workers

    @property
    def weights(self) -> Any:
        return None if self._source is None else self.strategy.extract_weights(self._source)
