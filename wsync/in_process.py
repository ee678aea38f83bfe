"""Both ends in one process: nothing has to be carried, so an update goes straight through the gate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from wsync.receiving import staged
from wsync.receiving.events import Event, Follower, Proposal, SlowPath, Stage
from wsync.receiving.gate import process_gate
from wsync.receiving.receiver_thread import LineHandler
from wsync.sending.fast_path import FastEnd
from wsync.types import Ack, Update
from wsync.weights.binding import Binding
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer


class InProcessLine:
    """A ``SenderEnd`` and a ``ReceiverEnd`` at once; worker 0 is this process.

    Weights are packed into one private buffer, and copied from there into the model inside the gate.

    Args:
        arrive: makes the receiver connect: the rendezvous, as the sender drives it.
    """

    def __init__(self, arrive: Callable[[], None]) -> None:
        self._arrive = arrive
        self.layout: Layout | None = None
        self.workers: Collection[int] = (0,)
        self._buffer: Buffer | None = None
        self._pending: Update | None = None
        self._receiver: SlowPath | None = None
        self._acks: list[Ack] = []

    # --- the sender's end ---

    def propose(self, layout: Layout, version: int) -> None:
        """Ask the receiver."""
        assert self._receiver is not None, "admit() comes first"
        self._receiver.follow([Proposal(version, layout)])

    def prepare(self, layout: Layout) -> None:
        """Make the buffer."""
        self.layout = layout
        self._buffer = Buffer.over(layout, torch.zeros(layout.nbytes, dtype=torch.uint8))

    def admit(self, workers: Collection[int], sentinels: Mapping[int, int], deadline: float | None) -> None:
        """Bring the receiver here, unless it is."""
        if self._receiver is None:
            self._arrive()

    def forget(self, worker: int) -> None:
        """This process is not dead."""

    def reserve(self, workers: Collection[int], deadline: float | None, *, keep: bool = False) -> Buffer:
        """The buffer: the model does not stay bound to it, and what was not installed is not any more.

        Raises:
            RuntimeError: called inside the gate, where nothing is installed.
        """
        assert self._buffer is not None, "prepare() comes first"
        if process_gate().held_here:
            raise RuntimeError("send() inside a forward, or wsync.gate(), would wait for itself: leave it first")
        with process_gate().turnstile.lock:
            self._pending = None  # of a send that was interrupted
        return self._buffer

    def release(self, buffers: Sequence[Buffer]) -> None:
        """Nothing was taken."""

    def publish(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], acknowledge: bool) -> None:
        """Pass through the gate with it: whoever is inside is waited for."""
        self._pending = Update(version, buffer.views, extra)
        process_gate().turnstile.go_through()

    def fast_path(self, *, acknowledge: bool) -> FastEnd | None:
        """There is no fast path."""
        return None

    def stage(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], transaction: int) -> None:
        """Have the receiver check it and keep it, as in any worker."""
        assert self._receiver is not None, "admit() comes first"
        self._receiver.follow([Stage(transaction, Update(version, buffer.views, extra))])

    def decide(self, version: int, transaction: int) -> None:
        """Install all models of the transaction in one passage of the gate: the others' ``decide`` finds it done."""
        process_gate().call(staged.decide, transaction, True)

    def drop(self, workers: Collection[int], transaction: int) -> None:
        """Forget what was kept."""
        process_gate().call(staged.decide, transaction, False)

    def listen(self) -> None:
        """Whoever answered has told this object."""

    def collect(self, workers: Collection[int], version: int, deadline: float | None) -> list[Ack]:
        """The answer, which is there already."""
        acks, self._acks = self._acks, []
        return [ack for ack in acks if ack.version >= version][-1:]

    # --- the receiver's end ---

    def knock(self, worker_idx: int, deadline: float | None) -> Sequence[int]:
        """The sender is here."""
        return ()

    def connect(self, worker_idx: int, deadline: float | None) -> None:
        """The sender is here."""

    def feed(self, receiver: SlowPath) -> Follower:
        """There is no faster path."""
        self._receiver = receiver
        return receiver

    def arm(self, binding: Binding) -> None:
        """There is no faster path."""

    def attach(self, receiver: LineHandler) -> None:
        """Nobody has to be told: the sender comes through the gate itself."""

    def detach(self, receiver: LineHandler) -> None:
        """As ``attach``."""

    def alive(self) -> bool:
        """It is this process."""
        return True

    def events(self) -> Sequence[Event]:
        """None: see ``attach``."""
        return ()

    def call(self, wanted: bool) -> None:
        """Nobody needs to be called."""

    def may_refuse(self) -> None:
        """The model has memory of its own."""

    def enter(self) -> Update | None:
        """What was published and not installed."""
        update, self._pending = self._pending, None
        return update

    def installed(self, update: Update, error: str) -> None:
        """The model has memory of its own: nothing to remember."""

    def leave(self) -> None:
        """Nothing is in use."""

    def answer(self, ack: Ack, *, staged: bool = False) -> None:
        """Tell the sender."""
        self._acks.append(ack)

    def close(self) -> None:
        """Let the buffer and the receiver go."""
        self._buffer = self._receiver = None
