"""Who watches a run: files, the terminal, Weights & Biases. Each gets the same rows and the same summary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from learning.progress import Row


class Reporter:
    """Watches a run; this one does not care."""

    def begin(self, folder: Path, config: dict[str, Any]) -> None:
        """The run starts: its files go to `folder`, and `config` is what it was asked to do."""

    def update(self, row: Row) -> None:
        """One more batch was collected, learnt from, and its weights sent."""

    def finish(self, summary: dict[str, Any]) -> None:
        """The run is over, well or not; `summary` is what ``summary.json`` holds. Called once, also without `begin`.

        Nothing that takes long: somebody may be waiting who has asked twice to stop.
        """

    def conclude(self) -> None:
        """Do what takes its time, once everybody has been told; never called where nobody would wait for it."""
