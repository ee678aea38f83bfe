"""Reporters of a run: files, the terminal, Weights & Biases. Each gets the same rows and the same summary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from learning.progress import Row


class Reporter:
    """Receives the rows and the summary of a run, on the thread of the training loop; this one ignores them.

    The base class of callbacks (the setting ``callbacks``) and of loggers. An exception in a method ends the run.
    """

    # Set before `begin`: functions that return a copy of the policy on the CPU, in evaluation mode (in `update`, that
    policy: Callable[[], nn.Module]  # of ``row.version``), and one environment of the run, a ``collectors.GymEnv``.
    make_env: Callable[[], Any]

    def begin(self, folder: Path, config: dict[str, Any]) -> None:
        """Start a run with the folder for its files, and the content of its ``config.yaml``. Called once, first."""

    def update(self, row: Row) -> None:
        """Take the row of a batch. Called after each batch, when the new weights have been sent."""

    def finish(self, summary: dict[str, Any]) -> None:
        """Take the content of ``summary.json``, and write what must not be lost.

        Called once at the end, also without `begin`, and after a second request to stop: it has to be quick.
        """

    def conclude(self) -> None:
        """Do what takes seconds (pictures, uploads); called once, after `finish`, unless stopped twice."""
