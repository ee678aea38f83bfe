"""The trainer's end of a line: what a backend must say of it.

Everything that all backends do (versions, checks, deadlines, reports, errors) stands above it, in ``sender.py``. A
backend says how bytes and an instruction reach a worker, and how an answer comes back: a new one is one file with a
``SenderEnd``, a ``ReceiverEnd`` (``receiving/end.py``) and a scheme that names them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from wsync.sending.fast_path import FastEnd
from wsync.types import Ack
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer


class SenderEnd(Protocol):
    """The trainer's end: all workers of one model."""

    @property
    def workers(self) -> Collection[int]:
        """Those that are connected and alive."""
        ...

    def propose(self, layout: Layout, version: int) -> None:
        """Have those who are connected say whether weights like these would fit: an answer to ``version``."""
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
