"""The values that the parts of the library exchange, and the interfaces of a scheme's context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

ANY_VERSION = 2**62  # newer than every version: an answer to any version that the sender waits for
LAST_VERSION = 2**40  # versions stay below; they have to fit into a word of the arena beside a slot
PHASES = ("extract", "pack", "transfer", "wait", "apply", "acknowledge")


class Update(NamedTuple):
    """One version of a model's weights, as a worker installs it.

    Attributes:
        version: counts up by one with each update of a model; the first is 1.
        views: one tensor per entry of the layout, in its order.
        extra: the pickled ``extra_state`` of the model's modules; empty where there is none.
        slot: the slot or buffer of the views; -1 for none.
        acknowledge: whether the sender waits for an acknowledgement.
        damage: why it must not be applied, if it did not arrive as it was packed; else empty.
    """

    version: int
    views: Sequence[Tensor]
    extra: bytes = b""
    slot: int = -1
    acknowledge: bool = True
    damage: str = ""


class Ack(NamedTuple):
    """A worker's answer to one update.

    Attributes:
        worker: its index.
        version: the version that it has installed, has prepared, or has failed to install.
        error: the remote traceback; empty if all went well.
        died: whether the process has ended instead of answering.
        wait: seconds from the arrival of the message until the worker had the gate.
        apply: seconds spent on installing.
        late: whether the deadline passed instead of an answer; ``error`` has the step.
    """

    worker: int
    version: int
    error: str = ""
    died: bool = False
    wait: float = 0.0
    apply: float = 0.0
    late: bool = False


class SyncReport(NamedTuple):
    """What one update cost, phase by phase.

    Attributes:
        version: the update.
        bytes: the size of one copy of the weights, as it is carried: flat, with its padding; with ``Delta``, what
            a worker is sent of it (the most, where workers are sent different amounts).
        seconds: from the call to the moment when the promise of ``send`` held.
        phases: seconds spent in each of ``extract``, ``pack``, ``transfer``, ``wait``, ``apply`` and ``acknowledge``,
            ``seconds`` in all; the worker's two (wait, apply) are those of the slowest worker.
        workers: ``{worker_idx: version}`` as acknowledged (or as published, without acknowledgements).
    """

    version: int
    bytes: int
    seconds: float
    phases: Mapping[str, float]
    workers: Mapping[int, int]

    def __str__(self) -> str:
        phases = ", ".join(f"{phase} {seconds * 1e6:.0f}" for phase, seconds in self.phases.items())
        to = ", ".join(str(worker) for worker in self.workers)
        return f"version {self.version} → workers {to}: {self.bytes:,} bytes in {self.seconds * 1e6:.0f} µs ({phases})"


@runtime_checkable
class RemoteWorker(Protocol):
    """A worker of a collector, as a scheme needs it."""

    @property
    def worker_idx(self) -> int:
        """Its index, 0 to ``num_workers - 1``."""
        ...

    @property
    def sentinel(self) -> int:
        """A descriptor that becomes readable when the worker's process ends (``Process.sentinel``)."""
        ...


@runtime_checkable
class CollectorContext(Protocol):
    """A collector that a scheme is initialised with on the sender."""

    @property
    def remote_workers(self) -> Sequence[RemoteWorker]:
        """The workers, in the order of their indices."""
        ...


@runtime_checkable
class CascadingContext(Protocol):
    """A receiver's context that has workers of its own, to which updates are passed on."""

    def cascade_weights(self, model_id: str) -> None:
        """Send the model's weights to the workers below. Called outside the gate, after an update is installed.

        If several were installed at once, it is called for the newest.
        """
        ...


@runtime_checkable
class UpdatableContext(Protocol):
    """A receiver's context that has workers of its own, and only a collector's method to update them."""

    def update_policy_weights_(self, weights: object, /, *, model_id: str) -> object:
        """Send ``weights`` to the workers below. Called as ``CascadingContext.cascade_weights``."""
        ...


@runtime_checkable
class ModelContext(Protocol):
    """A context that finds models by their ids."""

    def get_model(self, model_id: str) -> object:
        """Return the model called ``model_id``."""
        ...


@runtime_checkable
class NumberedContext(Protocol):
    """A context with the worker's index."""

    worker_idx: int


@runtime_checkable
class ModelHolder(Protocol):
    """A context with one model, whatever its name."""

    model: object
