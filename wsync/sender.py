"""The trainer's end of a scheme: what it does with an update, the same for every backend.

    source ─→ outlet.reserve ─→ buffer.pack ─→ outlet.publish ─→ outlet.wait ─→ report, or one error that names workers

``send`` has these steps in this order. ``send_async`` keeps what it has published, and ``wait_async`` waits for that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from wsync.control.loop import control_loop
from wsync.deadlines import NOW, deadline_in
from wsync.errors import NotConnected, WeightSyncError, WorkerDied, WorkerError, join_indices, last_line
from wsync.transforms import Chain
from wsync.update import LAST_VERSION, Cause, Outlet, Stage, SyncReport, Update
from wsync.weights.layout import Buffer, Layout
from wsync.weights.snapshot import Snapshot
from wsync.weights.source import Source, as_plain_integer
from wsync.weights.targets import dump_extra
from wsync.weights.tensors import digest_of
from wsync.workers import raise_causes


@dataclass(slots=True)
class Outstanding:
    """What was published and not waited for yet."""

    version: int
    workers: Sequence[int]  # that have to have it
    nbytes: int  # of one copy
    stage: Stage  # what the call waits for
    began: float  # the call
    deadline: float | None
    costs: tuple[float, float, float]  # seconds of extracting, packing and publishing
    to_all: bool = True  # all workers are sent the same weights


_STAGES: tuple[Stage, Stage] = ("ready", "installed")  # what a call waits for, without and with acknowledgements
_UNKNOWN = ("sent_at", "installed", "installed_at", "behind", "verified", "digest", "used", "used_at")
_ROW: dict[str, Any] = {"worker": 0, "where": "", "state": "alive", "sent": 0, **dict.fromkeys(_UNKNOWN), "error": ""}
Updates = list[tuple[Sequence[int], Update]]
"""One version: the update of each group of workers."""


class Sender:
    """Sends one model's weights. Any thread may call; one call runs at a time, with the sender's lock.

    ``acknowledges``, ``delivers_at_connect``, ``waits``: as in ``WeightSyncScheme``. ``record`` is called with the
    report of each finished update except that of ``connect``.
    """

    def __init__(
        self,
        outlet: Outlet,
        source: Source,
        num_workers: int,
        timeout: float | None,
        *,
        acknowledges: bool,
        delivers_at_connect: bool,
        waits: bool,
        record: Callable[[SyncReport], None],
    ) -> None:
        self.outlet, self.source = outlet, source
        self.num_workers, self.timeout = num_workers, timeout
        self.version = 0  # the newest number used: sent, skipped by `continue_from`, or failed
        self.sent_version = 0  # the newest version that workers were given
        self.layout: Layout | None = None  # of the weights
        self.connected = False  # `connect` has found all workers
        self.connect_first: Callable[[], object] | None = None  # what the first `send` does, if that connects
        self.on_published: Callable[[Buffer], None] | None = None  # called after each update of all workers
        self._acknowledges, self._delivers_at_connect, self._waits = acknowledges, delivers_at_connect, waits
        self._record = record
        self._everyone: Sequence[int] = range(num_workers)
        self._present: Sequence[int] = ()  # the workers, at the last look
        self._expected: Sequence[int] = ()  # these, and those that have gone and that no error has named yet
        self._kept: list[Outstanding] = []  # sent and not finished, the oldest first
        self._failed: Outstanding | None = None  # the oldest update that has failed without being waited for
        self._causes: dict[int, Cause] = {}  # why workers lack it, or a later one
        self._requires: list[Mapping[str, int]] = [{}] * num_workers  # what further updates require, by worker
        self._same_requires = True  # all workers have the same of these
        self._extra: dict[int, bytes] = {}  # each worker's extra state, as last sent
        self._newest: Buffer | None = None  # of the newest update, if all workers were given it
        self._installed = (-1, 0.0)  # the newest version that all are known to have, and since when
        self._verified: dict[tuple[int, str | None], tuple[int, str]] = {}  # by worker and place: version, digest
        self._lock = threading.RLock()  # guards everything here; it is the order of updates
        self.loop = control_loop()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Let no other call run meanwhile; NotConnected: in a forked child."""
        self.loop.require_own()
        with self._lock:
            yield

    # --- connections ---

    def connect(self, weights: object, processes: Any) -> None:
        """Wait for every worker; deliver the first weights, if any."""
        with self.exclusive():
            sent, deadline = None, deadline_in(self.timeout)
            if weights is not None or (self._delivers_at_connect and self.source.weights is not None):
                # Published before the workers connect: the outlet keeps it for each of them.
                sent = self._publish(weights, self._everyone, acknowledge=True)
            elif self.source.weights is not None:
                self._agreed_layout(None, deadline)  # workers check it; the first send brings weights
            self.outlet.connect(processes, deadline)
            self.connected = True
            self._update_expected(self._everyone)
            if sent is not None and self._waits:
                sent.workers = list(self._everyone)
                causes = self.outlet.wait(sent.workers, sent.version, sent.stage, sent.deadline)
                self._raise(sent, causes)  # not recorded in the metrics: it includes the start of the workers

    def disconnect(self, worker: int) -> None:
        """Treat a worker as dead, also while another thread's call waits for it."""
        worker = one_worker(worker, self.num_workers)
        self.loop.require_own()
        self.outlet.disconnect(worker, "it was disconnected by disconnect() or readmit()")
        if self._lock.acquire(blocking=False):  # else the call that has the lock does so, if it waits for this worker
            try:
                self._name({worker: Cause("died", "")})
            finally:
                self._lock.release()

    def readmit(self, worker: int, process: Any, timeout: float | None) -> None:
        """Accept the process that takes the place of a worker."""
        worker = one_worker(worker, self.num_workers)
        with self.exclusive():
            self.outlet.readmit(worker, process, deadline_in(self.timeout if timeout is None else timeout))
            self._update_expected(self._everyone)

    def continue_from(self, version: int) -> None:
        """Skip the version numbers up to ``version``; ValueError: it is out of range."""
        if not 0 <= version < LAST_VERSION - 1:
            raise ValueError(f"a version to continue from is 0 to {LAST_VERSION - 2}, not {version}")
        with self.exclusive():
            self.version = max(self.version, version)

    # --- updates ---

    def send(
        self, weights: object, worker_ids: Any = None, *, wait: bool = True, partial: bool = False
    ) -> SyncReport | None:
        """Deliver an update, as ``WeightSyncScheme.send`` does; without ``wait``, do not wait for the workers."""
        if self.loop.inherited:
            self.loop.require_own()
        with self._lock:
            acknowledge = self._acknowledges or (self._waits and not wait)  # `wait_async` promises the install
            sent = None
            if worker_ids is None and not partial and self.connected:
                sent = self._publish_usual(weights, acknowledge)
                if isinstance(sent, SyncReport):  # finished: nothing has to be waited for
                    self._record(sent)
                    return sent if wait else None
            if sent is None:
                workers = self._recipients(worker_ids)
                rest = self._rest_of_model(worker_ids) if partial else None
                sent = self._publish(weights, workers, rest, acknowledge=acknowledge)
            if wait and not self._waits:  # workers fetch it when they want it: only deaths are told
                causes = self.outlet.wait(sent.workers, sent.version, "ready", NOW)
                self._raise(sent, {worker: cause for worker, cause in causes.items() if cause.kind == "died"})
                return self._report(sent, time.monotonic() - sent.began)
            self._kept.append(sent)  # so that a wait that Ctrl-C ends is not forgotten
            if wait:
                return self._finish(sent)
            self._collect(sent)
            self._raise_failed()
            return None

    def _publish_usual(self, weights: object, acknowledge: bool) -> Outstanding | SyncReport | None:
        """Publish weights of a form that was sent before, to all workers; None if there is anything unusual.

        It is the shortest way, on which every call counts: a published update of a small model takes some microseconds.
        """
        began, layout = time.monotonic(), self.layout
        if layout is None or not self._same_requires or self._extra:
            return None
        tensors = self.source.usual(weights, layout)
        if tensors is None:
            return None
        outlet, timeout = self.outlet, self.timeout
        deadline = None if timeout is None else began + timeout
        extracted = time.monotonic()
        buffer = outlet.reserve(deadline)
        if not buffer.pack(tensors):
            return None
        packed = time.monotonic()
        self.version = version = self.version + 1
        update = Update(version, buffer, b"", 0, self._requires[0], acknowledge=acknowledge, at=began)
        finished = outlet.publish(update, self._everyone)
        self.sent_version, self._newest = version, buffer
        if self.on_published is not None:
            self.on_published(buffer)
        workers = self._expected if outlet.workers is self._present else self._update_expected(self._everyone)
        now = time.monotonic()
        costs = (extracted - began, packed - extracted, now - packed if outlet.moves_bytes else 0.0)
        if finished and not self._kept and self._failed is None and len(workers) == self.num_workers:
            return SyncReport(version, layout.nbytes, now - began, costs, workers)
        if not workers:
            raise self._no_worker()
        return Outstanding(version, workers, layout.nbytes, _STAGES[acknowledge], began, deadline, costs)

    def _publish(
        self, weights: object, workers: Sequence[int], rest: Sequence[Tensor] | None = None, *, acknowledge: bool
    ) -> Outstanding:
        sent, updates = self._pack(weights, workers, rest, acknowledge=acknowledge)
        at = time.monotonic()
        for group, update in updates:
            self.outlet.publish(update, group)
        self._note(sent, updates)
        sent.workers = self._update_expected(workers)
        sent.costs = (*sent.costs[:2], time.monotonic() - at if self.outlet.moves_bytes else 0.0)
        return sent

    def _pack(
        self,
        weights: object,
        workers: Sequence[int],
        rest: Sequence[Tensor] | None = None,
        *,
        acknowledge: bool = True,
        undecided: bool = False,
    ) -> tuple[Outstanding, Updates]:
        """Check and pack the next version; ``rest`` completes weights that are a part of the model."""
        began, deadline, packing = time.monotonic(), deadline_in(self.timeout), 0.0
        layout, parts = self._agreed_layout(weights, deadline), 0
        packed: list[tuple[Sequence[int], Buffer, bytes, Mapping[str, int]]] = []
        for some, tensors, state in self.source.parts(weights, workers, layout, rest):
            parts += 1
            for group, extra, requires in self._grouped(some, state):
                buffer = self.outlet.reserve(deadline)
                at = time.monotonic()
                buffer.pack(tensors)
                packing += time.monotonic() - at
                packed.append((group, buffer, extra, requires))
            del tensors, state  # before the next one is made
        self.loop.require_own()  # a function of the user's may have forked, and this may be the child
        if workers is self._everyone and rest is None:
            self.source.learn(weights, layout)
        acknowledge = acknowledge or any(extra for _, _, extra, _ in packed)  # `set_extra_state` may raise
        self.version = version = self.version + 1
        updates = [
            (group, Update(version, buffer, extra, 0, requires, acknowledge, undecided, at=began))
            for group, buffer, extra, requires in packed
        ]
        costs = (time.monotonic() - began - packing, packing, 0.0)
        to_all, expected = parts == 1 and len(workers) == self.num_workers, self._update_expected(workers)
        return Outstanding(
            version, expected, layout.nbytes, _STAGES[acknowledge], began, deadline, costs, to_all
        ), updates

    def _agreed_layout(self, weights: object, deadline: float | None) -> Layout:
        """Return the layout, which the first weights define if they fit all workers."""
        if self.layout is None:
            layout = Layout.of(self.source.first(weights))
            if self.connected:  # else workers check it as they connect
                causes = self.outlet.check_layout(layout, deadline)
                raise_causes(causes, "these first weights are applied nowhere, because of what happened")
            self.outlet.set_layout(layout)
            self.layout = layout
        return self.layout

    def _grouped(
        self, workers: Sequence[int], extra: Mapping[str, Any] | None
    ) -> Iterable[tuple[Sequence[int], bytes, Mapping[str, int]]]:
        """Return groups of workers, each with the extra state and the requirements that go with its weights.

        Without new extra state each worker is sent what it has. What it requires is its own after a transaction with
        some workers.
        """
        groups: dict[Any, list[int]] = {}
        new = dump_extra(extra)
        for worker in workers:
            own = self._extra.get(worker, b"") if extra is None else new
            groups.setdefault((own, *sorted(self._requires[worker].items())), []).append(worker)
        return [(some, own, dict(requires)) for (own, *requires), some in groups.items()]

    def _note(self, sent: Outstanding, updates: Updates) -> None:
        self.sent_version = sent.version
        for group, update in updates:
            if update.extra or self._extra:
                self._extra.update(dict.fromkeys(group, update.extra))
        self._newest = updates[0][1].buffer if sent.to_all else None
        if self._newest is not None and self.on_published is not None:
            self.on_published(self._newest)

    def _rest_of_model(self, worker_ids: Any) -> Sequence[Tensor]:
        if worker_ids is not None or self._newest is None:
            raise ValueError(
                "a partial update goes to all workers, and completes the weights that all of them were sent by the "
                "last update: send the whole model to all workers first"
            )
        return self._newest.views

    def _recipients(self, worker_ids: Any) -> Sequence[int]:
        if not self.connected and self.connect_first is not None:
            self.connect_first()
        if not self.connected:
            raise NotConnected("not connected yet: call connect() on the sender (and on every worker) first")
        if worker_ids is None:
            if not self._update_expected(self._everyone):
                raise self._no_worker()
            return self._everyone
        wanted, causes = worker_list(worker_ids, self.num_workers), self.outlet.causes()
        if gone := {worker: causes[worker] for worker in wanted if worker in causes}:
            self._expected = [worker for worker in self._expected if worker not in gone]
            left = join_indices(self.outlet.workers) or "none"
            why = "".join(f"\nworker {worker}: {cause}" for worker, cause in gone.items())
            raise WorkerDied(f"worker(s) {join_indices(gone)} died or left earlier; present: {left}{why}", gone)
        if not wanted:
            raise ValueError("worker_ids is empty: name at least one worker, or None for all")
        return wanted

    def _update_expected(self, workers: Sequence[int]) -> Sequence[int]:
        """Return those of ``workers`` that are present, or have gone without an error that has named them."""
        present = self.outlet.workers
        if present is not self._present:
            self._present = present
            self._expected = sorted({*present, *self._expected})
        if workers is self._everyone:
            return self._expected
        return [worker for worker in workers if worker in self._expected]

    def _no_worker(self) -> NotConnected:
        """Return the error of a send without a worker. Deaths that no call has reported are raised first."""
        self._collect()
        self._raise_failed(has_sent=False)
        why = "".join(f"\nworker {worker}: {cause}" for worker, cause in sorted(self.outlet.causes().items()))
        return NotConnected(f"every worker has died or left: start another; an engine needs readmit(index){why}")

    # --- waiting ---

    def wait(self) -> SyncReport | None:
        """Wait for everything that was sent without waiting; return the newest one's report."""
        with self.exclusive():
            deadlines = [sent.deadline for sent in self._kept]
            latest = None if None in deadlines else max(deadlines, default=NOW)  # pyright: ignore[reportArgumentType]
            report = self._collect(deadline=latest)
            self._raise_failed()
            return report

    def _finish(self, sent: Outstanding) -> SyncReport:
        """Wait for one that is kept; return its report."""
        causes = self.outlet.wait(sent.workers, sent.version, sent.stage, sent.deadline)
        self._kept.remove(sent)
        if causes:
            self._raise(sent, causes)
        return self._report(sent, time.monotonic() - sent.began)

    def _raise(self, sent: Outstanding, causes: Mapping[int, Cause]) -> None:
        """Raise one error that names the workers that lack an update, if there are any."""
        self._name(causes)
        raise_causes(causes, "version {} is missing", sent.version, [w for w in sent.workers if w not in causes])

    def _name(self, causes: Mapping[int, Cause]) -> None:
        """Expect nothing more of workers that have died: the error that follows names them."""
        died = {worker for worker, cause in causes.items() if cause.kind == "died"} - set(self.outlet.workers)
        self._expected = [worker for worker in self._expected if worker not in died]
        for sent in self._kept:
            sent.workers = [worker for worker in sent.workers if worker not in died]

    def _report(self, sent: Outstanding, seconds: float) -> SyncReport:
        wait, apply, nbytes = self.outlet.costs(sent.workers, sent.version)
        if sent.stage == "installed":
            self._installed = sent.version, time.monotonic()
        else:
            wait = apply = 0.0
        report = SyncReport(sent.version, nbytes or sent.nbytes, seconds, (*sent.costs, wait, apply), sent.workers)
        self._record(report)
        return report

    def _collect(self, newest: Outstanding | None = None, deadline: float | None = NOW) -> SyncReport | None:
        """Finish what is kept, up to ``newest``, the oldest first; return the last report.

        Errors are left to ``_raise_failed``: each worker is named once, by its first cause. With the deadline ``NOW``
        it does not wait: it stops at the first update that a worker may still answer.
        """
        report, waits = None, deadline != NOW
        while self._kept and self._kept[0] is not newest:
            sent = self._kept[0]
            causes = self.outlet.wait(sent.workers, sent.version, sent.stage, deadline)
            failed = {worker: cause for worker, cause in causes.items() if waits or cause.kind != "late"}
            if failed:
                self._failed = self._failed or sent
                self._causes = {**failed, **self._causes}
                sent.workers = [worker for worker in sent.workers if worker not in failed]
            if len(failed) < len(causes):
                break
            del self._kept[0]
            if not causes:
                report = self._report(sent, time.monotonic() - sent.began if waits else sum(sent.costs))
        return report

    def _raise_failed(self, *, has_sent: bool = True) -> None:
        """Raise one error for all that has failed without being waited for; ``has_sent``: whether this call sends."""
        failed, causes = self._failed, self._causes
        if failed is None:
            return
        self._failed, self._causes = None, {}
        try:
            self._raise(failed, causes)
        except WorkerError as error:
            error.version = error.version if has_sent else None
            raise

    # --- what workers have ---

    def ledger(self) -> list[dict[str, Any]]:
        """Return a row for each worker; see ``WeightSyncScheme.ledger``. It takes no lock, and does not wait."""
        outlet, clock, rows = self.outlet, time.time() - time.monotonic(), list[dict[str, Any]]()
        for worker in self._everyone:
            row = {**_ROW, "worker": worker, "sent": self.sent_version, **outlet.seen(worker, self.sent_version)}
            if worker not in outlet.workers:
                row |= {"state": "dead" if worker in outlet.causes() else "never connected", "installed": None}
            if row["sent_at"] is not None:
                row["sent_at"] += clock
            if row["installed"] is not None:
                row["behind"] = max(0, row["sent"] - row["installed"])
            if row["installed"] == self._installed[0]:
                row["installed_at"] = clock + self._installed[1]
            row["verified"], row["digest"] = self._verified.get((worker, row["where"]), (None, None))
            row["error"] = last_line(row["error"])
            rows.append(row)
        return rows

    def verify(self, weights: object, transform: Chain | None, timeout: float | None) -> None:
        """Have workers compare what is installed with the trainer's; see ``WeightSyncScheme.verify``."""
        with self.exclusive():
            workers, layout, version = self._update_expected(self._recipients(None)), self.layout, self.sent_version
            if layout is None:
                raise NotConnected("there is nothing to verify: no weights were sent yet")
            digests = dict[int, dict[str, int]]()
            for some, tensors, _ in self.source.parts(weights, workers, layout):
                sent = Snapshot(dict(zip(layout.names, tensors, strict=True))).through(transform)
                own = {name: digest_of(one) for name, one in sent.tensors.items()}
                digests |= dict.fromkeys(some, own)
            causes, self._verified = self.outlet.verify(digests, deadline_in(timeout)), {}
            for worker in digests.keys() - causes.keys():
                whole, seen = repr(sorted(digests[worker].items())).encode(), self.outlet.seen(worker, version)
                checked = seen.get("sent", version), xxhash.xxh3_64_hexdigest(whole)
                self._verified[worker, seen.get("where")] = checked
            self._name(causes)
            raise_causes(causes, "version {} is not verified", version, [worker for worker, _ in self._verified])

    # --- transactions ---

    def take_part(self, weights: object, worker_ids: Any, requires: dict[str, int]) -> Generator[Any]:
        """Send an update as a part of a transaction, in the steps of ``transaction.py``, which holds the lock.

        It yields after each step: packed; on its way to the workers; checked by them, with why some cannot take it;
        decided; committed; installed, with the report. If it is closed before the decision, it aborts. It adds its
        version to ``requires``, which all parts share.
        """
        if not self.outlet.transactional:
            raise WeightSyncError("models are installed one by one here: workers fetch, or the backend cannot wait")
        workers = self._recipients(worker_ids)
        sent, updates = self._pack(weights, workers, undecided=True)
        requires[self.outlet.name] = sent.version
        yield {}
        decided = False
        try:
            for group, update in updates:
                update.requires = {**update.requires, **requires}
                self.outlet.prepare(update, group)
            yield {}
            causes = self.outlet.wait(sent.workers, sent.version, "received", sent.deadline)
            self._name(causes)
            yield causes
            decided = True
        finally:
            if not decided:
                self._name(self.outlet.wait(sent.workers, sent.version, "received", NOW))
                self.outlet.abort(sent.version)
        for group, update in updates:
            update.undecided = False
            self.outlet.announce_commit(update, group)
        yield {}
        for group, update in updates:
            self.outlet.commit(update, group)
            for worker in group:
                self._requires[worker] = update.requires
        self._same_requires = all(own == self._requires[0] for own in self._requires)
        self._note(sent, updates)
        self._kept.append(sent)
        yield {}
        yield self._finish(sent)

    # --- the end ---

    def close(self, *, graceful: bool = True) -> None:
        """Close the outlet; a call in another thread ends with an error. Idempotent."""
        self.connected, self.connect_first = False, None
        self.outlet.close(graceful=graceful)
        self._newest = None  # its memory


def worker_list(worker_ids: object, num_workers: int | None = None) -> list[Any]:
    """Return the workers that ``worker_ids`` names, one or several, each once.

    Integers of any type are accepted (torch's, numpy's), and returned as plain ones. ValueError: one is not among
    ``num_workers`` workers; or is a bool, which may be part of a mask.
    """
    ids = worker_ids.tolist() if isinstance(worker_ids, np.ndarray | torch.Tensor) else worker_ids
    named = [as_plain_integer(one) for one in (ids if isinstance(ids, Iterable) else [ids])]
    if num_workers is not None:
        unknown = [one for one in named if type(one) is not int or one not in range(num_workers)]
        if unknown:
            raise ValueError(f"unknown worker_ids {unknown}: there are workers 0 to {num_workers - 1}")
    return list(dict.fromkeys(named))


def one_worker(worker: object, num_workers: int) -> int:
    """Return the index of the one worker that ``worker`` names; ValueError: there is no such worker."""
    named = worker_list(worker, num_workers)
    if len(named) != 1:
        raise ValueError(f"worker is one worker's index, not {worker!r}")
    return named[0]
