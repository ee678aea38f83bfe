"""A line of tensors between a trainer and one worker, as its two ends see it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

from torch import Tensor


class Work(Protocol):
    """A transfer under way."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Return when it is done; raises RuntimeError if it cannot be."""
        ...


class GivenUp(RuntimeError):
    """The trainer does not wait for this worker any more."""


class Outgoing(Protocol):
    """The trainer's end.

    Attributes:
        in_memory: whether the worker takes weights out of the trainer's memory: then a transfer has to begin before the
            worker is told of it, and nothing crosses a network.
    """

    in_memory: bool

    def send(self, flat: Tensor, works: list[Work]) -> None:
        """Begin to send, and add the transfer to ``works``; ``flat`` must not change until the worker has answered.

        A signal may strike before that is done, and it is called once more.
        """
        ...

    def close(self, under_way: Work | None = None) -> bool:
        """Let go of the line.

        Returns:
            Whether the other end can take what is ``under_way`` later.
        """
        ...


class Incoming(Protocol):
    """The worker's end.

    Attributes:
        in_memory: as at the other end.
    """

    in_memory: bool

    def receive(self, flat: Tensor, works: list[Work]) -> None:
        """Begin to receive into ``flat``, and add the transfer to ``works``.

        A signal may strike before that is done, and it is called once more.
        """
        ...

    def pointed(self) -> bool:
        """Whether something is there that was not received, as far as one can see that without asking anybody."""
        ...

    def close(self, under_way: Work | None = None) -> bool:
        """Let go of the line."""
        ...


class Place(Protocol):
    """Where lines of tensors are formed, and weights are packed."""

    def pair(self, worker: int, generation: int, deadline: float | None) -> Callable[[], Outgoing]:
        """The trainer's half of the rendezvous of a line; what is returned waits for the other half."""
        ...

    def room(self, nbytes: int) -> Tensor:
        """A flat buffer ``uint8[nbytes]``, to be packed into; as large as all others."""
        ...

    def close(self) -> None:
        """Let go of all that it has; harmless when repeated."""
        ...
