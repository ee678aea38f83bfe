"""The fast path of a trainer's updates over a network: to all workers at once, each of which has had the last one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from wsync import native
from wsync.deadlines import deadline_in
from wsync.network.lanes import Lane, Parcel, Transit
from wsync.sending.fast_path import PartialDelivery
from wsync.sending.in_flight import InFlight
from wsync.types import SyncReport
from wsync.weights.packing import Buffer
from wsync.wire.checksum import seal
from wsync.wire.lines import Lines
from wsync.wire.words import Kind, Message


class GroupFastSender:
    """Updates without extra state, which can be packed as plain bytes.

    Lanes are left as the slow path leaves them: whatever comes next, it finds them so.

    Args:
        lines: to all workers.
        lanes: theirs, at rest.
        lose: hangs up on a worker whose line of tensors has broken.
        turns: where the newest version lies, and a free one: they take turns.
        nbytes: of one copy of the weights.
    """

    def __init__(
        self,
        lines: Lines,
        lanes: Sequence[Lane],
        lose: Callable[[int, RuntimeError], None],
        turns: tuple[Buffer, Buffer],
        nbytes: int,
    ) -> None:
        self._lines = lines
        self._lanes = lanes
        self._lose = lose
        self._nbytes = nbytes
        self._checked = any(lane.checked for lane in lanes)
        self._workers = range(len(lanes))
        self._turns = list(turns)
        self._contents = {buffer.slot: buffer.flat.numpy() for buffer in turns}

    def update(
        self, found: native.Tree | list[Tensor], version: int, timeout: float | None, began: float
    ) -> SyncReport | tuple[Any, ...] | None:
        """Deliver an update, and wait for all answers: see ``fast_path.FastUpdate``."""
        tensors = found if isinstance(found, list) else found.tensors()
        buffer = self._turns[1]
        if tensors is None or any([lane.under_way for lane in self._lanes]):
            return None
        extracted = time.perf_counter()
        if buffer.room is None or not buffer.room.fill(tensors):
            return None
        packed = time.perf_counter()
        self._turns.reverse()
        self._send(Parcel(Kind.NEWS, version, buffer.slot), buffer)
        sent = time.perf_counter()
        try:
            acks = self._lines.collect(self._workers, version, deadline_in(timeout))
        except BaseException:  # a signal has struck: what was read then is lost
            for lane in self._lanes:
                lane.overdue = lane.under_way is not None
            raise
        cost = InFlight(
            version=version,
            workers=self._workers,
            blobs=(),
            acknowledge=True,
            deadline=None,
            started=began,
            extract=extracted - began,
            wait=0.0,
            pack=packed - extracted,
            transfer=sent - packed,
        )
        report = cost.report(self._nbytes, acks, time.perf_counter())
        if len(acks) == len(self._lanes) and not any([ack.died or ack.error for ack in acks]):
            return report
        for ack in acks:
            self._lines.note(ack)
        return report, buffer.slot, [], b""

    def _send(self, parcel: Parcel, buffer: Buffer) -> None:
        """The data first: who is told of it then mostly has it, and a checksum is made while it is on its way."""
        try:
            for worker, lane in enumerate(self._lanes):
                lane.latest = parcel
                if lane.pair is None:  # the worker was lost, just now
                    continue
                transit = lane.under_way = Transit(parcel)
                try:
                    lane.pair.send(buffer.flat, transit.works)
                except RuntimeError as error:
                    self._lose(worker, error)
        finally:  # a signal may have struck: what was sent has to be announced
            plain = sealed = Message(Kind.NEWS, -1, parcel.version)
            if self._checked:
                parcel.seal = seal(self._contents[buffer.slot])
                sealed = plain._replace(payload=parcel.seal)
            for worker, lane in enumerate(self._lanes):
                transit = lane.under_way
                if transit is not None and transit.works:
                    self._lines.say(worker, sealed if lane.checked else plain)
                    transit.announced = True

    def complete(self, partial: PartialDelivery, version: int) -> None:
        """Nothing is left to be done: what has been answered can be heard again."""
