"""No synchronization: the control, which shows what the other backends achieve."""

from __future__ import annotations

from typing import Any, ClassVar

from wsync.receiver import Receiver
from wsync.scheme import WeightSyncScheme
from wsync.update import Inbox, Outlet


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

    def make_outlet(self, model_id: str, num_workers: int) -> Outlet:
        return Outlet()

    def make_connection(self, model_id: str, receiver: Receiver) -> Inbox:
        return Inbox()

    def init_on_sender(self, model_id: str = "policy", context: Any = None, *, pipes: Any = None, **given: Any) -> None:
        super().init_on_sender(model_id, context, pipes=[], **given)

    def init_on_worker(self, model_id: str = "policy", context: Any = None, *, pipe: Any = None, **given: Any) -> None:
        self.init_on_receiver(model_id, context, **given)

    def init_in_process(self, model_id: str, model: Any, source: Any = None) -> None:
        self.init_on_sender(model_id, model=model)

    def connect(self, *, worker_idx: int | None = None, **_: Any) -> None:
        self.worker_idx = self.worker_idx if worker_idx is None else worker_idx

    def _nothing(self, *_: Any, **__: Any) -> None:
        return

    def ledger(self, *_: Any, **__: Any) -> list[dict[str, Any]]:
        return []

    verify = ledger
    disconnect = readmit = continue_from = send = send_async = wait_async = _nothing

    def receive(self, timeout: float | None = None) -> bool:
        """Return False at once: nothing ever arrives."""
        return False

    def pull(self, timeout: float | None = None) -> int:
        return 0
