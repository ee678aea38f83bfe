"""Errors in a reporter of the user's own."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

from collectors.errors import lines_of_user
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
        self._name, self._reporter, self._failed = f"{setting} {type(reporter).__name__}", reporter, False

    def _call(self, method: str, *arguments: Any) -> None:
        if self._failed:
            return
        try:
            getattr(self._reporter, method)(*arguments)
        except Exception as error:  # of any class: the method is the user's
            self._failed = True
            if isinstance(error, FolderError) or not (called := lines_of_user(error)):
                raise
            text = f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
            described = ReporterError(f"{self._name}, {method}(): {text}")
            for line in called:
                described.add_note(line)
            raise described from error

    begin = partialmethod(_call, "begin")
    update = partialmethod(_call, "update")
    finish = partialmethod(_call, "finish")
    conclude = partialmethod(_call, "conclude")
