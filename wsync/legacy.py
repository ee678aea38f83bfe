"""The older API: a scheme hands out a sender and a receiver, and nobody calls ``connect``.

    trainer   init_on_sender ─→ get_sender()   ─→ send ─→ (the first one: connect) ─→ scheme.send
    worker    init_on_worker ─→ knock ─→ (the thread: connect) ─→ get_receiver().receive ─→ scheme.receive

Names only: what they do is done by the scheme. Pipes are in ``pipes.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from wsync.deadlines import deadline_in, remaining
from wsync.lifecycle import Lifecycle
from wsync.paths import find_or_none
from wsync.receiving.joining import Joining
from wsync.roles import Trainer, Worker
from wsync.types import ModelHolder, NumberedContext, SyncReport


class WeightSender:
    """Sends one model's weights to its workers.

    Args:
        scheme: what does it, once it is initialised on the sender.
    """

    def __init__(self, scheme: OlderApi) -> None:
        self._scheme = scheme

    def send(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> SyncReport | None:
        """Deliver an update: see ``WeightSyncScheme.send``. The first one waits for every worker to be there.

        Raises:
            NotConnected: ``init_on_sender`` has not been called.
            SyncTimeout: naming the workers that have not called ``init_on_worker`` within the scheme's ``timeout``;
                and all that ``WeightSyncScheme.send`` raises.
        """
        self._scheme._meet()
        return self._scheme.send(weights, worker_ids)

    def send_async(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Hand an update over, and return; the first one waits for every worker to be there, as ``send`` does."""
        self._scheme._meet()
        self._scheme.send_async(weights, worker_ids)

    def wait_async(self) -> SyncReport | None:
        """Wait until what ``send_async`` handed over is installed.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: as ``send``.
        """
        return self._scheme.wait_async()


class WeightReceiver:
    """Receives one model's weights in one worker.

    They are put into the model as they come, between two forwards, whether ``receive`` is called or not.

    Args:
        scheme: what does it, once it is initialised on the worker.
    """

    def __init__(self, scheme: OlderApi) -> None:
        self._scheme = scheme

    def receive(self, timeout: float | None = None) -> bool:
        """Wait for weights newer than this call last told of; whether there are any, and are in the model.

        Args:
            timeout: seconds; None for no limit.

        Raises:
            NotConnected: ``init_on_worker`` has not been called; or the sender is gone.
            WeightSyncError: the sender's weights do not fit this model, or it did not let this worker in.
        """
        deadline = deadline_in(timeout)
        if not self._scheme._is_let_in(timeout):
            return False
        received = self._scheme.receive(remaining(deadline))
        return received is not None and received is not False  # a TensorDict refuses to be a bool


class OlderApi(Lifecycle):
    """The older names of a scheme."""

    def init_on_worker(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        model: nn.Module | None = None,
        worker_idx: int | None = None,
    ) -> None:
        """Set up a worker's end, and knock at the sender's door; whoever waits there is not waited for.

        Args:
            model_id: the model's name, and its path in ``context``.
            context: what has the model (that one, or as ``model``), and may know its ``worker_idx``.
            model: the model itself.
            worker_idx: this worker's index.

        Raises:
            NotConnected: the sender is gone.
            ValueError: no index; and all that ``init_on_receiver`` raises.
        """
        if worker_idx is None and isinstance(context, NumberedContext):
            worker_idx = context.worker_idx
        if worker_idx is None:
            raise ValueError("which worker is this? give init_on_worker() a worker_idx, or a context that has it")
        if model is None and context is not None:
            model = find_or_none(context, model_id)
            if model is None and isinstance(context, ModelHolder) and isinstance(context.model, nn.Module):
                model = context.model
        self.init_on_receiver(model_id, context, model=model, worker_idx=worker_idx)
        role = self._worker("init_on_worker")
        try:
            signs = role.receiver.knock(worker_idx, self.timeout)
        except Exception:
            self._role = None
            raise
        self._role = replace(role, joining=Joining(signs, self.connect))

    def get_sender(self) -> WeightSender:
        """What sends.

        Raises:
            NotConnected: a ``RuntimeError``: ``init_on_sender`` has not been called.
        """
        self._trainer("get_sender")
        return WeightSender(self)

    def get_receiver(self) -> WeightReceiver:
        """What receives.

        Raises:
            NotConnected: a ``RuntimeError``: ``init_on_worker`` has not been called.
        """
        self._worker("get_receiver")
        return WeightReceiver(self)

    def create_sender(self) -> WeightSender:
        """As ``get_sender``, and may come before ``init_on_sender``."""
        return WeightSender(self)

    def create_receiver(self) -> WeightReceiver:
        """As ``get_receiver``, and may come before ``init_on_worker``."""
        return WeightReceiver(self)

    def _meet(self) -> None:
        """The rendezvous with all workers, if it has not been."""
        role = self._role
        if isinstance(role, Trainer) and not role.sender.connected:
            self.connect()

    def _is_let_in(self, timeout: float | None) -> bool:
        """Whether the sender has let this worker in, ``timeout`` seconds from now at the latest."""
        role = self._role
        return not isinstance(role, Worker) or role.joining is None or role.joining.wait(timeout)
