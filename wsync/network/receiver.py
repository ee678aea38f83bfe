"""A worker's end of the line to a trainer anywhere: words by one way, weights by ``torch.distributed``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from wsync import native
from wsync.errors import NotConnected, WeightSyncError
from wsync.network.fast_receiver import GroupFastReceiver, WorkersLine
from wsync.network.forming import FormPair, formed_beside
from wsync.network.landing import Landing
from wsync.network.pair import Incoming
from wsync.receiving.events import Closed, Decision, Event, Follower, News, Proposal, SlowPath, Stage
from wsync.receiving.receiver_thread import LineHandler
from wsync.types import ANY_VERSION, Ack, Update
from wsync.weights.binding import Binding
from wsync.weights.layout import Layout
from wsync.wire.entry import await_word, let_in
from wsync.wire.plan import Plan, proposed
from wsync.wire.words import TRANSACTION, Kind, Line, Message, unpacked


class GroupReceiver:
    """A worker's end (a ``ReceiverEnd``). A model that is bound stays on the buffer of its version.

    Args:
        dial: makes the line to the sender.
        form_pair: makes the line of tensors.
        retains: whether the model stays bound to the buffer that it was given.
        device: where weights arrive.
        timeout: seconds that a transfer which was announced may take; None for no limit.
        ahead: begin a transfer before it is announced.
    """

    def __init__(
        self,
        dial: Callable[[int, float | None], WorkersLine],
        form_pair: FormPair[Incoming],
        *,
        retains: bool,
        device: torch.device,
        timeout: float | None,
        ahead: bool = True,
    ) -> None:
        self._dial = dial
        self._form_pair = form_pair
        self._retains = retains
        self.landing = Landing(device, timeout, ahead=ahead)
        self.worker = -1
        self.pending: Update | None = None  # it has arrived, and is not installed
        self._knocked: WorkersLine | None = None  # and was not let in yet
        self._line: WorkersLine | None = None
        self._fast: GroupFastReceiver | None = None
        self._armed: native.Tree | None = None  # how the fast path finds the model's tensors
        self._bound = -1  # the buffer that the model is bound to
        self._kept: dict[int, Update] = {}  # what is staged, by transaction
        self.said: Message | None = None  # the last answer

    @property
    def layout(self) -> Layout | None:
        """What the weights look like; None until the sender knows."""
        return self.landing.layout

    def knock(self, worker_idx: int, deadline: float | None) -> Sequence[int]:
        """Say who is here."""
        self._knocked = self._dial(worker_idx, deadline)
        return self._knocked.signs

    def connect(self, worker_idx: int, deadline: float | None) -> None:
        """Knock, wait to be let in, form the pair; return with the first weights at hand, if the sender has any."""
        line, self._knocked = self._knocked or self._dial(worker_idx, deadline), None
        self.worker = worker_idx
        try:
            self._join(line, worker_idx, deadline)
        except BaseException:
            _say_goodbye(line)
            line.close()
            self.landing.close()
            raise
        self._line = line

    def _join(self, line: Line, worker_idx: int, deadline: float | None) -> None:
        message = let_in(line, worker_idx, deadline)
        try:
            plan = Plan.load(message.payload)
            form = self._form_pair(worker_idx, plan.generation, deadline)
            self.landing.join(formed_beside(line, form, worker_idx, deadline))
            self.landing.prepare(plan)
            self.pending = self._take(await_word(line, worker_idx, deadline)) if message.version else None
        except WeightSyncError:
            raise
        except ValueError as error:
            raise NotConnected(f"worker {worker_idx} does not understand the sender: {error}") from error
        except RuntimeError as error:
            raise NotConnected(f"worker {worker_idx}'s process group was not formed, or broke: {error}") from error

    def _connection(self) -> WorkersLine:
        if self._line is None:
            raise NotConnected("this worker is not connected: call connect(worker_idx=…) first")
        return self._line

    def feed(self, receiver: SlowPath) -> Follower:
        """The fast path, once it is armed."""
        self._fast = GroupFastReceiver(receiver, self, self._connection())
        return self._fast

    def arm(self, binding: Binding) -> None:
        """Have the fast path taken by what comes next, if it comes into the main memory."""
        if self._fast is None or binding.tree is self._armed:
            return
        self._armed = binding.tree
        at_hand = all(berth.content is not None for berth in self.landing.berths)
        self._fast.arm(binding.installer() if at_hand else None)

    def attach(self, receiver: LineHandler) -> None:
        """As the line does it."""
        self._connection().attach(receiver)

    def detach(self, receiver: LineHandler) -> None:
        """As the line does it."""
        if self._line is not None:
            self._line.detach(receiver)

    def alive(self) -> bool:
        """As the line finds out."""
        return self._line is None or self._line.alive()

    def events(self) -> Sequence[Event]:
        """What one message says; of an announced version, when it is here."""
        return self.understand(self._connection().receive())

    def understand(self, message: Message | None, index: int | None = None) -> Sequence[Event]:
        """What a message says; ``index`` is the buffer in which what it announces has arrived, if it has."""
        if message is None or message.kind is Kind.BYE:
            return [Closed()]
        try:
            return self._events(message, index)
        except ConnectionError:
            return self.give_up()
        except ValueError as error:
            self.answer(Ack(self.worker, ANY_VERSION, f"it does not understand the sender: {error}"))
            return self.give_up()

    def _events(self, message: Message, index: int | None) -> Sequence[Event]:
        if message.kind is Kind.LAYOUT:
            self.landing.prepare(Plan.load(message.payload))
            return []
        if message.kind is Kind.PROPOSE:
            return [Proposal(message.version, proposed(message.payload))]
        if message.kind is Kind.ASK:
            if self.said is not None:
                self._connection().send(self.said)
            return []
        if message.kind in (Kind.DECIDE, Kind.DROP):
            (transaction,) = unpacked(TRANSACTION, message.payload)
            update = self._kept.pop(transaction, None)
            if update is not None and message.kind is Kind.DROP:
                self.landing.free(update.slot)
            return [Decision(transaction, message.kind is Kind.DECIDE)]
        try:
            update = self._take(message, index)
        except RuntimeError:  # the line of tensors has broken, so there will be no more
            return self.give_up()
        if update is None:
            return []
        if message.kind is Kind.NEWS:
            self.pending, older = update, self.pending
            if older is not None and older.slot != update.slot:  # an interrupt struck, and nobody has tried again
                self.landing.free(older.slot)
            return [News()]
        (transaction,) = unpacked(TRANSACTION, message.payload[: TRANSACTION.size])
        self._kept[transaction] = update
        return [Stage(transaction, update)]

    def give_up(self) -> Sequence[Event]:
        """Hang up, so that the sender knows at once; what the model has it keeps."""
        line = self._connection()
        _say_goodbye(line)
        line.close()
        return [Closed()]

    def _take(self, message: Message, index: int | None = None) -> Update | None:
        """The version that ``message`` announces, when it has arrived; None if it was announced, and taken, before."""
        if message.kind not in (Kind.NEWS, Kind.STAGE):
            raise ValueError(f"a message {message.kind.name} of {len(message.payload)} bytes")
        index = self.landing.take(message.version) if index is None else index
        if index < 0:
            return None
        said = message.payload[TRANSACTION.size :] if message.kind is Kind.STAGE else message.payload
        return self.landing.read(index, message.version, said)

    # --- the gate's side ---

    def call(self, wanted: bool) -> None:
        """Weights come to the worker, whether it waits or not: it is always told."""

    def may_refuse(self) -> None:
        """Nobody writes what the model is bound to, until it is bound to something else."""

    def enter(self) -> Update | None:
        """What has arrived and is not installed. It stays so until it is: a signal may strike in the middle."""
        return self.pending

    def installed(self, update: Update, error: str) -> None:
        """Free the buffer that is no longer needed."""
        self.said = Message.answer(Ack(self.worker, update.version, error))
        if error:
            self.landing.free(update.slot)
        else:
            self.stay(update.slot)
        if self.pending is update:
            self.pending = None

    def stay(self, index: int) -> None:
        """The model has what is in a buffer; free the one that is no longer needed."""
        if not self._retains:
            self.landing.free(index)
        elif index != self._bound:  # else it is told once more, by whoever was interrupted
            self.landing.free(self._bound)
            self._bound = index

    def leave(self) -> None:
        """Nothing is borrowed."""

    def answer(self, ack: Ack, *, staged: bool = False) -> None:
        """Tell the sender, and be ready for the next version; if it is gone, whoever listens will notice."""
        self.say(Message.answer(ack, staged))

    def say(self, answer: Message) -> None:
        """``answer``, in the words of the line."""
        self.said = answer
        try:
            self._connection().send(answer)
        except ConnectionError:
            return
        try:
            self.landing.expect()
        except RuntimeError:  # the line of tensors has broken, as who takes the next version from it will find
            return

    def close(self) -> None:
        """Say good-bye and hang up."""
        if self._knocked is not None:
            _say_goodbye(self._knocked)  # it may yet be let in, where nothing else tells that it has gone (RPC)
            self._knocked.close()
            self._knocked = None
        if self._line is None:
            return
        _say_goodbye(self._line)
        self._line.close()
        self._line = self._fast = self._armed = self.pending = self.said = None
        self._kept.clear()
        self._bound = -1
        self.landing.close()


def _say_goodbye(line: Line) -> None:
    """Tell the sender that this end leaves of its own will."""
    try:
        line.send(Message(Kind.BYE))
    except ConnectionError:
        return
