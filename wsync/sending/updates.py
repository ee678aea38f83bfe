"""The full send path, for any weights and any workers: pack, publish, wait for acknowledgements, report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from wsync.deadlines import deadline_in
from wsync.errors import WorkerError, forked_child_error
from wsync.sending.acknowledgements import Acknowledgements
from wsync.sending.in_flight import InFlight
from wsync.sending.membership import Membership
from wsync.sending.protocols import SendChannel, TransactionChannel
from wsync.sending.registered_updates import RegisteredUpdates
from wsync.sending.source import Part, Source
from wsync.sending.unawaited import Unawaited
from wsync.types import Ack, SyncReport
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer

Packed = tuple[Part, Buffer, bytes]
"""Weights for some workers, the buffer that they were copied into, and their extra state.

The part has no tensors if those were made for this update (``Source.changes_weights``): they are freed before the next
worker's are made.
"""


class Updates:
    """Publishes the updates of one sender, and waits for them.

    Used by the thread that calls the scheme, under the sender's lock.

    Args:
        channel: the channel to the workers.
        source: where weights come from when an update is given none.
        members: the workers.
        timeout: see below.
        on_request: with ``initiator="receiver"``: only ``connect`` and ``finish_all`` await acknowledgements.
        record: called with the report of each finished update.

    Attributes:
        timeout: seconds for each update; None for no limit.
        version: the newest version number used: sent, skipped by ``continue_from``, or failed. 0 before the first.
        acks: the acknowledgements of the workers.
        registered_updates: keeps registered weights up to date.
        layout: the layout that the first weights have defined; None before.
        transaction_channel: the channel; None if the workers cannot keep an update that may be aborted.
        unawaited: the updates that were sent without waiting.
    """

    def __init__(
        self,
        channel: SendChannel,
        source: Source,
        members: Membership,
        timeout: float | None,
        *,
        on_request: bool,
        record: Callable[[SyncReport], None],
    ) -> None:
        self.timeout = timeout
        self.version = 0
        self.layout: Layout | None = None
        self.channel = channel
        self.members = members
        self.acks = Acknowledgements(channel, members)
        self.registered_updates = RegisteredUpdates(source, members)
        self.unawaited = Unawaited(self.acks, members)
        # None with initiator="receiver": the workers then choose when they install, which rules out a transaction.
        # Tested once, because this isinstance() takes 20 µs.
        self.transaction_channel: TransactionChannel | None = None
        if not on_request and isinstance(channel, TransactionChannel):
            self.transaction_channel = channel
        self._on_request = on_request
        self._process = os.getpid()
        self._source = source
        self._record = record
        # Workers that connected before the layout was known. They may not have mapped the arena yet, so their first
        # update must be acknowledged.
        self._not_yet_mapped: set[int] = set()

    def publish(
        self,
        weights: object,
        workers: Sequence[int],
        absent: Sequence[int],
        *,
        acknowledge: bool,
        rest: Sequence[Tensor] | None = None,
    ) -> InFlight:
        """Send the next version, without waiting for the workers: see ``packing``.

        Unless ``on_request``, acknowledgements are awaited even if ``acknowledge`` is false: if the update has extra
        state, if a worker may not have mapped the arena yet, and before registered weights are overwritten.
        """
        with self.packing(weights, workers, absent, rest=rest) as (update, packed):
            # set_extra_state may raise; and until a worker has mapped the arena, its forwards do not read it.
            may_fail = any(extra for _, _, extra in packed) or not self._not_yet_mapped.isdisjoint(workers)
            must_confirm = (may_fail or update.must_copy) and not self._on_request
            update.acknowledge = acknowledge = acknowledge or must_confirm
            self.registered_updates.announce(update)
            for part, buffer, extra in packed:
                self.channel.publish(buffer, update.version, extra, part.workers, acknowledge)
        self.note_published(update)
        self.unawaited.drop_workers(workers)
        return update

    # --- packing ---

    def define_layout(self, weights: object) -> Layout:
        """Return the layout. The first call makes it, and sends it to the workers.

        Args:
            weights: the first weights; None reads the source.
        """
        if self.layout is None:
            layout = Layout.of(self._source.first(weights))
            self.channel.set_layout(layout)
            self.layout = layout
        return self.layout

    def _agree_on_layout(self, weights: object, deadline: float | None) -> None:
        """Ask the workers to check the first weights' layout: the sender may have no model to check it against."""
        workers, version, layout = self.members.present, self.version + 1, Layout.of(self._source.first(weights))
        try:
            self.channel.check_layout(layout, version)
            self.acks.require(workers, version, deadline, committed=False)
        except BaseException:
            self.version = version  # not reused: an answer to it may arrive late
            raise
        self._not_yet_mapped.update(workers)

    @contextmanager
    def packing(
        self, weights: object, workers: Sequence[int], absent: Sequence[int], *, rest: Sequence[Tensor] | None = None
    ) -> Iterator[tuple[InFlight, Sequence[Packed]]]:
        """Check the next version, and copy it into buffers that no worker reads; they are released if the block raises.

        Args:
            weights: for ``workers``, and for replacements of ``absent`` ones; None reads the source.
            workers: the workers that have to acknowledge.
            absent: workers that have died or left.
            rest: completes ``weights``, where those are a part of the model.

        Raises:
            NotConnected: a transform or another function of the user's has forked, and this is the child.
            WeightSyncError: ``weights`` is None, and the registered weights lack the newest version.
        """
        deadline = deadline_in(self.timeout)
        if self.registered_updates.lack_update(weights):
            self.finish_earlier()
            if self.registered_updates.lack_update(weights):
                raise self.registered_updates.error()
        if self.layout is None and self.members.connected:
            self._agree_on_layout(weights, deadline)
        packed: list[Packed] = []
        try:
            started = time.perf_counter()
            layout = self.define_layout(weights)
            waited, packing, recipients = 0.0, 0.0, [*workers, *absent]
            for part in self._source.parts(weights, workers, absent, layout, rest):
                for group, extra in self.members.by_extra_state(part.workers, part.extra):
                    before = time.perf_counter()
                    buffer = self.channel.reserve(recipients, deadline)
                    reserved = time.perf_counter()
                    # What was made for a worker is freed before the next worker's is made.
                    kept = [] if self._source.changes_weights else part.tensors
                    packed.append((Part(group, kept, part.extra), buffer, extra))
                    buffer.pack(part.tensors)
                    waited, packing = waited + reserved - before, packing + time.perf_counter() - reserved
                del part
            if os.getpid() != self._process:
                raise forked_child_error()
            update = InFlight(
                version=self.version + 1,
                workers=workers,
                extra=[(part.workers, extra) for part, _, extra in packed],
                deadline=deadline,
                started=started,
                extract=time.perf_counter() - started - waited - packing,
                wait=waited,
                pack=packing,
            )
            self.registered_updates.prepare(update, weights, [part.tensors for part, *_ in packed], layout, recipients)
            self.version += 1
            yield update, packed
        except BaseException:
            self.channel.release([buffer for _, buffer, _ in packed])
            raise

    def rest_of_model(self, worker_ids: int | Sequence[int] | None) -> Sequence[Tensor]:
        """Return the tensors that all workers were sent last: they stand in for what a partial update leaves out.

        Raises:
            ValueError: some workers have other weights than others.
        """
        rest = self.channel.newest_views()
        if worker_ids is not None or rest is None:
            raise ValueError(
                "a partial update goes to all workers, and completes the weights that all of them were sent last; "
                "those are not known before the first update, or after one that failed, went to some workers only or "
                "left them with different extra states: send the whole model to all workers first"
            )
        return rest

    def note_published(self, update: InFlight) -> None:
        """Record what the workers should have by now, and when the update was published."""
        self.members.note_sent(update.version, update.extra)
        update.transfer = time.perf_counter() - update.packed_at
        self.registered_updates.on_published(update)

    # --- without waiting ---

    def send_unawaited(self, weights: object, worker_ids: int | Sequence[int] | None, *, partial: bool) -> None:
        """Send the next version; ``finish_all`` waits for it. Finish the earlier ones that are installed by now.

        Raises:
            WorkerDied, WorkerFailed: a worker has died, or refused an earlier one. If it has a version, this one was
                sent.
        """
        for update in self.unawaited.collect():
            self.finish(update, awaited=False)
        if not self.members.present:
            self.unawaited.raise_failed(sent=False)
        workers, absent = self.members.recipients(worker_ids)
        rest = self.rest_of_model(worker_ids) if partial else None
        update = self.publish(weights, workers, absent, acknowledge=True, rest=rest)
        self.unawaited.updates.append(update)
        # Sends queued updates that can be sent now; starts the send-loop thread if some still wait.
        self.channel.process_arrived_messages()
        self.unawaited.raise_failed()

    # --- waiting ---

    def wait_for_acks(self, update: InFlight) -> Sequence[Ack]:
        """Wait for the update's acknowledgements; if it needs none, only raise the errors that have been reported.

        Raises:
            WorkerDied, WorkerFailed, SyncTimeout: names the workers that lack the update.
        """
        acks: Sequence[Ack] = ()
        try:
            if update.acknowledge:
                acks = self.acks.require(update.workers, update.version, update.deadline, collected=update.answers)
                self._not_yet_mapped.difference_update(update.workers)
            else:
                self.acks.raise_failures(update.workers, update.version)
        except WorkerError as error:
            if error.workers.keys().isdisjoint(self.members.present):  # only workers that have gone lack it
                self._on_installed(update)
            raise
        self._on_installed(update)
        return acks

    def _on_installed(self, update: InFlight) -> None:
        if update.version == self.version:
            self.registered_updates.on_installed(update)

    def finish(self, update: InFlight, *, awaited: bool = True) -> SyncReport:
        """``wait_for_acks``; return the report, and record it in the metrics.

        ``awaited=False``: the answers had arrived before the call, when is not known; see ``InFlight.report``.
        """
        acks = self.wait_for_acks(update)
        finished = time.perf_counter() if awaited else None
        report = update.report(self.channel.carried_bytes(update.version), acks, finished)
        self._record(report)
        return report

    def finish_all(self) -> SyncReport | None:
        """Finish everything that was sent without waiting; return the newest one's report."""
        report = None
        self.unawaited.raise_failed()
        while updates := self.unawaited.updates:
            try:
                report = self.finish(updates[0])
            except Exception:  # the next call waits for the others; after a KeyboardInterrupt, for this one as well
                del updates[0]
                raise
            del updates[0]
        return report

    def finish_earlier(self) -> None:
        """``finish_all``, before another update is sent. An error has no version, because that one was not sent."""
        try:
            self.finish_all()
        except WorkerError as error:
            error.version = None
            raise
