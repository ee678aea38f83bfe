"""The fast path of a sender that reaches some of its workers by a transport, not by the arena."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from wsync.deadlines import deadline_in
from wsync.errors import in_forked_child
from wsync.fast_path import FastCalls, UnfinishedUpdate
from wsync.loops import TensorTree
from wsync.sending.in_flight import InFlight
from wsync.sending.protocols import SendChannel
from wsync.types import Ack, SyncReport


class TransportFastPath:
    """Packs and publishes an update to all workers, and waits for their acknowledgements.

    The other steps of a full send were done by the send that enabled the fast path, and would have the same result:
    finding the tensors in the given weights, checking their layout, choosing workers, extra state. Called under the
    sender's lock, by the sending thread.

    Args:
        channel: to the workers, all of which are connected.
        num_workers: the number of workers.
        record: puts an acknowledgement that ``wait_acks`` has returned back, for its next call.
    """

    def __init__(self, channel: SendChannel, num_workers: int, record: Callable[[Ack], None]) -> None:
        self._channel = channel
        self._everyone = range(num_workers)
        self._record = record
        self._process = os.getpid()

    def calls(self) -> FastCalls:
        """Return the calls of the fast path."""
        return FastCalls(self._update, self._complete)

    def _update(
        self, tensors: TensorTree | list[Tensor], version: int, timeout: float | None, began: float
    ) -> SyncReport | tuple[Any, ...] | None:
        """Do one update; see ``FastUpdate``.

        Raises:
            NotConnected: a transform has forked, and this is the child.
        """
        channel, everyone = self._channel, self._everyone
        if len(channel.workers) < len(everyone):
            return None
        found = tensors if isinstance(tensors, list) else tensors.tensors()
        if os.getpid() != self._process:
            raise in_forked_child()
        extracted = time.perf_counter()
        deadline = deadline_in(timeout)
        buffer = channel.reserve(everyone, deadline)
        reserved = time.perf_counter()
        try:
            if not buffer.plan.fill(found):
                channel.release([buffer])
                return None
            packed = time.perf_counter()
            channel.publish(buffer, version, b"", everyone, acknowledge=True)
        except BaseException:  # a signal handler raised, or a transport
            channel.release([buffer])
            raise
        published = time.perf_counter()
        acks = channel.wait_acks(everyone, version, deadline)
        finished = time.perf_counter()
        update = InFlight(
            version=version,
            workers=everyone,
            deadline=deadline,
            started=began,
            extract=extracted - began,
            wait=reserved - extracted,
            pack=packed - reserved,
            transfer=published - packed,
        )
        report = update.report(channel.carried_bytes(version), acks, finished)
        if len(acks) == len(everyone) and not any([ack.error or ack.died for ack in acks]):
            return report
        for ack in acks:
            self._record(ack)
        return report, buffer.slot, (), b""

    def _complete(self, unfinished: UnfinishedUpdate, version: int) -> None:
        """Do nothing: the update is published, and ``wait_acks`` finds the acknowledgements that were put back."""
