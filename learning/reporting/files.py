"""The files of a run's folder: ``metrics.jsonl``, ``summary.json``, and the pictures made from them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from learning.progress import Row
from learning.reporting import Reporter

METRICS, SUMMARY = "metrics.jsonl", "summary.json"

# Keys that readers need.
_OF_A_ROW = {field.name for field in fields(Row) if field.default is MISSING}
_OF_A_SUMMARY = {"status", "solved", "frames_per_second", "episode_return_mean_100", "weight_sync", "staleness"}
_OF_A_SYNC = {"scheme", "latency_us"}


class FolderError(OSError):
    """A file in a run's folder cannot be written (a full disk, for example) or read."""


def relative_path(path: str | Path) -> str:
    """Return a path as it is printed: relative to the current folder if it lies inside."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Write `path` inside.

    Raises:
        FolderError: it could not be written; the message has the path and the reason.
    """
    try:
        yield
    except OSError as error:
        raise FolderError(f"{path} could not be written: {error.strerror or error}") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Read `path` inside.

    Raises:
        FolderError: it could not be read, or is damaged; the message has the path and the reason.
    """
    try:
        yield
    except OSError as error:
        raise FolderError(f"{path} could not be read: {error.strerror or error}") from error
    except ValueError as error:  # not UTF-8, not JSON, or missing keys
        raise FolderError(f"{path} is damaged: {error}") from error


def read_rows(folder: Path, frames: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's ``metrics.jsonl``, up to `frames`; a last line that was cut off is left out.

    Raises:
        FolderError: the file is missing, or damaged before its last line.
    """
    with reading(folder / METRICS), open(folder / METRICS, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            row = _parsed(line, _OF_A_ROW, f"line {number}")
            if frames is not None and row["frames"] > frames:
                return
            yield row


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the content of a run's ``summary.json``; raises FolderError if it is missing or damaged."""
    with reading(folder / SUMMARY):
        summary = _parsed((folder / SUMMARY).read_text(encoding="utf-8"), _OF_A_SUMMARY, "it")
        if not isinstance(summary["weight_sync"], dict) or not summary["weight_sync"].keys() >= _OF_A_SYNC:
            raise ValueError(f"its weight_sync is none: {', '.join(sorted(_OF_A_SYNC))} have to be there")
        return summary


def _parsed(text: str, wanted: set[str], called: str) -> dict[str, Any]:
    """Return the JSON object `text`; raises ValueError if it is not one, or lacks keys of `wanted`."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{called} is no JSON: {error}") from error
    missing = wanted - content.keys() if isinstance(content, dict) else wanted
    if missing:
        raise ValueError(f"{called} has no {', '.join(sorted(missing))}")
    return content


def to_json(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON; NaN and infinity, which JSON lacks, become null."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(value), indent=indent, allow_nan=False)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as JSON, atomically; raises FolderError."""
    with writing(path):
        replace_file(path, f"{to_json(content, indent=2)}\n".encode())


def replace_file(path: Path, content: bytes | memoryview) -> None:
    """Write a file in one step: the former one is there until the new one is complete, and stays after an error."""
    unfinished = path.with_suffix(".unfinished")
    try:
        with open(unfinished, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:  # also Ctrl-C: a resumed run would not delete it
        with suppress(OSError):  # a read-only file system
            unfinished.unlink()
        raise


class RunFiles(Reporter):
    """Writes a run's files. The metrics of a resumed run start with those of the run that it continues."""

    def __init__(self, resumed_from: Path | None = None, frames: int = 0) -> None:
        """Start with the rows of the first `frames` frames in the folder `resumed_from`, if it is given."""
        self._resumed_from, self._frames = resumed_from, frames
        self._folder: Path | None = None
        self._metrics: TextIOWrapper | None = None

    def begin(self, folder: Path, config: dict[str, Any]) -> None:
        """Open ``metrics.jsonl``; that of the earlier run may be missing."""
        earlier = self._resumed_from
        history = list(read_rows(earlier, self._frames)) if earlier and (earlier / METRICS).exists() else []
        self._folder = folder
        with writing(folder / METRICS):
            replace_file(folder / METRICS, "".join(to_json(row) + "\n" for row in history).encode())
            self._metrics = open(folder / METRICS, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  (closed by finish)

    def update(self, row: Row) -> None:
        """Append a line."""
        assert self._metrics is not None and self._folder is not None
        with writing(self._folder / METRICS):
            self._metrics.write(to_json(row.as_dict()) + "\n")

    def finish(self, summary: dict[str, Any]) -> None:
        """Write ``summary.json``."""
        if self._metrics is not None and self._folder is not None:
            try:
                with writing(self._folder / METRICS):
                    self._metrics.close()
            finally:
                write_json(self._folder / SUMMARY, summary)


class Pictures(Reporter):
    """Draws the learning curve and the sync latencies at the end of a run, from ``metrics.jsonl``."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._summary: dict[str, Any] = {}

    def begin(self, folder: Path, config: dict[str, Any]) -> None:
        """Note `folder`."""
        self._folder = folder

    def finish(self, summary: dict[str, Any]) -> None:
        """Note `summary`."""
        self._summary = summary

    def conclude(self) -> None:
        """Draw ``learning_curve.png`` and ``sync_latency.png``, if there are rows."""
        if self._folder is None or not (rows := list(read_rows(self._folder))):
            return
        from learning.reporting import plots  # matplotlib takes most of a second to import

        for draw in (plots.learning_curve, plots.sync_latency):
            picture = self._folder / f"{draw.__name__}.png"
            with writing(picture):
                draw(rows, self._summary).savefig(picture)
