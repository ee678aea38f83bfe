"""Forked children: one that continues in the middle of its parent's ``send``, and one that only stays."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class ForkingTransform:
    """A ``send_transform``."""

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None
        self._outcome = ""

    def __call__(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the weights; in ``outcome_in_child`` fork before, and in the child return other weights."""
        if self._pipe is None:
            return weights
        (reading, writing), self._pipe = self._pipe, None
        child = os.fork()
        if child == 0:
            return {name: torch.full_like(tensor, 77) for name, tensor in weights.items()}
        os.close(writing)
        with os.fdopen(reading) as lines:
            self._outcome = lines.read()  # the child goes first
        os.waitpid(child, 0)
        return weights

    def outcome_in_child(self, send: Callable[[], object]) -> str:
        """Call ``send``, which forks once; return what it raised in the child, empty if it raised nothing there."""
        trainer, outcome = os.getpid(), ""
        self._pipe = _, writing = os.pipe()
        try:
            send()
        except Exception as error:
            if os.getpid() == trainer:
                raise
            outcome = f"{type(error).__name__}: {error}"
        finally:
            if os.getpid() != trainer:
                os.write(writing, outcome.encode())
                os._exit(0)
        return self._outcome


def fork_idle_child() -> int:
    """Fork a child that does nothing, and holds what this process has open until it is killed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside other threads
        child = os.fork()
    while child == 0:
        signal.pause()
    return child


@contextmanager
def idle_child() -> Iterator[int]:
    """``fork_idle_child``; kill it at the end."""
    child = fork_idle_child()
    try:
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
