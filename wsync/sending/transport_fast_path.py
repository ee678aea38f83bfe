"""The fast path of a sender that reaches some of its workers by a transport, not by the arena."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from wsync.deadlines import deadline_in
from wsync.errors import forked_child_error
from wsync.fast_path import FastCalls
from wsync.loops import TensorTree
from wsync.sending.in_flight import InFlight
from wsync.sending.protocols import SendChannel
from wsync.types import Ack, SyncReport


def transport_fast_calls(channel: SendChannel, num_workers: int, record: Callable[[Ack], None]) -> FastCalls:
    """Return calls that pack and publish an update to all workers, and wait for their acknowledgements.

    The other steps of a full send were done by the send that enabled the fast path, and would have the same result:
    finding the tensors in the given weights, checking their layout, choosing workers, extra state. Called under the
    sender's lock, by the thread that calls the scheme.

    Args:
        channel: the channel to the workers, all of which are connected.
        num_workers: the number of workers.
        record: puts an acknowledgement that ``wait_acks`` has returned back, for its next call.
    """
    everyone, process = range(num_workers), os.getpid()

    def update(
        tensors: TensorTree | list[Tensor], version: int, timeout: float | None, began: float
    ) -> SyncReport | tuple[Any, ...] | None:
        """Do one update; see ``FastUpdate``. Raises ``NotConnected`` if a transform has forked, in the child."""
        if len(channel.workers) < num_workers:
            return None
        found = tensors if isinstance(tensors, list) else tensors.tensors()
        if os.getpid() != process:
            raise forked_child_error()
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
        sent = InFlight(
            version=version,
            workers=everyone,
            deadline=deadline,
            started=began,
            extract=extracted - began,
            wait=reserved - extracted,
            pack=packed - reserved,
            transfer=published - packed,
        )
        report = sent.report(channel.carried_bytes(version), acks, finished)
        if len(acks) == num_workers and not any([ack.error or ack.died for ack in acks]):
            return report
        for ack in acks:
            record(ack)
        return report, buffer.slot, (), b""

    # Nothing is left to publish, and `wait_acks` finds the acknowledgements put back above.
    return FastCalls(update, finish_publishing=lambda unfinished, version: None)
