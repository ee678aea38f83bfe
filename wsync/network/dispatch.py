"""Brings parcels on their way, lane by lane: says that they come, and begins their transfers."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from wsync.network.lanes import Flats, Lane, Parcel, Transit
from wsync.wire.lines import Lines
from wsync.wire.words import Kind, Message


class Dispatch:
    """What moves the lanes on. Called with the lock of whoever owns them.

    Args:
        lines: to all workers.
        lanes: theirs.
        flats: where parcels lie.
    """

    def __init__(self, lines: Lines, lanes: Sequence[Lane], flats: Flats) -> None:
        self._lines, self._lanes, self._flats = lines, lanes, flats

    def hand_over(self, parcel: Parcel, workers: Collection[int]) -> None:
        """Send a parcel to those who are ready for it, and have it wait for others; it is reserved no more."""
        if any(self._lanes[worker].checked for worker in workers):
            self._flats.seal(parcel)
        for worker in workers:
            lane = self._lanes[worker]
            lane.append(parcel)
            if lane.under_way is not None and lane.overdue:
                lane.overdue = False
                self._lines.say(worker, Message(Kind.ASK, worker))  # its answer may have been lost
            self.move_on(worker)
        self._flats.reserved.discard(parcel.slot)

    def move_on(self, worker: int) -> None:
        """Send what is next; or what is left to be done of what is under way, where a signal has struck."""
        lane = self._lanes[worker]
        if lane.pair is None:
            return
        if lane.under_way is None:
            if not lane.waiting:
                return
            lane.under_way = Transit(lane.waiting.popleft())
        transit, parcel = lane.under_way, lane.under_way.parcel
        if lane.pair.in_memory:
            self._begin(worker, transit)
        if not transit.announced:
            said = self._flats.payload(parcel, lane.checked)
            self._lines.say(worker, Message(parcel.kind, worker, parcel.version, said))
            transit.announced = True
        self._begin(worker, transit)

    def _begin(self, worker: int, transit: Transit) -> None:
        """Begin a transfer, unless it has begun, or the worker has gone."""
        pair = self._lanes[worker].pair
        if pair is None or transit.works:
            return
        try:
            pair.send(self._flats.flat(transit.parcel.slot), transit.works)
        except RuntimeError as error:
            self.lose(worker, error)

    def lose(self, worker: int, error: RuntimeError) -> None:
        """A worker's line of tensors has broken."""
        if not self.has_gone(worker):
            self._lines.lose(worker, f"its process group has broken: {error}")

    def has_gone(self, worker: int) -> bool:
        """Whether a worker has gone: it may have said so, and why."""
        self._lines.listen()
        return worker not in self._lines.workers

    def somebody_waits(self) -> bool:
        """Whether anything waits for a worker that is there."""
        return any(lane.waiting for lane in self._lanes if lane.pair is not None)
