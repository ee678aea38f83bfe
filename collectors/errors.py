"""The error of settings that contradict each other, and the user's lines that errors and warnings are about."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_OURS = (_ROOT / package for package in ("wsync", "collectors", "learning"))
_NOT_OF_THE_USER = (*(f"{folder}{os.sep}" for folder in (*_OURS, sys.prefix, sys.base_prefix)), "<")


class ConfigError(ValueError):
    """Settings contradict each other, or there is no such environment; the message is one line.

    The notes are the lines of the user's modules that were being executed when `error` was raised, the innermost last.
    """

    def __init__(self, message: str, error: BaseException | None = None) -> None:
        super().__init__(message)
        for one in traceback.extract_tb(error.__traceback__) if error is not None else ():
            if not one.filename.startswith(_NOT_OF_THE_USER):
                self.add_note(f"  {one.filename}, line {one.lineno}, in {one.name}: {one.line}")


def level_of_caller() -> int:
    """Return the ``stacklevel`` of the first frame outside this package, for a warning by this function's caller."""
    package = __name__.partition(".")[0]
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    return level
