"""The files of a run: its settings, ``metrics.jsonl``, ``summary.json``, ``ledger.json``, pictures, TensorBoard's."""

from __future__ import annotations

import csv
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from learning.progress import Row
from learning.reporting import Reporter
from wsync.metrics import ledger
from wsync_status import LEDGER

METRICS, SUMMARY = "metrics.jsonl", "summary.json"


class FolderError(OSError):
    """A file in a run's folder cannot be written (a full disk, for example) or read; names the file and the reason."""


def relative_path(path: str | Path) -> str:
    """Return a path as it is printed: relative to the current folder if it lies inside, and is another one."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here) if here in path.parents else path)


@contextmanager
def file_errors(path: Path, done: str = "written") -> Iterator[None]:
    """Turn errors of the file `path`, which is "written" or "read" inside, into a `FolderError`."""
    try:
        yield
    except FolderError:
        raise
    except OSError as error:
        raise FolderError(f"{path} could not be {done}: {error.strerror or error}") from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise FolderError(f"{path} is damaged: {error}") from error


def replace_file(path: Path, content: bytes | memoryview) -> None:
    """Write a file in one step: the former one is there until the new one is complete, and stays after an error."""
    unfinished = path.with_suffix(".unfinished")
    with file_errors(path):
        try:
            with open(unfinished, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


def to_json(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON; NaN and infinity, which JSON lacks, become null."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None), indent=indent)


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a row by name: those of ``weight_sync/…`` and ``learning/…`` are panels of a dashboard."""
    figures: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            figures |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            figures[prefix + name] = value
    return figures


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write `rows` with a column for each name that any of them has."""
    with file_errors(path), open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def read_rows(folder: Path, frames: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run's ``metrics.jsonl``, up to `frames`; a last line that was cut off is left out."""
    with file_errors(folder / METRICS, "read"), open(folder / METRICS, encoding="utf-8") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            row = json.loads(line)
            if frames is not None and row["frames"] > frames:
                return
            yield row


def read_summary(folder: Path) -> dict[str, Any]:
    """Return the content of a run's ``summary.json``; raises FolderError if it is missing or damaged."""
    with file_errors(folder / SUMMARY, "read"):
        return json.loads((folder / SUMMARY).read_text(encoding="utf-8"))


@dataclass
class RunFiles(Reporter):
    """Writes a run's files, its pictures at the end."""

    resumed_from: Path | None = None  # the folder of the run that this one continues; its metrics come first
    frames: int = 0  # those of that run that count
    resume: Mapping[Path, dict[str, Any]] = field(default_factory=dict)  # what a run that resumes this one reads
    _folder: Path | None = None  # set when the settings and the earlier metrics are there
    _summary: dict[str, Any] = field(default_factory=dict)
    _next_ledger: float = 0.0

    def begin(self, folder: Path, config: dict[str, Any]) -> None:
        """Write the settings and the earlier run's metrics, which may be missing."""
        earlier = self.resumed_from
        history = list(read_rows(earlier, self.frames)) if earlier and (earlier / METRICS).exists() else []
        for path, content in {Path("config.yaml"): config, **self.resume}.items():
            with file_errors(folder / path):
                (folder / path).parent.mkdir(exist_ok=True)
            replace_file(folder / path, yaml.safe_dump(content, sort_keys=False).encode())
        replace_file(folder / METRICS, "".join(to_json(row) + "\n" for row in history).encode())
        self._folder = folder

    def update(self, row: Row) -> None:
        """Append a line; write now and then what `wsync status` shows."""
        assert self._folder is not None
        with file_errors(self._folder / METRICS), open(self._folder / METRICS, "a", encoding="utf-8") as file:
            file.write(to_json(row.as_dict()) + "\n")
        if time.monotonic() > self._next_ledger:
            self._next_ledger = time.monotonic() + 2.0  # seconds
            trainer = {"trainer": f"{os.uname().nodename}:{os.getpid()}"}
            replace_file(self._folder / LEDGER, to_json([row | trainer for row in ledger()]).encode())

    def finish(self, summary: dict[str, Any]) -> None:
        self._summary = summary
        if self._folder is not None:
            if summary["ledger"]:  # after a failure there is none: the last one is kept
                replace_file(self._folder / LEDGER, to_json(summary["ledger"]).encode())
            replace_file(self._folder / SUMMARY, f"{to_json(summary, indent=2)}\n".encode())

    def conclude(self) -> None:
        """Write ``metrics.csv``, and draw ``learning_curve.png`` and ``sync_latency.png``, if there are rows."""
        if self._folder is None or not (rows := list(read_rows(self._folder))):
            return
        write_csv(self._folder / "metrics.csv", [flat(row) for row in rows])
        from learning.reporting import plots  # matplotlib takes most of a second to import

        for draw in (plots.learning_curve, plots.sync_latency):
            figure, path = draw(rows, self._summary), self._folder / f"{draw.__name__}.png"
            with file_errors(path):
                figure.savefig(path)


class TensorBoardLogger(Reporter):
    """Writes the numbers of each row for ``tensorboard --logdir outputs``; needs the package tensorboard."""

    def __init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make: Any = SummaryWriter
        self._writer: Any = None

    def begin(self, folder: Path, config: dict[str, Any]) -> None:
        self._writer = self._make(str(folder))

    def update(self, row: Row) -> None:
        for name, value in flat(row.as_dict()).items():
            self._writer.add_scalar(name, value, row.frames)

    def finish(self, summary: dict[str, Any]) -> None:
        if self._writer is not None:
            self._writer.close()
