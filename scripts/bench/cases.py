"""What is measured, and what a measurement is: the plain values that cross between the processes of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

BACKENDS = ("shared_mem", "multiprocess", "distributed", "rpc", "ray")
NETWORK = ("distributed", "rpc", "ray")  # of these, those that reach other machines
Acknowledge = Literal["installed", "published"]
Kind = Literal["send", "update"]
Give = Literal["module", "tensordict"]


@dataclass(frozen=True)
class Case:
    """One line of the results.

    Attributes:
        kind: a standalone ``send``, or a collector's ``update_policy_weights_``.
        backend: as in configs.
        acknowledge: when a send through shared memory is finished; other backends know one meaning only.
        mib: of all weights together.
        tensors: how many there are.
        workers: processes that receive.
        give: what ``send`` is given, the module or a TensorDict that is made of it (the making is timed).
        frames: of each worker's batch, in collection.
        timeout: seconds for whatever a side waits for.
        checksum: whether updates carry one; None: as the scheme has it.
        shared_memory: whether a backend that reaches other machines may use that on its own; other backends have no
            choice.
    """

    kind: Kind
    backend: str
    mib: float
    tensors: int
    workers: int
    acknowledge: Acknowledge = "installed"
    give: Give = "module"
    frames: int = 16
    timeout: float = 60.0
    checksum: bool | None = None
    shared_memory: bool = True

    @property
    def label(self) -> str:
        """The backend, and what its acknowledgement means, or what carries, where that is a choice."""
        if self.backend == "shared_mem":
            return f"{self.backend}, {self.acknowledge}"
        return self.backend if self.backend not in NETWORK or self.shared_memory else f"{self.backend}, gloo"

    @property
    def title(self) -> str:
        """The whole case, for people."""
        sealed = {None: "", True: ", checksum", False: ", no checksum"}[self.checksum]
        return f"{self.kind} {self.label}, {self.mib:g} MiB in {self.tensors} tensors to {self.workers}{sealed}"


@dataclass(frozen=True)
class Round:
    """One update.

    Attributes:
        seconds: that the call took.
        copy: seconds of a plain copy of the same bytes, right after it.
        trainer_cpu: seconds of CPU that the trainer's process used during the call.
        workers_cpu: the same of all workers together.
        phases: seconds, as the scheme reported them; empty for the peer.
        wrong: what a worker saw afterwards, if that was not the update; else empty.
    """

    seconds: float
    copy: float
    trainer_cpu: float
    workers_cpu: float
    phases: Mapping[str, float] = field(default_factory=dict)
    wrong: str = ""


@dataclass(frozen=True)
class Pauses:
    """What a worker that forwards in a tight loop felt of updates; all times in seconds.

    Attributes:
        usual: median time from one forward's end to the next one's, while nothing is sent.
        usual_longest: the longest of those.
        switches: those times at which the new weights came to be used, one per update that was seen.
        longest: the longest of all times while updates were sent.
        forwards: how many there were meanwhile.
        mixed: forwards that saw two versions.
        backwards: forwards that saw an older version than the one before them.
    """

    usual: float
    usual_longest: float
    switches: tuple[float, ...]
    longest: float
    forwards: int
    mixed: int
    backwards: int


@dataclass(frozen=True)
class Acting:
    """Updates sent to workers that forward in a tight loop.

    Attributes:
        seconds: that each call took.
        pauses: one per worker.
        wrong: what a worker saw afterwards, if that was not the last update.
    """

    seconds: tuple[float, ...]
    pauses: tuple[Pauses, ...]
    wrong: str


@dataclass(frozen=True)
class Memory:
    """One process's memory; all in bytes.

    Attributes:
        who: ``"trainer"`` or ``"worker"`` and its number.
        growth: how far it went above what was resident before the workers connected (in a collector: after they had).
        resident: at the end, shared memory included.
        shared: of that, shared memory (``RssShmem``).
    """

    who: str
    growth: int
    resident: int
    shared: int


class BenchError(Exception):
    """A case cannot be run; the message says why, for people."""
