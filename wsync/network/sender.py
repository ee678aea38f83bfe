"""The trainer's end of lines to workers anywhere: words by one way, weights by another (``pair.py``).

Each worker has a *lane*, with at most one parcel under way; what comes after it waits, and a newer version takes an
older one's place there. So a slow worker delays nobody, finds the newest when it is ready, and memory is bounded: one
buffer for each parcel under way, one that waits, one that is being packed. Whoever waits for answers moves the lanes
on; while the trainer is away, a courier (`courier.py`) does.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from wsync.errors import SyncTimeout
from wsync.network.courier import Courier
from wsync.network.dispatch import Dispatch
from wsync.network.fast_sender import GroupFastSender
from wsync.network.forming import formed
from wsync.network.lanes import Flats, Lane, Parcel, require_room_for
from wsync.network.pair import Place
from wsync.sending.fast_path import FastEnd
from wsync.types import Ack
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.wire.lines import Lines
from wsync.wire.plan import Plan
from wsync.wire.words import TRANSACTION, Door, Kind, Message

_GRACE = 2.0  # seconds for a thread that has nothing to wait for any more


class GroupSender:
    """The trainer's end (a ``SenderEnd``).

    Args:
        num_workers: how many workers there can be.
        door: where they knock.
        place: makes a worker's line of tensors; is closed with this.
        checksum: whether each update is announced with a checksum, which workers verify; None: where it crosses a
            network.
    """

    def __init__(self, num_workers: int, door: Door, place: Place, *, checksum: bool | None = False) -> None:
        self._lines = Lines(door, num_workers, self)
        self._num_workers = num_workers
        self._place = place
        self._checksum = checksum
        self._layout: Layout | None = None
        self._lanes = [Lane() for _ in range(num_workers)]
        self._flats = Flats(place.room)
        self._staged: dict[int, dict[int, Parcel]] = {}  # transaction -> worker -> what it is to install
        self._lock = threading.RLock()
        self._dispatch = Dispatch(self._lines, self._lanes, self._flats)
        self._courier = Courier(self._lines, self._lock, self._dispatch.somebody_waits)
        self._left: list[threading.Thread] = []  # that form what nobody waits for any more; they end with the place
        self._closed = False

    @property
    def workers(self) -> Collection[int]:
        """Those that are connected and alive."""
        return self._lines.workers

    def propose(self, layout: Layout, version: int) -> None:
        """Ask those who are connected."""
        plan = Plan(layout, self._checksum, self._num_workers).dump()
        with self._lock:
            for worker in self.workers:
                self._lines.say(worker, Message(Kind.PROPOSE, worker, version, plan))

    def prepare(self, layout: Layout) -> None:
        """Tell those who are connected already."""
        with self._lock:
            self._layout = layout
            for worker in self.workers:
                self._lines.say(worker, Message(Kind.LAYOUT, worker, payload=self._plan(worker)))

    def admit(self, workers: Collection[int], sentinels: Mapping[int, int], deadline: float | None) -> None:
        """Let workers in until all of ``workers`` are there."""
        with self._lock:
            self._lines.admit(workers, sentinels, deadline)

    def forget(self, worker: int) -> None:
        """Hang up on a worker that is taken for dead."""
        with self._lock:
            self._lines.forget(worker)

    # --- what the lines tell (``lines.Owner``) ---

    def joining(self, worker: int, again: bool) -> Message:
        """Say what waits: the version that the worker is to have before it begins."""
        lane = self._lanes[worker]
        lane.generation += 1
        if again:
            lane.clear()
            if lane.latest is not None:
                lane.append(lane.latest)
        version = lane.waiting[0].version if lane.waiting else 0
        return Message(Kind.WELCOME, worker, version, self._plan(worker))

    def _plan(self, worker: int) -> bytes:
        return Plan(self._layout, self._checksum, self._num_workers, self._lanes[worker].generation).dump()

    def joined(self, worker: int, deadline: float | None) -> None:
        """Form the pair, and send what waits; if the worker dies meanwhile, whoever waits for its answer is told."""
        lane = self._lanes[worker]
        try:
            form = self._place.pair(worker, lane.generation, deadline)
            has_gone = partial(self._dispatch.has_gone, worker)
            lane.pair = formed(form, self._lines.signs_of(worker), has_gone, deadline, self._left)
        except (RuntimeError, TimeoutError) as error:
            if not self._dispatch.has_gone(worker):
                self._lines.forget(worker)
                raise SyncTimeout(
                    f"worker {worker} did not join its process group: {error}", {worker: str(error)}
                ) from error
        if lane.pair is not None:
            lane.checked = not lane.pair.in_memory if self._checksum is None else self._checksum
        self._dispatch.move_on(worker)
        self._courier.look_again()

    def left(self, worker: int) -> None:
        """End what was under way."""
        lane = self._lanes[worker]
        if lane.pair is not None:
            transit = lane.under_way
            if lane.pair.close(transit.works[0] if transit and transit.works else None) and transit is not None:
                self._flats.given_away.add(transit.parcel.slot)
            lane.pair = None
        lane.clear()

    def answered(self, worker: int, message: Message) -> None:
        """It has what was under way, or does not want it: the next, please."""
        lane = self._lanes[worker]
        if lane.under_way is not None and message.version >= lane.under_way.parcel.version:
            lane.under_way = None
            self._dispatch.move_on(worker)

    # --- slots ---

    def reserve(self, workers: Collection[int], deadline: float | None, *, keep: bool = False) -> Buffer:
        """A buffer that is not on its way to anybody, nor to be; the newest is always kept."""
        with self._lock:
            assert self._layout is not None, "prepare() comes first"
            taken = [parcel for lane in self._lanes for parcel in lane.parcels]
            staged = [parcel for parcels in self._staged.values() for parcel in parcels.values()]
            return self._flats.reserve(self._layout, taken + staged)

    def release(self, buffers: Sequence[Buffer]) -> None:
        """Free buffers that were reserved and not published."""
        with self._lock:
            self._flats.reserved.difference_update(buffer.slot for buffer in buffers)

    # --- updates ---

    def publish(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], acknowledge: bool) -> None:
        """Send a packed buffer to workers who are ready for it; others get it, or a newer one, when they are."""
        require_room_for(extra)
        self._hand_over(Parcel(Kind.NEWS, version, buffer.slot, extra), workers)

    def _hand_over(self, parcel: Parcel, workers: Collection[int]) -> None:
        with self._lock:
            self._dispatch.hand_over(parcel, workers)
            self._courier.go()

    def fast_path(self, *, acknowledge: bool) -> FastEnd | None:
        """The fast path, while everybody is there and ready, and nothing is kept for a decision."""
        if not acknowledge:
            return None
        with self._lock:
            layout, lanes = self._layout, self._lanes
            at_rest = len(self.workers) == self._num_workers and not self._staged and not self._courier.under_way
            if layout is None or not at_rest or any(lane.under_way or lane.waiting for lane in lanes):
                return None
            turns = self._flats.turns(layout, [lane.latest for lane in lanes if lane.latest])
            if turns is None:
                return None
            fast = GroupFastSender(self._lines, lanes, self._dispatch.lose, turns, layout.nbytes)
            return FastEnd(fast.update, fast.complete)

    def stage(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], transaction: int) -> None:
        """Send a packed buffer for workers to check and keep."""
        require_room_for(extra)
        parcel = Parcel(Kind.STAGE, version, buffer.slot, extra, TRANSACTION.pack(transaction))
        self._staged.setdefault(transaction, {}).update(dict.fromkeys(workers, parcel))
        self._hand_over(parcel, [worker for worker in workers if worker in self.workers])

    def decide(self, version: int, transaction: int) -> None:
        """Say the word."""
        with self._lock:
            for worker, staged in self._staged.pop(transaction).items():
                self._lanes[worker].latest = replace(staged, kind=Kind.NEWS, mark=b"")
                self._lines.say(worker, Message(Kind.DECIDE, worker, version, TRANSACTION.pack(transaction)))

    def drop(self, workers: Collection[int], transaction: int) -> None:
        """Have workers forget what was staged."""
        with self._lock:
            if self._staged.pop(transaction, None) is None:
                return
            for worker in workers:
                mark = TRANSACTION.pack(transaction)
                self._lanes[worker].drop(mark)
                self._lines.say(worker, Message(Kind.DROP, worker, payload=mark))

    def listen(self) -> None:
        """Take in what workers have said."""
        with self._lock:
            try:
                self._lines.listen()
            except BaseException:  # a signal has struck: what was read then is lost
                for lane in self._lanes:
                    lane.overdue = lane.under_way is not None
                raise

    def collect(self, workers: Collection[int], version: int, deadline: float | None) -> list[Ack]:
        """Wait for an answer, an error or the death of each of ``workers``."""
        with self._lock:
            heard: set[int] = set()
            try:
                acks = self._lines.collect(workers, version, deadline)
                heard.update(ack.worker for ack in acks)
                return acks
            finally:  # a signal may have struck: what was read then is lost
                for worker in set(workers) - heard:
                    self._lanes[worker].overdue = True

    def close(self) -> None:
        """Hang up on every worker, shut the door, and let groups, store and memory go."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._courier.dismiss()
            self._lines.close()
            self._place.close()
            self._flats.clear()
        self._courier.close()
        for thread in self._left:  # one that came back into an interpreter that is ending would abort the process
            thread.join(_GRACE)
