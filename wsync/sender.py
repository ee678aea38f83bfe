"""The send path: what a trainer does with an update, the same for every backend.

    source ─→ packed ─→ channel.publish ─→ acknowledgements ─→ report, or one error that names the workers that lack it

These steps are in ``sending/updates.py``. Most updates take the fast path: one call does them all (``fast_path.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from wsync.control.early_joins import EarlyJoin
from wsync.deadlines import deadline_in
from wsync.errors import WorkerDied, WorkerFailed, forked_child_error
from wsync.fast_path import FastCalls, UnfinishedUpdate
from wsync.sending.channel import SenderSideChannel
from wsync.sending.forking import fork_aware
from wsync.sending.membership import Membership, checked_worker_index
from wsync.sending.protocols import SendChannel
from wsync.sending.source import Source
from wsync.sending.tensor_finders import TensorFinders
from wsync.sending.transactions import Transaction
from wsync.sending.updates import Updates
from wsync.types import LAST_VERSION, SyncReport
from wsync.weights.layout import Layout

_PATIENCE = 0.1  # seconds that ``disconnect`` waits for the lock before it ends the wait of the call that holds it


class Sender:
    """Sends one model's weights to all its workers. Any thread may call; one call runs at a time.

    A call holds the *sender's lock*. While it uses connections or slots it also holds the *channel's lock* (for the
    exceptions see ``SenderArena``). The *send-loop thread* (``sending/send_loop.py``) takes only the channel's lock; it
    sends queued updates: a worker that does not use the arena gets an update only after it has answered the previous.

    Args:
        channel: the channel to the workers: connections, and memory or transports for weights; kept as an attribute.
        source: where weights come from when a call is given none; kept as an attribute.
        num_workers: how many workers there are.
        timeout: seconds for ``connect`` and ``send``; None for no limit.
        delivers_at_connect: whether the first weights are delivered by ``connect``, or by the first ``send``.
        acknowledges: whether every send waits for acknowledgements; if not, only some do: see ``Updates.publish``.
        on_request: whether workers request versions (``initiator="receiver"``); ``acknowledges`` must then be False.
        record: called with the report of each finished update except that of ``connect``, under the sender's lock.
    """

    def __init__(
        self,
        channel: SendChannel,
        source: Source,
        num_workers: int,
        timeout: float | None,
        *,
        delivers_at_connect: bool = True,
        acknowledges: bool = True,
        on_request: bool = False,
        record: Callable[[SyncReport], None],
    ) -> None:
        self.source = source
        self.num_workers = num_workers
        self.channel = channel
        self._delivers_at_connect = delivers_at_connect
        self._acknowledges = acknowledges
        self._record = record
        self._members = Membership(num_workers)
        self._updates = Updates(channel, source, self._members, timeout, on_request=on_request, record=record)
        self._lock = threading.RLock()
        self._in_forked_child = False
        fork_aware.add(self)
        self._finders = TensorFinders(source.weights)  # caches how to find the tensors in an argument of `send`
        self._fast: FastCalls | None = None  # the fast path, while it is enabled

    @property
    def version(self) -> int:
        """The newest version number used: sent, skipped by ``continue_from``, or failed. 0 before the first."""
        return self._updates.version

    @property
    def sent_version(self) -> int:
        """The newest version that workers were given; 0 before the first."""
        return self._members.sent_version

    @property
    def connected(self) -> bool:
        """Whether ``connect`` has found all workers; some may have died since. False after ``close``."""
        return self._members.connected

    @property
    def layout(self) -> Layout | None:
        """The layout of the weights; None before the first."""
        return self._updates.layout

    @property
    def timeout(self) -> float | None:
        """Seconds for ``connect`` and ``send``; None for no limit."""
        return self._updates.timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._updates.timeout = seconds

    def connect(self, weights: object, sentinels: Mapping[int, int]) -> None:
        """Wait for every worker; deliver the first weights, if any. For ``sentinels`` see ``wait_for_workers``.

        Raises:
            SyncTimeout: a worker did not connect, or did not install them in time.
            WorkerDied, WorkerFailed: names the worker; a failure carries its traceback.
        """
        with self.exclusive():
            everyone, update = range(self.num_workers), None
            if weights is not None or (self._delivers_at_connect and self.source.weights is not None):
                # Published before the workers connect: the channel keeps it for each of them.
                update = self._updates.publish(weights, everyone, absent=(), acknowledge=True)
            elif self.source.weights is not None:
                self._updates.define_layout(None)  # workers check it as they connect; the first send brings weights
            deadline = update.deadline if update else deadline_in(self.timeout)
            try:
                self.channel.wait_for_workers(everyone, sentinels, deadline)
            finally:  # after an error, too: `connect` may be called again, and these workers stay connected
                self._members.add(self.channel.workers)
            self._members.connected = True
            if update:
                self._updates.wait_for_acks(update)  # not recorded in the metrics: the time includes worker start-up
                self._enable_fast(weights)

    def disconnect(self, worker: int) -> None:
        """Treat a worker as dead; see ``WeightSyncScheme``. ValueError: there is no such worker."""
        worker = checked_worker_index(worker, self.num_workers)
        try:
            while not self._lock.acquire(timeout=_PATIENCE):
                self.channel.give_up(worker)  # repeated: the next call with the lock may wait for this worker too
            with self.exclusive():  # the lock is held already; this also disables the fast path
                self._disconnect(worker)
        finally:
            try:  # noqa: SIM105  not suppress(): a signal handler may raise in it, and release() would be skipped
                self._lock.release()
            except RuntimeError:  # a signal handler has raised before the lock was acquired
                pass

    def _disconnect(self, worker: int) -> None:
        """Disconnect a worker, and await no more answers from it."""
        self._updates.unawaited.drop_workers([worker])
        # Before channel.disconnect(), in which a signal handler may raise.
        self._members.remove({worker: "it was disconnected by disconnect() or readmit()"})
        self.channel.disconnect(worker)

    def readmit(self, worker: int, sentinel: int | None = None, timeout: float | None = None) -> None:
        """Accept a replacement for a dead worker. The replacement gets the newest update sent to this index.

        Args:
            worker: the dead worker's index.
            sentinel: a descriptor that becomes readable when the replacement's process ends.
            timeout: seconds; None for those of ``connect``.

        Raises:
            SyncTimeout, WorkerDied, WorkerFailed: it did not connect, or could not install the weights.
        """
        with self.exclusive():
            deadline = deadline_in(self.timeout if timeout is None else timeout)
            newest = self._members.version_sent_to(worker)  # the channel sends it to a replacement that connects
            to_await = newest  # 0: do not wait for an answer
            early_join = self.channel.pop_early_join(worker, sentinel)  # a replacement that is connected already
            if early_join is None:
                self._disconnect(worker)
            elif early_join.unanswered_version != newest:
                # 0: the worker has answered. Older than `newest`: a later call of `send` or `send_async` sent it
                # `newest`, and reports the result.
                to_await = 0
            try:
                if early_join is None:
                    self.channel.wait_for_workers([worker], {} if sentinel is None else {worker: sentinel}, deadline)
                if to_await:
                    self._updates.acks.require([worker], to_await, deadline)
            except BaseException as error:
                # If the replacement has connected, the next `readmit` uses its connection.
                if not isinstance(error, WorkerDied | WorkerFailed):
                    self.channel.keep_early_join(worker, EarlyJoin(to_await))
                raise
            finally:
                self._members.add(self.channel.workers)

    def continue_from(self, version: int) -> None:
        """Skip the version numbers up to ``version``; ValueError if it is out of range."""
        if not 0 <= version < LAST_VERSION - 1:
            raise ValueError(f"a version to continue from is 0 to {LAST_VERSION - 2}, not {version}")
        with self.exclusive():
            self._updates.version = max(self.version, version)

    def send(
        self, weights: object, worker_ids: int | Sequence[int] | None, wait: bool, partial: bool = False
    ) -> SyncReport | None:
        """Deliver an update, as ``WeightSyncScheme.send`` does; without ``wait``, do not wait for the workers."""
        # Hot path: no avoidable calls or allocations. In a forked child `_fast` is None, and `_send` raises.
        with self._lock:
            began = time.perf_counter()
            fast = self._fast
            if fast is not None and wait and worker_ids is None and not partial:
                finders = self._finders
                # the usual arguments, `None` and the source itself, need no search
                own = finders.source_tensors if weights is None or weights is finders.source_weights else None
                tensors = own if own is not None else finders.find(weights)
                if tensors is not None:
                    updates = self._updates
                    # Counted before sending: if a signal interrupts the update, its number is not used again.
                    version = updates.version = updates.version + 1
                    try:
                        report = fast.update(tensors, version, updates.timeout, began)
                    except BaseException:  # usually raised while waiting for answers, after the update was published
                        if isinstance(self.channel, SenderSideChannel) and self.channel.has_sent(version):
                            self._members.sent_to_all = version
                        raise
                    if report is not None:
                        if not isinstance(report, SyncReport):  # a tuple: sent, but not yet finished
                            report = self._finish_fast(fast, UnfinishedUpdate(*report), began)
                        self._members.sent_to_all = version
                        self._record(report)
                        return report
                    updates.version -= 1  # None: nothing was sent, so the number is free again; do a full send
        return self._send(weights, worker_ids, wait, partial)

    def _send(
        self, weights: object, worker_ids: int | Sequence[int] | None, wait: bool, partial: bool
    ) -> SyncReport | None:
        with self.exclusive():
            updates = self._updates
            if not wait:
                updates.send_unawaited(weights, worker_ids, partial=partial)
                return None
            workers, absent = self._members.recipients(worker_ids)
            rest = updates.rest_of_model(worker_ids) if partial else None
            acknowledge = self._acknowledges
            report = updates.finish(updates.publish(weights, workers, absent, acknowledge=acknowledge, rest=rest))
            if worker_ids is None and not partial:
                self._enable_fast(weights)
            return report

    def wait(self) -> SyncReport | None:
        """Wait for everything that was sent without waiting; return the newest one's report."""
        with self.exclusive():
            return self._updates.finish_all()

    @contextmanager
    def transaction(self, number: int) -> Iterator[Transaction]:
        """Yield the sender's part in an update of several models; no other call of the sender runs meanwhile."""
        with self.exclusive():
            yield Transaction(self._updates, number)

    # --- the fast path: see fast_path.py ---

    def _enable_fast(self, weights: object) -> None:
        """Enable the fast path for sends like this one, which went to all workers, unless a condition forbids it."""
        channel, layout, members = self.channel, self.layout, self._members
        prevented = self._updates.unawaited.updates or members.absent or members.extra_states
        if prevented or layout is None or not isinstance(channel, SenderSideChannel):
            return
        fast = channel.fast_calls(acknowledge=self._acknowledges)
        if fast is not None and (finder := self.source.finder(weights, layout)) is not None:
            self._finders.add(weights, finder)
            self._fast = fast

    def _finish_fast(self, fast: FastCalls, unfinished: UnfinishedUpdate, began: float) -> SyncReport:
        """Finish an update of the fast path that was not published to all workers yet, or not acknowledged."""
        self._fast = None
        workers, timeout, version = self._members.present, self.timeout, self.version
        left = None if timeout is None else max(0.0, timeout - (time.perf_counter() - began))
        self._members.note_sent(version, ((workers, b""),))  # b"": the fast path is for models without extra state
        fast.finish_publishing(unfinished, version)
        if self._acknowledges:
            self._updates.acks.require(workers, version, deadline_in(left))
        else:
            self._updates.acks.raise_failures(workers, version)
        return unfinished.report_after(time.perf_counter() - began)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the sender's lock; disable the fast path until the next ``send``. NotConnected: in a forked child."""
        if self._in_forked_child:
            raise forked_child_error()
        with self._lock:
            self._fast = None
            yield

    def end_in_forked_child(self) -> None:
        """Make every later call raise, except ``close``. Called by the fork hook in ``sending/forking.py``."""
        self._in_forked_child = True
        self._fast, self._lock = None, threading.RLock()  # a thread that does not exist here may hold the old one

    def close(self) -> None:
        """Tell the workers that no more updates will come; close all connections. A forked child sends nothing."""
        if self._in_forked_child:
            return self.channel.close()
        with self.exclusive():
            self._members.connected = False
            self.channel.close(finished=True)
