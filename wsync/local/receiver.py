"""A worker's end of the line to a trainer on its own machine."""

from __future__ import annotations

from collections.abc import Sequence

from wsync import native
from wsync.errors import NotConnected
from wsync.local.arena import Arena
from wsync.local.rendezvous import Endpoint, LocalLine, knock
from wsync.local.seat import Seat
from wsync.local.sender import STAGED
from wsync.receiving.events import Closed, Decision, Event, Follower, News, Proposal, SlowPath, Stage
from wsync.receiving.gate import process_gate
from wsync.receiving.receiver_thread import LineHandler, receiver_thread
from wsync.receiving.staged import staged
from wsync.types import ANY_VERSION, Ack, Update
from wsync.weights.binding import Binding
from wsync.weights.layout import Layout
from wsync.wire.entry import let_in
from wsync.wire.plan import Plan, proposed
from wsync.wire.words import Kind, Message, unpacked


class LocalReceiver:
    """A worker's end (a ``ReceiverEnd``).

    Args:
        endpoint: where the sender listens.
        retains: whether the model stays bound to the slot that it was given.
    """

    def __init__(self, endpoint: Endpoint, *, retains: bool) -> None:
        self._endpoint = endpoint
        self._retains = retains
        self._knocked: LocalLine | None = None  # and was not let in yet
        self._line: LocalLine | None = None
        self._arena: Arena | None = None
        self._layout: Layout | None = None
        self._worker = -1
        self._seat = native.seat() or Seat()
        self._armed: native.Tree | None = None  # how the seat finds the model's tensors
        self._checksum = False
        self._checked = 0  # the newest version whose checksum was found right
        self._wanted = True

    @property
    def layout(self) -> Layout | None:
        """What the weights look like; None until the sender knows."""
        return self._layout

    def _connection(self) -> LocalLine:
        if self._line is None:
            raise NotConnected("this worker is not connected: call connect(worker_idx=…) first")
        return self._line

    def knock(self, worker_idx: int, deadline: float | None) -> Sequence[int]:
        """Say who is here."""
        self._knocked = knock(self._endpoint, worker_idx, deadline)
        return self._knocked.signs

    def connect(self, worker_idx: int, deadline: float | None) -> None:
        """Knock, unless that has been done, and wait to be let in."""
        line, self._knocked = self._knocked or knock(self._endpoint, worker_idx, deadline), None
        try:
            message = let_in(line, worker_idx, deadline)
        except BaseException:
            line.close()
            raise
        self._worker, self._line = worker_idx, line
        try:
            self._unpack(message)
        except ValueError as error:
            self.close()
            raise NotConnected(f"worker {worker_idx} does not understand the sender: {error}") from error

    def _unpack(self, message: Message) -> None:
        plan = Plan.load(message.payload)
        if plan.layout is not None:
            if len(message.fds) != 2 or self._worker >= plan.workers:
                raise ValueError("a layout comes with its two memory files, to a worker that has a place there")
            arena = Arena(plan.layout, plan.workers, (message.fds[0], message.fds[1]))
            arena.map_all()
            self._layout, self._checksum = plan.layout, plan.checksum is True
            self._switch = arena.switches[self._worker]
            self._seat.take(*self._switch.place)
            self._seat.hold = self._retains and self._checksum
            self._switch.call(self._wanted)
            self._arena = arena  # last: an acting thread that sees it uses the others

    def feed(self, receiver: SlowPath) -> Follower:
        """The seat: most forwards find nothing new, and most news are usual."""
        self._seat.follow(receiver, process_gate().turnstile)
        return self._seat

    def arm(self, binding: Binding) -> None:
        """Have the seat install what comes next, unless it has to be checked, or may be refused."""
        if binding.tree is self._armed or self._arena is None:
            return
        self._armed, installer = binding.tree, binding.installer()
        self._seat.disarm()
        if installer is None or self._checksum or self._seat.hold:
            return
        line = self._connection().fileno()
        self._seat.arm(installer, self._arena.rooms, staged, line, self._worker, self._retains)

    def attach(self, receiver: LineHandler) -> None:
        """Have the process's thread listen."""
        receiver_thread().listen(self._connection(), receiver)

    def detach(self, receiver: LineHandler) -> None:
        """Listen no more."""
        receiver_thread().unregister(receiver)

    def alive(self) -> bool:
        """The thread is told of a death."""
        return True

    def events(self) -> Sequence[Event]:
        """What one message says."""
        message = self._connection().receive()
        if message is None:
            return [Closed()]
        try:
            return self._events(message)
        except ValueError as error:
            self.answer(Ack(self._worker, ANY_VERSION, f"it does not understand the sender: {error}"))
            return [Closed()]

    def _events(self, message: Message) -> Sequence[Event]:
        if message.kind is Kind.LAYOUT:
            self._unpack(message)
            return []
        if message.kind is Kind.PROPOSE:
            return [Proposal(message.version, proposed(message.payload))]
        if message.kind is Kind.NEWS:
            return [News()]
        if message.kind is Kind.DROP:
            return [Decision(message.version, install=False)]
        if message.kind is Kind.STAGE:
            transaction, slot = unpacked(STAGED, message.payload)
            return [Stage(transaction, self._update(message.version, slot, acknowledge=True))]
        raise ValueError(f"a message {message.kind.name}")

    def _update(self, version: int, slot: int, acknowledge: bool) -> Update:
        if self._arena is None:
            raise NotConnected("weights were announced before their layout")
        views, extra = self._arena.views(slot), self._arena.read_extra(slot)
        if self._checksum and version != self._checked:
            damage = self._arena.damage(version, slot, extra)
            if damage:
                return Update(version, views, extra, slot, acknowledge, damage)
            self._checked = version  # staged, then decided: once is enough
        return Update(version, views, extra, slot, acknowledge)

    def call(self, wanted: bool) -> None:
        """Set this worker's word for it, as soon as there is one."""
        self._wanted = wanted
        if self._arena is not None:
            self._switch.call(wanted)

    def may_refuse(self) -> None:
        """Hold what the model is bound to between forwards as well."""
        self._seat.hold = self._retains

    def enter(self) -> Update | None:
        """Look at the switch."""
        if self._arena is None:
            return None
        known = self._seat.version if self._seat.version > self._seat.refused else self._seat.refused
        version, slot, acknowledge = self._switch.enter(known, self._seat.slot, hold=self._retains)
        self._seat.busy = slot >= 0
        return self._update(version, slot, acknowledge) if version > known else None

    def installed(self, update: Update, error: str) -> None:
        """Remember where the model is bound; a model with memory of its own gives the slot back at once."""
        if error:
            self._seat.refused = update.version
        else:
            self._seat.version = update.version
            if self._retains:
                self._seat.slot = update.slot
        if not self._retains:
            self.leave()
        elif not error and not self._seat.hold:
            self._switch.let_go()

    def leave(self) -> None:
        """Give back what the forward used. A model that may refuse the next version keeps the one it is on."""
        if not self._seat.busy:
            return
        self._seat.busy = False
        keep = self._seat.slot if self._seat.hold or self._seat.refused > self._seat.version else -1
        if self._switch.leave(keep):
            self._say(Message(Kind.FREED, self._worker))

    def answer(self, ack: Ack, *, staged: bool = False) -> None:
        """Tell the sender."""
        self._say(Message.answer(ack, staged))

    def _say(self, message: Message) -> None:
        """Tell the sender; if it is gone there is nobody to tell, and the thread will notice."""
        try:
            self._connection().send(message)
        except ConnectionError:
            return

    def close(self) -> None:
        """Say good-bye and hang up."""
        if self._knocked is not None:
            self._knocked.close()
            self._knocked = None
        if self._line is None:
            return
        self._say(Message(Kind.BYE, self._worker))
        self._line.close()
        self._line = None
        self._seat.quit()
        self._seat, self._checked = native.seat() or Seat(), 0  # whoever comes back is given what it has had, too
        self._armed = None
        if self._arena is not None:
            self._arena.close()
            self._arena = None
