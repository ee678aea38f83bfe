"""The values that travel: an update, why a worker lacks it, and what it has cost. And what carries them at each end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from wsync.deadlines import NOW
from wsync.errors import WeightSyncError

if TYPE_CHECKING:
    from torch import Tensor

    from wsync.weights.layout import Buffer, Layout

LAST_VERSION = 2**40
"""Versions stay below: a word of the arena has room for a version and a slot."""
PHASES = ("extract", "pack", "transfer", "wait", "apply", "acknowledge")
Stage = Literal["received", "ready", "installed"]
"""How far an update is in a worker: *received*, verified and in its memory; *ready*, every forward that starts later
uses it, or a newer one; *installed* in the model. A version that is ready or installed makes every older one so."""


class Update(msgspec.Struct, eq=False):
    """One version of one model's weights. Immutable once it is published."""

    version: int  # from 1; counts up by one with each update of a model
    buffer: Buffer  # the packed weights, at this end; its memory is not reused while the update exists
    extra: bytes = b""  # the pickled `extra_state` of the model's modules
    checksum: int = 0  # of the buffer and `extra`; 0 for none
    requires: Mapping[str, int] = {}
    """``{sender: version}``: a worker that has a model of that sender installs this update only together with that
    version of it, or a newer one. Every later update of this model requires it as well."""
    acknowledge: bool = True  # whether the sender awaits an answer
    undecided: bool = False  # whether it is part of a transaction that may still be aborted
    damage: str = ""  # in a worker: why it must not be installed
    at: float = 0.0  # in a trainer: when the call began, by ``time.monotonic``

    @property
    def views(self) -> Sequence[Tensor]:
        """One tensor per entry of the layout, in its order."""
        return self.buffer.views

    def __repr__(self) -> str:
        return f"<Update {self.version}{' undecided' * self.undecided}>"


class Cause(NamedTuple):
    """Why a worker lacks an update."""

    kind: Literal["died", "failed", "late"]
    """The process or its connection has ended; it refused the update, or could not be sent it; or no answer came before
    the deadline."""
    text: str
    """For people; the remote traceback of a worker that failed."""


class SyncReport(msgspec.Struct, eq=False):
    """What one update cost.

    Attributes:
        version: the update.
        bytes: the size of one copy of the weights, as it is carried; with ``Delta``, what a worker is sent of it.
        seconds: from the call to the moment when the promise of ``send`` held.
    """

    version: int
    bytes: int
    seconds: float
    _costs: tuple[float, ...]  # seconds of each of PHASES but the last
    _workers: Sequence[int]

    @property
    def workers(self) -> dict[int, int]:
        """``{worker_idx: version}``, as acknowledged (or as published, without acknowledgements)."""
        return dict.fromkeys(self._workers, self.version)

    @property
    def phases(self) -> dict[str, float]:
        """The seconds of each of ``PHASES``, ``seconds`` in all; ``wait`` and ``apply`` are the slowest worker's."""
        left = self.seconds
        result: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        for phase, cost in zip(PHASES, self._costs, strict=False):
            result[phase] = min(max(cost, 0.0), left)
            left -= result[phase]
        result["acknowledge"] = left
        return result

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {seconds * 1e6:.0f}" for phase, seconds in self.phases.items())
        to = ", ".join(str(worker) for worker in self.workers)
        return f"version {self.version} -> workers {to}: {self.bytes:,} bytes in {self.seconds * 1e6:.0f} us ({phases})"

    __repr__ = __str__


class Outlet:
    """What a sender publishes to: workers, files, engines, or a model in this process. This one publishes nothing.

    Called under the sender's lock by the thread that calls the scheme; ``disconnect`` and ``close`` by any thread. A
    subclass has ``reserve`` and ``publish``, and what else it needs.
    """

    name: str = ""  # identifies the sender, in what updates require of one another
    workers: Sequence[int] = ()  # that are present, in order; another object whenever that has changed
    moves_bytes: bool = True  # in `publish`; else later, or workers read them where they are
    transactional: bool = False  # whether an update can be prepared first, and committed or aborted later

    def causes(self) -> Mapping[int, str]:
        """Why a worker that was connected is absent, by worker."""
        return {}

    def connect(self, processes: Any, deadline: float | None, /) -> object:
        """Wait until all workers are connected; WorkerDied, SyncTimeout: names those that are not."""

    def set_layout(self, layout: Layout) -> None:
        """Define what a buffer contains. Called once, before the first ``reserve``."""

    def check_layout(self, layout: Layout, deadline: float | None) -> Mapping[int, Cause]:
        """Ask workers that have connected before there was a layout to use it; return why some cannot: then none does.

        ``set_layout`` follows if all can.
        """
        return {}

    def reserve(self, deadline: float | None) -> Buffer:
        """Return memory for one version that no process reads; it stays reserved as long as the buffer exists."""
        raise NotImplementedError

    def publish(self, update: Update, workers: Sequence[int]) -> bool | None:
        """Give ``workers`` the update, also those that will take the place of absent ones. Does not wait for them.

        Returns whether all that is promised holds already, so that ``wait`` need not be called.
        """

    def wait(self, workers: Sequence[int], version: int, stage: Stage, deadline: float | None) -> Mapping[int, Cause]:
        """Wait until ``workers`` have the version; return why those lack it that do not have it."""
        return {}

    def costs(self, workers: Sequence[int], version: int) -> tuple[float, float, int]:
        """Return the slowest worker's seconds of waiting and of installing, and the bytes that one was sent."""
        return 0.0, 0.0, 0

    def seen(self, worker: int, version: int) -> dict[str, Any]:
        """Return entries of a worker's row of the ledger, without asking it. ``version``: what all were sent."""
        cause = self.wait([worker], version, "installed", NOW).get(worker)
        return {"installed": version} if cause is None else {"error": cause.text}

    def verify(self, digests: Mapping[int, dict[str, int]], deadline: float | None) -> Mapping[int, Cause]:
        """Ask workers whether the tensors that are installed have these digests; return by worker why not."""
        raise WeightSyncError("verify() is not answered here: by readers of a store")

    def disconnect(self, worker: int, cause: str) -> None:
        """Treat a worker as dead."""

    def readmit(self, worker: int, process: Any, deadline: float | None) -> None:
        """Wait for the process that takes the place of a worker, and until it has the newest update of that index."""

    def prepare(self, update: Update, workers: Sequence[int]) -> None:
        """Give ``workers`` an undecided update; ``wait`` with the stage ``received`` tells whether they can take it."""

    def announce_commit(self, update: Update, workers: Sequence[int]) -> None:
        """Make the prepared update the newest one; called for every model before ``commit`` is called for any."""

    def commit(self, update: Update, workers: Sequence[int]) -> None:
        """Have the workers install it."""

    def abort(self, version: int) -> None:
        """Drop what was prepared."""

    def published(self) -> list[Buffer]:
        """Return the shared buffers of the newest updates, each once."""
        return []

    def close(self, *, graceful: bool) -> None:
        """Release everything. Idempotent."""


class Inbox:
    """A receiver's way to its sender, or to a store, and what it polls. This one is always empty.

    A connection (``connect``, ``fetch``, ``close``) may be an object of its own, which sets the receiver's ``inbox``.
    All methods are called inside the gate, but for ``answer`` and ``set_wakeups``, which any thread calls. The control
    thread calls ``poll`` outside it as well, to learn which version the next forward would use.
    """

    binds: bool = True  # whether a model may be bound to the memory of an update
    newest: int = 0  # the newest version that there is, as far as is known; for receivers that fetch
    # Compiled code that is the gate's hook in place of the receiver, and calls the receiver for what is not usual.
    words: Any = None  # ``words.version`` is what it has installed

    def connect(self, worker_idx: int, deadline: float | None, /) -> int:
        """Connect; return the version to be waited for, 0 if there is none yet."""
        return 0

    def fetch(self, deadline: float | None, /) -> None:
        """Have the inbox return the newest version; TimeoutError: it did not come in time. Called by any thread."""

    def use(self, layout: Layout, target: Any) -> None:
        """Take note of the layout, and of what installs its updates."""

    def poll(self) -> Sequence[Update]:
        """Return the updates that are newer than what is installed, the oldest first; usually one or none.

        A forward that starts now has to use the last one, if all that it requires is there.
        """
        return ()

    def settled(self, update: Update, error: str) -> None:
        """An update was installed, or has failed and is not tried again."""

    def answer(self, update: Update, error: str, wait: float, apply: float) -> None:
        """Tell the sender that ``update`` is installed, or why it is not."""

    def leave(self) -> None:
        """A forward has ended."""

    def release(self) -> None:
        """The model has memory of its own."""

    def set_wakeups(self, wanted: bool) -> None:
        """Say whether a thread of this worker waits for updates: then each of them has to wake the control thread."""

    def close(self) -> None:
        """The receiver has gone. Idempotent."""
