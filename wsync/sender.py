"""The send path: what a trainer does with an update, the same for every backend.

    source ─→ loader ─→ channel.publish ─→ acknowledgements ─→ report, or one error that names the workers that lack it

Most updates take the fast path instead: one call for all steps (``fast_path.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from wsync.deadlines import deadline_in
from wsync.errors import NotConnected, in_forked_child
from wsync.fast_path import FastCalls, PartialDelivery
from wsync.sending.acknowledgements import Acknowledgements
from wsync.sending.forking import senders
from wsync.sending.in_flight import InFlight
from wsync.sending.loading import Loader, Packed
from wsync.sending.locators import Locators
from wsync.sending.membership import Membership, worker_list
from wsync.sending.protocols import SendChannel
from wsync.sending.source import Source
from wsync.types import LAST_VERSION, Ack, SyncReport
from wsync.weights.layout import Layout


class Sender:
    """One model, and all workers that act with copies of it. Any thread may call; one call runs at a time.

    There are two locks: the *sender's lock*, held here for the whole of a call, and the *channel's lock* inside
    ``WorkerChannel``, which calls and the send-loop thread take for each step.

    Args:
        channel: the connections to the workers, and the memory or transports that carry the weights.
        source: where weights come from when a call is given none.
        num_workers: how many workers there are.
        timeout: seconds for ``connect`` and ``send``; None for no limit.
        delivers_at_connect: whether the first weights are delivered by ``connect``, or by the first ``send``.
        finishes_on_publish: whether a send finishes once the update is published, because every later forward is
            guaranteed to use it; no acknowledgements are awaited.
        on_request: whether workers fetch updates: ``send`` waits for none.
        record: called with the report of each finished update.

    Attributes:
        version: the newest version sent; 0 before the first.
        source: the ``source`` that was given.
        connected: whether all workers have connected once, even if one of them then refused the first weights.
    """

    def __init__(
        self,
        channel: SendChannel,
        source: Source,
        num_workers: int,
        timeout: float | None,
        *,
        delivers_at_connect: bool = True,
        finishes_on_publish: bool = False,
        on_request: bool = False,
        record: Callable[[SyncReport], None],
    ) -> None:
        self.version = 0
        self.source = source
        self.num_workers = num_workers
        self.connected = False
        self._channel = channel
        self._delivers_at_connect = delivers_at_connect
        self._finishes_on_publish = finishes_on_publish
        self._on_request = on_request
        self._record = record
        self._members = Membership(num_workers)
        self._acks = Acknowledgements(channel, self._members, timeout)
        self._loader = Loader(channel, source, self._members)
        self._lock = threading.RLock()
        self._in_forked_child = False
        senders.add(self)
        self._in_flight: list[InFlight] = []  # sent without waiting
        # Connected before there was a layout: may not have mapped the arena, so must acknowledge their first update.
        self._not_yet_mapped: set[int] = set()
        self._locators = Locators(source.weights)  # where the tensors of weights sent before are
        self._fast: FastCalls | None = None  # the fast path, while it is enabled
        # Its versions are copied to the membership by `_disable_fast`, not after each update: a shorter fast path.
        self._last_fast_report: SyncReport | None = None

    @property
    def layout(self) -> Layout | None:
        """The layout of the weights; None before the first."""
        return self._loader.layout

    @property
    def timeout(self) -> float | None:
        """Seconds for ``connect`` and ``send``; None for no limit."""
        return self._acks.timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._acks.timeout = seconds

    # --- connecting ---

    def connect(self, weights: object, sentinels: Mapping[int, int]) -> None:
        """Wait for every worker; deliver the first weights, if there are any.

        Raises:
            SyncTimeout: a worker did not connect, or did not install them in time.
            WorkerDied, WorkerFailed: names the worker; a failure carries its traceback.
        """
        with self.exclusive():
            everyone = range(self.num_workers)
            update = None
            if weights is not None or (self._delivers_at_connect and self.source.weights is not None):
                update = self._publish(weights, everyone, (), acknowledge=True)
                self._stop_waiting_for(everyone)
            elif self.source.weights is not None:
                self._loader.define(None)  # workers check the layout as they connect; the first send brings weights
            deadline = update.deadline if update else deadline_in(self._acks.timeout)
            self._channel.wait_for_workers(everyone, sentinels, deadline)
            self._members.add(everyone)  # connect may be called again to accept replacements
            self.connected = True
            if update:
                # Not recorded in the metrics: the time includes worker start-up.
                self._acks.require(update.workers, update.version, update.deadline)
                self._write_registered(update)
                self._enable_fast(weights)

    def disconnect(self, worker: int) -> None:
        """Treat a worker as dead: stop sending to it. Its replacement gets the last update sent to this index.

        Raises:
            ValueError: there is no such worker.
        """
        with self.exclusive():
            worker_list(worker, self.num_workers)
            self._channel.disconnect(worker)
            self._stop_waiting_for([worker])
            self._members.remove([worker])

    def readmit(self, worker: int, sentinel: int | None = None, timeout: float | None = None) -> None:
        """Accept a replacement for a dead worker. It gets the last update sent to its index, or to all workers.

        Args:
            worker: the dead worker's index. Updates to all workers are kept for it while no worker has this index.
            sentinel: a descriptor that becomes readable when the replacement's process ends.
            timeout: seconds; None for those of ``connect``.

        Raises:
            SyncTimeout, WorkerDied, WorkerFailed: it did not connect, or not with these weights.
            ValueError: there is no such worker.
        """
        with self.exclusive():
            deadline = deadline_in(self._acks.timeout if timeout is None else timeout)
            self.disconnect(worker)
            self._channel.wait_for_workers([worker], {} if sentinel is None else {worker: sentinel}, deadline)
            self._members.add([worker])
            version = self._members.expected_version.get(worker)
            if version:
                self._acks.require([worker], version, deadline)

    def continue_from(self, version: int) -> None:
        """Skip the version numbers up to ``version``.

        Raises:
            ValueError: it is out of range.
        """
        if not 0 <= version < LAST_VERSION:
            raise ValueError(f"a version is from 0 to {LAST_VERSION - 1}, not {version}")
        with self.exclusive():
            self.version = max(self.version, version)

    # --- sending ---

    def send(
        self, weights: object, worker_ids: int | Sequence[int] | None, wait: bool, partial: bool = False
    ) -> SyncReport | None:
        """Deliver an update; with ``wait``, return when every worker uses it. ``partial``: see ``WeightSyncScheme``."""
        # Hot path: no avoidable calls or allocations. In a forked child `_fast` is None, and `_send` raises.
        with self._lock:
            began = time.perf_counter()
            fast = self._fast
            if fast is not None and wait and worker_ids is None and not partial:
                known = self._locators
                own = known.own_tree if weights is None or weights is known.own else None
                tensors = own if own is not None else known.find(weights)
                if tensors is not None:
                    self.version += 1  # before sending: an interrupted update's number is not reused
                    report = fast.update(tensors, self.version, self._acks.timeout, began)
                    if report is not None:
                        if not isinstance(report, SyncReport):  # a tuple: sent, but not yet finished
                            report = self._complete(fast, PartialDelivery(*report), began)
                        self._last_fast_report = report
                        self._record(report)
                        return report
                    self.version -= 1  # None: nothing was sent, so the number is free again; do a full send
        return self._send(weights, worker_ids, wait, partial)

    def _send(
        self, weights: object, worker_ids: int | Sequence[int] | None, wait: bool, partial: bool
    ) -> SyncReport | None:
        with self.exclusive():
            self._require_connected()
            rest = self._rest(worker_ids) if partial else None
            workers, absent = self._members.recipients(worker_ids)
            # Without `wait`, always with acknowledgements: `wait_async` waits until the update is installed.
            update = self._publish(
                weights, workers, absent, acknowledge=not (wait and self._finishes_on_publish), rest=rest
            )
            self._stop_waiting_for(update.workers)
            if wait:
                report = self._finish(update)
                if worker_ids is None and not partial:
                    self._enable_fast(weights)
                return report
            self._in_flight.append(update)
            self._channel.drain()  # and have the send loop send what still waits for a worker
            return None

    def _rest(self, worker_ids: int | Sequence[int] | None) -> Sequence[Tensor]:
        """Return the tensors that all workers were sent last: they stand in for what a partial update leaves out.

        Raises:
            ValueError: some workers have other weights than others.
        """
        rest = self._channel.newest_views()
        if worker_ids is not None or rest is None:
            raise ValueError(
                "a partial update goes to all workers, and completes the weights that all of them were sent last; "
                "those are not known before the first update, or after one that failed or went to some workers only: "
                "send the whole model to all workers first"
            )
        return rest

    def wait(self) -> SyncReport | None:
        """Wait for everything that was sent without waiting; return the newest one's report."""
        with self.exclusive():
            report = None
            while self._in_flight:  # after an error the next call waits for the others
                report = self._finish(self._in_flight.pop(0))
            return report

    def _stop_waiting_for(self, workers: Collection[int]) -> None:
        """Drop ``workers`` from older unfinished sends: the acknowledgement of a newer update covers them."""
        for older in self._in_flight:
            older.workers = [worker for worker in older.workers if worker not in workers]
        self._in_flight = [older for older in self._in_flight if older.workers]

    def _require_connected(self) -> None:
        if not self.connected:
            raise NotConnected("not connected yet: call connect() on the sender (and on every worker) before send()")

    def _publish(
        self,
        weights: object,
        workers: Sequence[int],
        absent: Sequence[int],
        *,
        acknowledge: bool,
        rest: Sequence[Tensor] | None = None,
    ) -> InFlight:
        with self._loaded(weights, workers, absent, rest=rest) as (update, packed):
            # Two cases need acknowledgements in any mode: extra state, because set_extra_state may raise; and workers
            # that may not have mapped the arena yet: until they have answered, their forwards do not read it.
            unsure = not self._not_yet_mapped.isdisjoint(workers) or any([extra for _, _, extra in packed])
            must = (unsure or update.must_copy) and not self._on_request
            update.acknowledge = acknowledge = acknowledge or must
            self._announce_registered(update)
            for part, buffer, extra in packed:
                self._channel.publish(buffer, update.version, extra, part.workers, acknowledge)
        self._members.note_sent(update.version, update.extra)
        update.transfer = time.perf_counter() - update.packed
        return update

    @contextmanager
    def _loaded(
        self,
        weights: object,
        workers: Sequence[int],
        absent: Sequence[int],
        *,
        keep: bool = False,
        rest: Sequence[Tensor] | None = None,
    ) -> Iterator[tuple[InFlight, Sequence[Packed]]]:
        """Load the next version into buffers, which are released if the block raises."""
        deadline = deadline_in(self._acks.timeout)
        if self.layout is None and self.connected:
            self._agree_on_layout(weights, deadline)
        with self._loader.loaded(weights, workers, absent, self.version + 1, deadline, keep=keep, rest=rest) as loaded:
            self.version += 1
            registered, (update, packed) = self.source.registered, loaded
            if registered is not None and self.layout is not None:
                update.must_copy = len(packed) > 1 or not registered.holds(self.layout, packed[0][0].tensors)
            yield loaded

    def _agree_on_layout(self, weights: object, deadline: float | None) -> None:
        """Ask the workers to check the first weights' layout: the sender may have no model to check it against."""
        workers, version, layout = self._members.present, self.version + 1, self._loader.layout_of(weights)
        try:
            self._channel.check_layout(layout, version)
            self._acks.require(workers, version, deadline, committed=False)
        except BaseException:
            self.version = version  # not reused: an answer to it may arrive late
            raise
        self._not_yet_mapped.update(workers)

    def _finish(self, update: InFlight) -> SyncReport:
        """Wait for the acknowledgements, if they are wanted; report, or raise."""
        acks: Sequence[Ack] = ()
        if update.acknowledge:
            acks = self._acks.require(update.workers, update.version, update.deadline)
            self._not_yet_mapped.difference_update(update.workers)
        else:
            self._acks.raise_failures(update.workers, update.version)
        self._write_registered(update)
        report = update.report(self._channel.carried_bytes(update.version), acks, time.perf_counter())
        self._record(report)
        return report

    # --- registered buffers: see shm/registered.py ---

    def _announce_registered(self, update: InFlight) -> None:
        """If the update was packed from the registered buffers, record its version there, before it is published."""
        if self.source.registered is not None and not update.must_copy:
            self.source.registered.announce(update.version)

    def _write_registered(self, update: InFlight) -> None:
        """Copy the newest update into the registered buffers, unless it was packed from them; all workers have it."""
        registered, everyone = self.source.registered, {*self._members.present}
        if registered is None or not update.must_copy or update.version != self.version:
            return
        if everyone <= {*update.workers}:
            registered.copy_published(update.version)

    # --- the fast path: see fast_path.py ---

    def _enable_fast(self, weights: object) -> None:
        """Enable the fast path for sends like this one, which went to all workers."""
        if self.layout is None or self._in_flight or self._members.absent or self._members.extra:
            return
        fast = self._channel.fast_calls(acknowledge=not self._finishes_on_publish)
        locator = None if fast is None else self.source.locator(weights, self.layout)
        if locator is not None:
            self._locators.add(weights, locator)
            self._fast = fast

    def _complete(self, fast: FastCalls, delivery: PartialDelivery, began: float) -> SyncReport:
        """Finish a fast update in which a worker died, failed, held its mutex or did not answer in time."""
        self._disable_fast()
        workers, timeout, version = self._members.present, self._acks.timeout, self.version
        left = None if timeout is None else max(0.0, timeout - (time.perf_counter() - began))
        self._members.note_sent(version, ((workers, b""),))
        fast.complete(delivery, version)
        if self._finishes_on_publish:
            self._acks.raise_failures(workers, version)
        else:
            self._acks.require(workers, version, deadline_in(left))
        report, seconds = delivery.report, time.perf_counter() - began
        acknowledge = report.phases["acknowledge"] + seconds - report.seconds
        return report._replace(seconds=seconds, phases={**report.phases, "acknowledge": acknowledge})

    def _disable_fast(self) -> None:
        self._fast = None
        if self._last_fast_report is not None:
            self._members.expected_version.update(self._last_fast_report.workers)
            self._last_fast_report = None

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Take the sender's lock and disable the fast path; the next full send enables it again.

        Raises:
            NotConnected: this process is a forked child of the one that made the sender.
        """
        if self._in_forked_child:
            raise in_forked_child()
        with self._lock:
            self._disable_fast()
            yield

    def end_in_forked_child(self) -> None:
        """Refuse every later call but ``close``. The lock may be held by a thread that does not exist in the child."""
        self._in_forked_child = True
        self._fast = None
        self._lock = threading.RLock()

    # --- transactions: see transaction.py ---

    def prepare(self, weights: object, worker_ids: int | Sequence[int] | None, transaction: int) -> InFlight:
        """Have every worker check an update and keep it; raises if one refuses.

        Waits first for what was sent without waiting, and raises its errors.
        """
        with self.exclusive():
            self._require_connected()
            workers, absent = self._members.recipients(worker_ids)
            while self._in_flight:  # their answers could not be told from the votes
                self._finish(self._in_flight.pop(0))
            with self._loaded(weights, workers, absent, keep=True) as (update, packed):
                for part, buffer, extra in packed:
                    self._channel.prepare(buffer, update.version, extra, part.workers, transaction)
            self._acks.require(workers, update.version, update.deadline, committed=False)
            return update

    def commit(self, update: InFlight, transaction: int) -> None:
        """Have the workers install what they have prepared."""
        with self.exclusive():
            update.deadline = deadline_in(self._acks.timeout)
            self._announce_registered(update)
            self._channel.commit(update.version, transaction)
            self._members.note_sent(update.version, update.extra)
            update.transfer = time.perf_counter() - update.packed

    def finish(self, update: InFlight) -> SyncReport:
        """Wait until a committed update is installed."""
        with self.exclusive():
            return self._finish(update)

    def abort(self, transaction: int) -> None:
        """Have the workers forget what they have prepared. The aborted update's version number is not reused."""
        with self.exclusive():
            self._channel.abort(range(self.num_workers), transaction)

    def close(self) -> None:
        """Tell the workers that there will be no more updates, and close all connections.

        In a forked child, only its copies of the connections are closed.
        """
        if self._in_forked_child:
            self._channel.close()
            return
        with self.exclusive():
            self.connected = False
            self._channel.close(finished=True)
