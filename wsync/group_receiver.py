"""A worker's end of the line to a trainer anywhere: words by one way, weights by ``torch.distributed``."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from wsync.binding import Binding
from wsync.checksum import CHECKSUM, damage
from wsync.deadlines import wait_readable
from wsync.errors import NotConnected, SyncTimeout
from wsync.group import Pair, Work, finish
from wsync.group_sender import TRANSACTION
from wsync.layout import Layout
from wsync.plan import Plan
from wsync.receiver_thread import Told
from wsync.transport import Closed, Decision, Event, Follower, News, Stage
from wsync.types import ANY_VERSION, Ack, Update
from wsync.words import Kind, Line, Message

JoinPair = Callable[[int, int, float | None], Pair]
"""``(worker, generation, deadline) -> pair``: the worker's half of the rendezvous of a pair."""


class Attach(Protocol):
    """How a backend has its receivers told."""

    def attach(self, line: Line, receiver: Told) -> None:
        """Call ``receiver.heed()`` when ``line`` has something to receive."""
        ...

    def detach(self, line: Line, receiver: Told) -> None:
        """No more; return when no such call is under way, unless this is one."""
        ...

    def alive(self, line: Line) -> bool:
        """Whether the other end of ``line`` is there, where nobody would tell that it is not."""
        ...


@dataclass(slots=True)
class _Slot:
    """One received version: the flat buffer, its views, and whether it is in use."""

    flat: Tensor
    views: Sequence[Tensor]
    used: bool = False


class GroupReceiver:
    """A worker's end (a ``ReceiverEnd``).

    The transfer of the next version is begun before it is announced, into a buffer that nobody uses; so weights arrive
    without a round trip. A model that is bound stays on the buffer of its version; the other one takes the next.

    Args:
        dial: makes the line to the sender.
        join_pair: makes the line of tensors.
        telling: who calls when the line has something.
        retains: whether the model stays bound to the buffer that it was given.
        device: where weights arrive.
        timeout: seconds that a transfer which was announced may take; None for no limit.
        ahead: begin a transfer before it is announced.
    """

    def __init__(
        self,
        dial: Callable[[int, float | None], Line],
        join_pair: JoinPair,
        telling: Attach,
        *,
        retains: bool,
        device: torch.device,
        timeout: float | None,
        ahead: bool = True,
    ) -> None:
        self._dial = dial
        self._join_pair = join_pair
        self._telling = telling
        self._retains = retains
        self._device = device
        self._timeout = timeout
        self._ahead = ahead
        self.layout: Layout | None = None
        self._checksum = False
        self._worker = -1
        self._knocked: Line | None = None  # and was not let in yet
        self._line: Line | None = None
        self._pair: Pair | None = None
        self._slots: list[_Slot] = []
        self._incoming: tuple[int, Work] | None = None  # begun, and not yet announced
        self._bound = -1  # the slot that the model is bound to
        self._pending: Update | None = None
        self._kept: dict[int, Update] = {}  # what is staged, by transaction
        self._said: Message | None = None  # the last answer
        self._lock = threading.Lock()  # slots and transfers: the acting thread installs, too

    def knock(self, worker_idx: int, deadline: float | None) -> Sequence[int]:
        """Say who is here."""
        self._knocked = self._dial(worker_idx, deadline)
        return self._knocked.signs

    def connect(self, worker_idx: int, deadline: float | None) -> None:
        """Knock, wait to be let in, form the pair; return with the first weights at hand, if the sender has any."""
        line, self._knocked = self._knocked or self._dial(worker_idx, deadline), None
        self._worker = worker_idx
        try:
            message = self._await(line, worker_idx, deadline)
            if message.kind is Kind.REFUSED:
                raise NotConnected(f"worker {worker_idx} was not let in: {message.payload.decode(errors='replace')}")
            plan = Plan.load(message.payload)
            try:
                self._pair = self._join_pair(worker_idx, plan.generation, deadline)
            except RuntimeError as error:
                raise NotConnected(f"worker {worker_idx} could not join its process group: {error}") from error
            self._line = line
            self._prepare(plan)
            if message.version:
                self._pending = self._take(self._await(line, worker_idx, deadline))
        except ValueError as error:
            self._drop_line(line)
            raise NotConnected(f"worker {worker_idx} does not understand the sender: {error}") from error
        except BaseException:
            self._drop_line(line)
            raise

    def _drop_line(self, line: Line) -> None:
        _say_goodbye(line)
        line.close()
        self._line = None

    def _await(self, line: Line, worker_idx: int, deadline: float | None) -> Message:
        if not wait_readable(line.signs, deadline):
            raise SyncTimeout(f"worker {worker_idx}: the sender did not answer: does it call connect() too?")
        message = line.receive()
        if message is None:
            raise NotConnected(f"worker {worker_idx} was not let in: the sender went away")
        return message

    def _connection(self) -> Line:
        if self._line is None:
            raise NotConnected("this worker is not connected: call connect(worker_idx=…) first")
        return self._line

    def feed(self, receiver: Follower) -> Follower:
        """There is no shorter way."""
        return receiver

    def arm(self, binding: Binding, staged: dict[int, Any]) -> None:
        """There is no shorter way."""

    def attach(self, receiver: Told) -> None:
        """As the backend does it."""
        self._telling.attach(self._connection(), receiver)

    def detach(self, receiver: Told) -> None:
        """As the backend does it."""
        if self._line is not None:
            self._telling.detach(self._line, receiver)

    def alive(self) -> bool:
        """As the backend finds out."""
        return self._line is None or self._telling.alive(self._line)

    def events(self) -> Sequence[Event]:
        """What one message says; of an announced version, when it is here."""
        message = self._connection().receive()
        if message is None or message.kind is Kind.BYE:
            return [Closed()]
        try:
            return self._events(message)
        except ConnectionError:
            return self._give_up()
        except ValueError as error:
            self.answer(Ack(self._worker, ANY_VERSION, f"it does not understand the sender: {error}"))
            return self._give_up()

    def _events(self, message: Message) -> Sequence[Event]:
        if message.kind is Kind.LAYOUT:
            self._prepare(Plan.load(message.payload))
            return []
        if message.kind is Kind.ASK:
            if self._said is not None:
                self._connection().send(self._said)
            return []
        if message.kind in (Kind.DECIDE, Kind.DROP):
            (transaction,) = _unpacked(TRANSACTION, message.payload)
            update = self._kept.pop(transaction, None)
            if update is not None and message.kind is Kind.DROP:
                self._free(update.slot)
            return [Decision(transaction, message.kind is Kind.DECIDE)]
        try:
            update = self._take(message)
        except RuntimeError:  # the line of tensors has broken, so there will be no more
            return self._give_up()
        if message.kind is Kind.NEWS:
            self._pending = update
            return [News()]
        (transaction,) = _unpacked(TRANSACTION, message.payload[: TRANSACTION.size])
        self._kept[transaction] = update
        return [Stage(transaction, update)]

    def _give_up(self) -> Sequence[Event]:
        """Hang up, so that the sender knows at once; what the model has it keeps."""
        line = self._connection()
        _say_goodbye(line)
        line.close()
        return [Closed()]

    # --- buffers ---

    def _prepare(self, plan: Plan) -> None:
        if plan.layout is None:
            return
        self.layout, self._checksum = plan.layout, plan.checksum
        if self._ahead:
            self._begin()

    def _begin(self) -> None:
        """Begin to receive the next version, unless that has been done."""
        with self._lock:
            if self._incoming is not None or self._pair is None:
                return
            layout = self.layout
            if layout is None:
                raise NotConnected("weights were announced before their layout")
            free = (index for index, slot in enumerate(self._slots) if not slot.used)
            index = next(free, len(self._slots))
            if index == len(self._slots):
                flat = torch.zeros(layout.nbytes, dtype=torch.uint8, device=self._device)
                self._slots.append(_Slot(flat, layout.views(flat)))
            self._slots[index].used = True
            self._incoming = index, self._pair.receive(self._slots[index].flat)

    def _take(self, message: Message) -> Update:
        """The version that ``message`` announces, when it has arrived."""
        if message.kind not in (Kind.NEWS, Kind.STAGE):
            raise ValueError(f"a message {message.kind.name} of {len(message.payload)} bytes")
        self._begin()
        assert self._incoming is not None, "begun just now"
        (index, work), self._incoming = self._incoming, None
        finish(work, self._timeout, self._device)
        said = message.payload[TRANSACTION.size :] if message.kind is Kind.STAGE else message.payload
        slot = self._slots[index]
        if not self._checksum:
            return Update(message.version, slot.views, said, index)
        (checksum,), extra = _unpacked(CHECKSUM, said[: CHECKSUM.size]), said[CHECKSUM.size :]
        wrong = damage(message.version, slot.flat, extra, checksum)
        return Update(message.version, slot.views, extra, index, damage=wrong)

    def _free(self, index: int) -> None:
        if index >= 0:
            with self._lock:
                self._slots[index].used = False

    # --- the gate's side ---

    def call(self, wanted: bool) -> None:
        """Weights come to the worker, whether it waits or not: it is always told."""

    def may_refuse(self) -> None:
        """Nobody writes what the model is bound to, until it is bound to something else."""

    def enter(self) -> Update | None:
        """What has arrived and is not installed."""
        update, self._pending = self._pending, None
        return update

    def installed(self, update: Update, error: str) -> None:
        """Free the buffer that is no longer needed."""
        if error or not self._retains:
            self._free(update.slot)
        else:
            self._free(self._bound)
            self._bound = update.slot

    def leave(self) -> None:
        """Nothing is borrowed."""

    def answer(self, ack: Ack, *, staged: bool = False) -> None:
        """Tell the sender, and be ready for the next version; if it is gone, whoever listens will notice."""
        kind = Kind.FAILED if ack.error else Kind.STAGED if staged else Kind.ACK
        self._said = Message(kind, ack.worker, ack.version, ack.error.encode(), ack.wait, ack.apply)
        try:
            self._connection().send(self._said)
            if self._ahead and self.layout is not None:
                self._begin()
        except (ConnectionError, RuntimeError):
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
        self._line = None
        with self._lock:
            self._incoming = None
            if self._pair is not None:
                self._pair.close()
                self._pair = None
            self._slots.clear()


def _say_goodbye(line: Line) -> None:
    """Tell the sender that this end leaves of its own will."""
    try:
        line.send(Message(Kind.BYE))
    except ConnectionError:
        return


def _unpacked(form: struct.Struct, data: bytes) -> tuple[int, ...]:
    if len(data) != form.size:
        raise ValueError(f"{len(data)} bytes where {form.size} were expected")
    return form.unpack(data)
