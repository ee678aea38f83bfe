"""What a backend is: the two ends of a line, and nothing else.

Everything that all backends do (versions, checks, deadlines, reports, errors, the thread) stands above them, in
``sender.py`` and ``receiver.py``. A backend says how bytes and an instruction reach a worker, and how an answer comes
back: a new backend is one file with a ``SenderEnd``, a ``ReceiverEnd`` and a scheme that names them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from wsync.receiving.events import Event, Follower, SlowPath
from wsync.receiving.receiver_thread import LineHandler
from wsync.sending.fast_path import FastEnd
from wsync.types import Ack, Update
from wsync.weights.binding import Binding
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer


class SenderEnd(Protocol):
    """The trainer's end: all workers of one model."""

    @property
    def workers(self) -> Collection[int]:
        """Those that are connected and alive."""
        ...

    def prepare(self, layout: Layout) -> None:
        """The layout is known: make room, and tell those who are connected already."""
        ...

    def admit(self, workers: Collection[int], sentinels: Mapping[int, int], deadline: float | None) -> None:
        """The rendezvous: return when all of ``workers`` have connected.

        Raises:
            SyncTimeout: some never came; the message names them.
            WorkerDied: a worker's ``sentinel`` fired first.
        """
        ...

    def forget(self, worker: int) -> None:
        """Hang up on a worker that is taken for dead, if it has not hung up: what it may yet say counts for nothing."""
        ...

    def reserve(self, workers: Collection[int], deadline: float | None, *, keep: bool = False) -> Buffer:
        """Room for an update of ``workers`` that no worker reads, waiting for a forward to end if need be.

        With ``keep`` not the room either that has what workers were last given, even if they have copied it: the new
        version may be dropped, and whoever comes in a dead worker's place must then be given the old one.

        Raises:
            SyncTimeout: there was none before the deadline; names who holds it.
        """
        ...

    def release(self, buffers: Sequence[Buffer]) -> None:
        """Take back what was reserved and not published."""
        ...

    def publish(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], acknowledge: bool) -> None:
        """Hand a packed buffer to ``workers``: from now on they will install it. Does not wait for them.

        Some may have gone: who comes in their place is given it.
        """
        ...

    def fast_path(self, *, acknowledge: bool) -> FastEnd | None:
        """``reserve``, pack, ``publish`` and ``collect`` in one, for all workers, without extra state.

        Good until anything else is asked of this end. None where there is no such path, or somebody is missing.
        """
        ...

    def stage(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], transaction: int) -> None:
        """Have ``workers`` check a packed buffer, and keep it ready beside the live weights."""
        ...

    def decide(self, version: int, transaction: int) -> None:
        """Have the workers install what was staged, with everything else that is staged in the same transaction."""
        ...

    def drop(self, workers: Collection[int], transaction: int) -> None:
        """Have ``workers`` forget what was staged."""
        ...

    def listen(self) -> None:
        """Take in what workers have said, without waiting.

        A worker whose answers nobody reads would come to wait, inside its gate, for room to give one more.
        """
        ...

    def collect(self, workers: Collection[int], version: int, deadline: float | None) -> list[Ack]:
        """The answers of ``workers`` to ``version`` (or a newer one): their acks, errors or deaths, one each.

        Waits for those who have not answered until ``deadline``; who is missing in the result has not answered.
        """
        ...

    def close(self) -> None:
        """Let everything go; harmless when repeated."""
        ...


class ReceiverEnd(Protocol):
    """A worker's end."""

    @property
    def layout(self) -> Layout | None:
        """What the weights look like; None until the sender knows."""
        ...

    def knock(self, worker_idx: int, deadline: float | None) -> Sequence[int]:
        """Begin ``connect`` and do not wait for the sender: descriptors, one of which is readable when it has answered.

        Raises:
            NotConnected: no sender is there.
        """
        ...

    def connect(self, worker_idx: int, deadline: float | None) -> None:
        """The rendezvous: return when the sender has let this worker in.

        Raises:
            NotConnected: no sender is there, or it refused; the message says why.
            SyncTimeout: it did not answer in time.
        """
        ...

    def feed(self, receiver: SlowPath) -> Follower:
        """What the gate shall ask, and who is told: ``receiver``, or a faster path to the same."""
        ...

    def arm(self, binding: Binding) -> None:
        """The model took an update by ``binding``: the next may go a faster path, while nothing is staged."""
        ...

    def attach(self, receiver: LineHandler) -> None:
        """See to it that ``receiver.on_readable()`` is called when ``events`` has something, or the sender is gone."""
        ...

    def detach(self, receiver: LineHandler) -> None:
        """No more; return when no such call is under way, unless this is one."""
        ...

    def events(self) -> Sequence[Event]:
        """What the sender has said since."""
        ...

    def alive(self) -> bool:
        """Whether the sender is there, as far as one can tell; asked now and then while somebody waits for it.

        True where its death is an event that ``on_readable`` hears of.
        """
        ...

    def call(self, wanted: bool) -> None:
        """Whether this worker must be woken for an update that nobody waits for."""
        ...

    def may_refuse(self) -> None:
        """The model may refuse a version that has arrived whole: keep safe what it is on until it takes another."""
        ...

    def enter(self) -> Update | None:
        """A forward is about to start: the version that it must use, if that is not the installed one."""
        ...

    def installed(self, update: Update, error: str) -> None:
        """The outcome of an ``enter`` or of a decided stage: installed, or not (``error``)."""
        ...

    def leave(self) -> None:
        """The forward has ended; harmless when repeated."""
        ...

    def answer(self, ack: Ack, *, staged: bool = False) -> None:
        """Tell the sender; nothing happens if it is gone."""
        ...

    def close(self) -> None:
        """Let everything go; harmless when repeated."""
        ...
