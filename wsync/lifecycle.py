"""What a scheme does between init and shutdown, on either end: connect, updates, what was received."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wsync.errors import NotConnected
from wsync.paths import find_model
from wsync.receiving.gate import process_gate
from wsync.roles import Trainer, Worker
from wsync.sending.source import per_worker
from wsync.setup import SchemeSetup
from wsync.types import SyncReport
from wsync.weights.strategy import WeightStrategy


class Lifecycle(SchemeSetup):
    """See ``WeightSyncScheme``."""

    def connect(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """The blocking rendezvous, called on both ends; delivers the first weights, if the sender has any.

        Args:
            worker_idx: on a receiver, which worker it is.
            weights: on the sender, first weights instead of the model's.

        Raises:
            NotConnected: not initialised; or the sender is gone, or refused this worker.
            SyncTimeout: the other end did not come within ``timeout``; names who is missing.
            WorkerDied, WorkerFailed: on the sender, naming the worker.
            LayoutMismatch: on the receiver, if its model is not like the sender's.
            RuntimeError: on a receiver that is connected already. A sender may connect again: who came late is let in.
        """
        role = self._role
        if isinstance(role, Trainer):
            role.sender.connect(weights, role.sentinels)
        elif isinstance(role, Worker):
            index = role.worker_idx if worker_idx is None else worker_idx
            if index is None:
                raise ValueError("which worker is this? give worker_idx to init_on_receiver() or connect()")
            role.receiver.connect(index, self.timeout)
            if self._published:
                role.receiver.quiet()
        else:
            raise NotConnected(
                "call init_on_sender() or init_on_receiver() before connect(), and again after shutdown()"
            )

    def dismiss(self, worker_idx: int) -> None:
        """On the sender: take a worker for dead, before anybody has noticed; nothing is sent to it any more.

        What is sent to all is kept for who comes in its place: see ``readmit``.
        """
        self._trainer("dismiss").sender.dismiss(worker_idx)

    def readmit(self, worker_idx: int, sentinel: int | None = None, timeout: float | None = None) -> None:
        """On the sender: meet a worker that calls ``connect`` in the place of one that has died.

        It gets the newest version that was sent, as it joins; nobody else takes notice. A predecessor that is still
        there is hung up on first, as by ``dismiss``.

        Args:
            worker_idx: its predecessor's index.
            sentinel: a descriptor that is readable when its process has ended.
            timeout: seconds; None for the scheme's.

        Raises:
            SyncTimeout, WorkerDied, WorkerFailed: it did not come, or not with these weights.
        """
        self._trainer("readmit").sender.admit(worker_idx, sentinel, timeout)

    def synchronize_weights(self, *, worker_idx: int | None = None, weights: Any = None) -> None:
        """The older name of ``connect``, which delivers the first weights."""
        self.connect(worker_idx=worker_idx, weights=weights)

    def send(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> SyncReport | None:
        """Deliver an update. When this returns, every forward that starts in a worker uses it.

        Args:
            weights: module, TensorDict, state dict, or ``{worker: any of these}``; None reads the model (or the
                weights, or each worker's own) given at init.
            worker_ids: one, several, or (None) all workers.

        Returns:
            What it cost; None if ``sync=False``, which does not wait.

        Raises:
            NotConnected: before ``connect``; or nobody is left, or there are no weights to send.
            LayoutMismatch: weights that do not fit; nobody has any of them.
            ValueError: an unknown worker.
            WorkerDied, WorkerFailed, SyncTimeout: names each worker that lacks the update, and why; the others have it.
        """
        role = self._role
        if not isinstance(role, Trainer):
            role = self._trainer("send")
        return role.sender.send(weights, worker_ids, self.sync)

    def send_async(self, weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Hand an update over, and return; ``wait_async`` waits. A newer one supersedes it if it is not taken yet."""
        self._trainer("send_async").sender.send(weights, worker_ids, wait=False)

    def wait_async(self) -> SyncReport | None:
        """Wait until what was sent without waiting is installed.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: as ``send``, of one update; another call waits for the others.
        """
        return self._trainer("wait_async").sender.wait()

    def receive(self, timeout: float | None = None) -> Any | None:
        """Wait for a version newer than this call last returned (after ``connect``, than the first one).

        Args:
            timeout: seconds; None for no limit.

        Returns:
            The model's weights, of one version; None when the time is over. They are not copied: later updates may be
            written where they lie, so copy what has to last longer than the next one.

        Raises:
            NotConnected: the sender is gone.
            RuntimeError: called inside a forward, or ``wsync.gate()``, where nothing is installed.
        """
        return self._worker("receive").receiver.receive(timeout)

    def apply_weights(self, weights: Any, inplace: bool = True) -> None:
        """Put ``weights`` into this end's model, through the gate, without sending anything.

        Raises:
            LayoutMismatch: they do not fit; nothing was applied.
        """
        model = self.model
        if model is None:
            raise NotConnected("this end has no model to apply weights to")
        with process_gate().hold():
            role = self._role
            if isinstance(role, Worker):
                role.receiver.own_memory()  # what it is bound to may be the other workers', too
            self.strategy.apply_weights(model, weights, inplace=inplace)

    def prepare_weights(
        self, weights: Any, model_id: str, strategy: WeightStrategy | None = None, context: Any = None
    ) -> Any:
        """What ``send(weights)`` would send, in the strategy's format, ``{worker: …}`` where workers differ.

        Changes nothing, and calls no ``device_map_fn``.

        Raises:
            NotConnected: no weights were given, and there is no model to take them from.
        """
        if weights is None:
            weights = (
                find_model(context, model_id)
                if context is not None
                else self._trainer("prepare_weights").sender.source.weights
            )
        if weights is None:
            raise NotConnected(f"there are no weights of '{model_id}' to prepare: give weights or a context")
        chosen = strategy or self.strategy
        apart = per_worker(weights)
        if apart is not None:
            return {worker: chosen.extract_weights(own) for worker, own in apart.items()}
        return chosen.extract_weights(weights)

    def shutdown(self) -> None:
        """Let everything go: lines, memory, the thread. Harmless when repeated.

        A worker's model keeps the weights that it has, in memory of its own.

        Raises:
            RuntimeError: called in a worker from inside the gate, for which whoever is to end may be waiting.
        """
        role = self._role
        if isinstance(role, Trainer):
            if role.local is not None:
                role.local.close()
            role.sender.close()
        elif isinstance(role, Worker):
            if process_gate().held_here:
                raise RuntimeError(
                    "shutdown() inside a forward, or wsync.gate(), would wait for itself: leave it first"
                )
            if role.joining is not None:
                role.joining.close()
            role.receiver.close()
        self._role = None
        self._seed = None
