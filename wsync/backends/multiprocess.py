"""Multiprocess: every worker has a copy of its own, made from the one slot of memory that all updates go through.

The copy lies in a memory file whose descriptor went through the worker's socket, as tensors do that are put into a
``torch.multiprocessing`` queue; the message says which one is new. A worker that is slow finds only the newest.
"""

from __future__ import annotations

import queue
import traceback
from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from wsync.deadlines import deadline_in, remaining
from wsync.errors import SyncTimeout, WorkerFailed
from wsync.local.receiver import LocalReceiver
from wsync.local.rendezvous import Endpoint
from wsync.local.sender import LocalSender
from wsync.pipes import PipedScheme
from wsync.receiving.gate import process_gate
from wsync.transport import TransportBackend
from wsync.weights.snapshot import snapshot
from wsync.weights.strategy import WeightStrategy


class QueueLike(Protocol):
    """What ``queue.Queue`` and ``multiprocessing.Queue`` have in common."""

    def put(self, item: Any) -> None:
        """Append ``item``."""
        ...

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The first item; ``queue.Empty`` when the time is over."""
        ...


class MPTransport:
    """Weights through a queue, answers through another: for processes that have queues, and no scheme.

    Each end makes one over the same two queues (a ``TransportBackend``). The copy that is put is made when it is sent.
    A scheme's own line to its workers goes through sockets and memory files instead, unless
    ``scheme.create_transport`` is given queues.

    Args:
        weight_queue: carries ``(number, weights)`` to one worker.
        ack_queue: carries ``(number, error)`` back; None if nobody answers.
        timeout: seconds that ``send_weights`` waits for an answer; None for no limit.
    """

    def __init__(
        self, weight_queue: QueueLike, ack_queue: QueueLike | None = None, timeout: float | None = 60.0
    ) -> None:
        self._weights = weight_queue
        self._acks = ack_queue
        self._timeout = timeout
        self._number = 0

    def send_weights(self, weights: Any) -> None:
        """Put a copy of ``weights`` (a module, a TensorDict, a state dict), and wait for the answer to it.

        Raises:
            SyncTimeout: no answer came in time.
            WorkerFailed: the worker could not apply them; carries its traceback.
        """
        given = snapshot(weights)
        copy = {name: tensor.detach().clone() for name, tensor in given.tensors.items()}
        self._number += 1
        self._weights.put((self._number, {**copy, **(given.extra or {})}))
        if self._acks is None:
            return
        deadline = deadline_in(self._timeout)
        number, error = 0, ""
        while number < self._number:  # an older answer, to a send that timed out, satisfies nobody
            try:
                number, error = self._acks.get(timeout=remaining(deadline))
            except queue.Empty:
                raise SyncTimeout(f"the worker did not answer within {self._timeout} s") from None
        if error:
            raise WorkerFailed(f"the worker could not apply the weights:\n{error}")

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """The next weights, applied to ``model`` (through the gate) and ``weights`` if given; None if none came."""
        try:
            number, received = self._weights.get(timeout=timeout)
        except queue.Empty:
            return None
        chosen = strategy or WeightStrategy()
        error = ""
        try:
            with process_gate().hold():
                for destination in (weights, model):
                    if destination is not None:
                        chosen.apply_weights(destination, received)
            return chosen.extract_weights(received)
        except Exception:
            error = traceback.format_exc()
            raise
        finally:
            if self._acks is not None:
                self._acks.put((number, error))

    def setup_connection_and_weights_on_sender(self) -> None:
        """Queues need no rendezvous."""

    def setup_connection_and_weights_on_receiver(
        self,
        *,
        worker_idx: int | None = None,
        weights: Any = None,
        model: nn.Module | None = None,
        strategy: WeightStrategy | None = None,
    ) -> Any | None:
        """The first weights, which the sender puts like all others."""
        return self.receive_weights(self._timeout, weights=weights, model=model, strategy=strategy)


class MultiProcessWeightSyncScheme(PipedScheme):
    """Weight synchronization by copies, for workers on the trainer's machine with memory of their own.

    Args:
        strategy: the format in which weights are handed out.
        sync: whether ``send`` waits until its promise holds.
        timeout: seconds for ``connect`` and ``send``; None for no limit.
        checksum: whether each update carries a checksum, which a worker verifies before it stages or applies it.
    """

    name = "multiprocess"

    def __init__(
        self,
        strategy: Any = "tensordict",
        sync: bool = True,
        *,
        timeout: float | None = 60.0,
        checksum: bool = False,
    ) -> None:
        super().__init__(strategy, sync, timeout=timeout, bind=False)
        self.checksum = checksum

    def create_transport(
        self,
        pipe_or_context: Any = None,
        *,
        worker_ids: Sequence[int] | None = None,
        weight_queue: QueueLike | None = None,
        ack_queue: QueueLike | None = None,
        timeout: float | None = None,
    ) -> TransportBackend:
        """The sender's line to some workers (None: all); or, if a queue is given, an ``MPTransport`` over that.

        Args:
            pipe_or_context: as for ``PipedScheme.create_transport``.
            worker_ids: whom.
            weight_queue: to one worker, who makes an ``MPTransport`` over the same two.
            ack_queue: back from it; None if it does not answer.
            timeout: seconds for an answer through ``ack_queue``; None for the scheme's.

        Raises:
            ValueError: not a pipe of this scheme.
        """
        if weight_queue is None:
            return super().create_transport(pipe_or_context, worker_ids=worker_ids)
        return MPTransport(weight_queue, ack_queue, self.timeout if timeout is None else timeout)

    def _make_sender_end(self, num_workers: int) -> tuple[LocalSender, Endpoint]:
        end = LocalSender(num_workers, retains=False, checksum=self.checksum)
        return end, end.endpoint

    def _make_receiver_end(self, seed: Endpoint) -> LocalReceiver:
        return LocalReceiver(seed, retains=False)
