"""The trainer's end of the lines to workers on its own machine: sockets for words, an arena for weights.

Shared by the backends whose workers run on the trainer's machine. They differ in one word, ``retains``: whether a model
stays bound to the slot that it was given (shared memory), or copies it out (multiprocess).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from functools import partial

from torch import Tensor

from wsync.deadlines import remaining
from wsync.errors import NotConnected, SyncTimeout
from wsync.local.arena import Arena
from wsync.local.rendezvous import Endpoint, Listener
from wsync.sending.fast_path import FastEnd, PartialDelivery
from wsync.types import ANY_VERSION, Ack
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.wire.lines import Lines, names
from wsync.wire.plan import Plan
from wsync.wire.words import Kind, Message

_SWITCH_TIMEOUT = 5.0  # seconds; it is held for a microsecond, unless its holder was stopped right then
STAGED = struct.Struct("<QI")  # transaction, slot


class LocalSender:
    """The trainer's end (a ``SenderEnd``).

    Args:
        num_workers: how many workers there can be.
        retains: whether workers stay bound to slots.
        checksum: whether each update is sealed with a checksum, which workers verify.
    """

    def __init__(self, num_workers: int, *, retains: bool, checksum: bool = False) -> None:
        self._num_workers = num_workers
        self._retains = retains
        self._checksum = checksum
        self._door = Listener()
        self._lines = Lines(self._door, num_workers, self)
        self._arena: Arena | None = None
        self._layout: Layout | None = None
        self._reserved: set[int] = set()
        self._staged: dict[int, dict[int, int]] = {}  # transaction -> worker -> slot

    @property
    def endpoint(self) -> Endpoint:
        """Where workers find this end."""
        return self._door.endpoint

    @property
    def workers(self) -> Collection[int]:
        """Those that are connected and alive."""
        return self._lines.workers

    @property
    def arena(self) -> Arena:
        """The slots."""
        if self._arena is None:
            raise NotConnected("there are no shared weights yet: connect() or send() makes them")
        return self._arena

    def propose(self, layout: Layout, version: int) -> None:
        """Ask those who are connected."""
        plan = Plan(layout, self._checksum, self._num_workers).dump()
        for worker in self.workers:
            self._lines.say(worker, Message(Kind.PROPOSE, worker, version, plan))

    def prepare(self, layout: Layout) -> None:
        """Make the arena, and tell those who are connected already."""
        self._layout = layout
        self._arena = Arena(layout, self._num_workers)
        for _ in range(2 if self._retains else 1):  # the update after the first one needs another in any case
            self._arena.grow()
        for worker in self.workers:
            self._lines.say(worker, self._plan(Kind.LAYOUT, worker))

    def _plan(self, kind: Kind, worker: int) -> Message:
        fds = () if self._arena is None else self._arena.fds
        plan = Plan(self._layout, self._checksum, self._num_workers)
        return Message(kind, worker, payload=plan.dump(), fds=fds)

    def admit(self, workers: Collection[int], sentinels: Mapping[int, int], deadline: float | None) -> None:
        """Let workers in until all of ``workers`` are there."""
        self._lines.admit(workers, sentinels, deadline)

    def forget(self, worker: int) -> None:
        """Hang up on a worker that is taken for dead."""
        self._lines.forget(worker)

    # --- what the lines tell (``lines.Owner``) ---

    def joining(self, worker: int, again: bool) -> Message:
        """Give a successor what its predecessor was to have."""
        if again and self._arena is not None:
            self._switch(worker, *self._arena.switches[worker].published(), acknowledge=True)
        return self._plan(Kind.WELCOME, worker)

    def joined(self, worker: int, deadline: float | None) -> None:
        """The welcome was all."""

    def left(self, worker: int) -> None:
        """Free what its forward used, and keep what its successor will be given."""
        if self._arena is not None:
            self._arena.switches[worker].vacate(_SWITCH_TIMEOUT)

    def answered(self, worker: int, message: Message) -> None:
        """The answer is all."""

    # --- slots ---

    def reserve(self, workers: Collection[int], deadline: float | None, *, keep: bool = False) -> Buffer:
        """A slot that no switch names and no forward uses; of copied ones, those of ``workers`` may be written again.

        Whoever is not among these still has to be replaced by a successor with the same weights.
        """
        arena = self.arena
        again = range(self._num_workers) if self._retains or keep else {*range(self._num_workers)} - {*workers}
        while True:
            named, used, held = arena.occupied(again)
            named |= self._reserved
            slot = arena.free_slot(named | used | held)
            if slot is None and arena.slots < len(named | held) + (2 if self._retains else 1):
                slot = arena.grow()
            if slot is not None:
                self._reserved.add(slot)
                return arena.buffer(slot)
            self._await_free(deadline)

    def release(self, buffers: Sequence[Buffer]) -> None:
        """Free slots that were reserved and not published."""
        self._reserved.difference_update(buffer.slot for buffer in buffers)

    def _await_free(self, deadline: float | None) -> None:
        """Wait until one of the forwards that block all slots has ended, or its worker has died."""
        left = remaining(deadline)
        blocking = [worker for worker in self.workers if self.arena.switches[worker].await_free(left)]
        if blocking and not self._lines.read(deadline):
            raise SyncTimeout(
                f"no slot came free in time: worker(s) {names(blocking)} are still inside a forward, or stopped",
                {worker: "holds its weights in a forward that does not end" for worker in blocking},
            )

    def published_views(self) -> list[Sequence[Tensor]]:
        """The slots that workers are pointed to, each once, as tensors in the layout's order.

        They are the caller's own, who may share them with another process: that moves them.
        """
        published = [switch.published() for switch in self.arena.switches]
        return [self.arena.mapped(slot).views for slot in sorted({slot for version, slot in published if version})]

    # --- updates ---

    def publish(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], acknowledge: bool) -> None:
        """Point the switches to a packed slot; call those who are to answer, or want to be called."""
        self._write(buffer.slot, extra)
        for worker in workers:
            self._switch(worker, version, buffer.slot, acknowledge)
        self._reserved.discard(buffer.slot)

    def fast_path(self, *, acknowledge: bool) -> FastEnd | None:
        """The fast path, while everybody is there, and nothing is sealed, or kept for a decision."""
        descriptors = self._lines.descriptors
        if self._checksum or self._reserved or not descriptors:
            return None
        update = self.arena.update(descriptors, self._retains, acknowledge)
        return None if update is None else FastEnd(update, partial(self._complete, acknowledge))

    def _complete(self, acknowledge: bool, delivery: PartialDelivery, version: int) -> None:
        """Switch whom the fast path could not switch at once, and remember who has answered."""
        for worker in delivery.others:
            self._switch(worker, version, delivery.slot, acknowledge)
        for worker, answered in enumerate(delivery.answered):
            if answered:
                self._lines.note(Ack(worker, version))

    def _write(self, slot: int, extra: bytes) -> None:
        """What belongs to the weights in a slot."""
        self.arena.write_extra(slot, extra)
        if self._checksum:
            self.arena.seal(slot, extra)

    def _switch(self, worker: int, version: int, slot: int, acknowledge: bool) -> None:
        try:
            wants_call = self.arena.switches[worker].publish(version, slot, acknowledge, _SWITCH_TIMEOUT)
        except SyncTimeout as error:
            self._lines.note(Ack(worker, ANY_VERSION, error=f"could not be switched: {error}"))
            return
        if acknowledge or wants_call:
            self._lines.say(worker, Message(Kind.NEWS, worker, version))

    def stage(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], transaction: int) -> None:
        """Have workers check a packed slot; it stays reserved until the decision."""
        self._write(buffer.slot, extra)
        for worker in workers:
            self._staged.setdefault(transaction, {})[worker] = buffer.slot
            self._lines.say(worker, Message(Kind.STAGE, worker, version, STAGED.pack(transaction, buffer.slot)))

    def decide(self, version: int, transaction: int) -> None:
        """The switch is the decision: a worker that sees one of a transaction's versions in it installs them all."""
        staged = self._staged.pop(transaction)
        for worker, slot in staged.items():
            self._switch(worker, version, slot, acknowledge=True)
        self._reserved.difference_update(staged.values())

    def drop(self, workers: Collection[int], transaction: int) -> None:
        """Have workers forget what was staged, and free its slots."""
        staged = self._staged.pop(transaction, {})
        for worker in workers:  # without payload, so that it waits for nobody: heard or not, it will not be decided
            self._lines.say(worker, Message(Kind.DROP, worker, transaction))
        self._reserved.difference_update(staged.values())

    def listen(self) -> None:
        """Take in what workers have said."""
        self._lines.listen()

    def collect(self, workers: Collection[int], version: int, deadline: float | None) -> list[Ack]:
        """Wait for an answer, an error or the death of each of ``workers``."""
        return self._lines.collect(workers, version, deadline)

    def close(self) -> None:
        """Hang up on every worker, shut the door, and let the memory go."""
        arena, self._arena = self._arena, None  # first: a forked child that closes leaves the workers' words alone
        self._lines.close()
        if arena is not None:
            arena.close()
