"""Errors in a reporter of the user's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from collectors.errors import lines_of_user
from learning.progress import Row
from learning.reporting import Reporter
from learning.reporting.files import FolderError


class ReporterError(Exception):
    """A reporter of the user's own has raised an error; the message is one line."""


class Guarded(Reporter):
    """Calls a reporter. An error in it becomes a `ReporterError`; after that, the reporter is not called again.

    The notes of that error are the lines of the user's modules that were being executed. A ``FolderError``, and an
    error outside of the user's modules, are raised as they are.

    Args:
        setting: names the reporter, for errors: "callback", "logger".
        reporter: of any class.
    """

    def __init__(self, setting: str, reporter: Reporter) -> None:
        self._name = f"{setting} {type(reporter).__name__}"
        self._reporter = reporter
        self._failed = False

    def begin(self, folder: Path, config: dict[str, Any]) -> None:
        """Call ``begin``."""
        self._call(self._reporter.begin, folder, config)

    def update(self, row: Row) -> None:
        """Call ``update``."""
        self._call(self._reporter.update, row)

    def finish(self, summary: dict[str, Any]) -> None:
        """Call ``finish``."""
        self._call(self._reporter.finish, summary)

    def conclude(self) -> None:
        """Call ``conclude``."""
        self._call(self._reporter.conclude)

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        if self._failed:
            return
        try:
            method(*arguments)
        except Exception as error:  # of any class: the method is the user's
            self._failed = True
            if isinstance(error, FolderError) or not (called := lines_of_user(error)):
                raise
            text = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
            described = ReporterError(f"{self._name}, {method.__name__}(): {text}")
            for line in called:
                described.add_note(line)
            raise described from error
