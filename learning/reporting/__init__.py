"""Reporters of a run: files, the terminal, Weights & Biases. Each gets the same rows and the same summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from learning.progress import Row


class Reporter:
    """Receives the rows and the summary of a run, on the thread of the training loop; this one ignores them."""

    def begin(self, folder: Path, config: dict[str, Any]) -> None:
        """Start a run with the folder for its files and its config. Called once, first; may raise FolderError."""

    def update(self, row: Row) -> None:
        """Take the row of a batch. Called after each batch; may raise FolderError."""

    def finish(self, summary: dict[str, Any]) -> None:
        """Take the summary, the content of ``summary.json``. Called once when the run has ended, also without `begin`.

        It has to be quick: it is also called after a second request to stop. May raise FolderError.
        """

    def conclude(self) -> None:
        """Do what takes longer. Called once, after `finish` of all reporters; not after a second request to stop."""
