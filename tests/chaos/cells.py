"""The outcomes of the cells as a table of a page: faults by backends, with the times to detect and to recover."""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import cleandoc
from typing import Any

import pytest

DEADLINE = 1.5
"""Seconds until a send gives up, where a worker is made silent."""

VICTIM = 1
"""The index of the worker that is hit."""

BEGIN, END = "<!-- begin: made by `make reliability` -->\n", "<!-- end: made by `make reliability` -->\n"
"""Between these lines the page is replaced."""

LEGEND = "✓ as promised · ✗ not as promised · – not tested there: see the note\n"


@dataclass
class Cell:
    """One test: a fault against a backend.

    Attributes:
        fault: the row; the name of the test.
        backend: the column; empty if the fault does not depend on it.
        outcome: "passed", "failed" or "skipped"; empty before the end.
        why: the reason of a skip.
        detection: seconds.
        recovery: seconds.
    """

    fault: str
    backend: str
    outcome: str = ""
    why: str = ""
    detection: float | None = None
    recovery: float | None = None

    @contextmanager
    def detects(self, error: type[BaseException], match: str, *, since: float | None = None) -> Iterator[Any]:
        """The statements inside are to raise ``error``; measures the time until then.

        Args:
            error: its class.
            match: a regular expression for its message.
            since: on ``time.perf_counter``'s clock, if the fault was made before.
        """
        started = time.perf_counter() if since is None else since
        with pytest.raises(error, match=match) as caught:
            yield caught
        self.detection = time.perf_counter() - started
        _clear_frames(caught.value)

    @contextmanager
    def recovers(self) -> Iterator[None]:
        """The statements inside bring the workers to a newer version; measures the time that they take."""
        started = time.perf_counter()
        yield
        self.recovery = time.perf_counter() - started


def _clear_frames(error: BaseException | None) -> None:
    """Release the local variables of the frames that an error has passed: they would keep resources alive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def time_of(seconds: float | None) -> str:
    """A duration in the unit that suits it."""
    if seconds is None:
        return ""
    return (
        f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
    )


@dataclass
class Matrix:
    """All cells, in the order in which they ran.

    Attributes:
        rows: ``{fault: docstring of its test}``.
    """

    rows: dict[str, str] = field(default_factory=dict)
    cells: dict[tuple[str, str], Cell] = field(default_factory=dict)

    def add(self, fault: str, doc: str, backend: str) -> Cell:
        """A cell that is about to run."""
        self.rows[fault] = cleandoc(doc)
        cell = self.cells[fault, backend] = Cell(fault, backend)
        return cell

    def page(self, before: str, backends: list[str]) -> str:
        """The page with this table in place of the one that it has."""
        by_backend = [fault for fault in self.rows if any((fault, backend) in self.cells for backend in backends)]
        others = [fault for fault in self.rows if fault not in by_backend]
        notes: dict[str, int] = {}
        parts = ["\n", LEGEND, "\n", self._table(by_backend, backends, backends, notes)]
        if others:
            parts.append("\nIndependent of the backend:\n\n" + self._table(others, [""], [""], notes))
        parts.append("\n" + "".join(f"{number}. {why}\n" for why, number in notes.items()) if notes else "")
        parts.append("\n### The faults\n\n")
        parts += [f"- **{title(fault)}** (`{fault}`). {' '.join(self.rows[fault].split())}\n" for fault in self.rows]
        head, rest = before.split(BEGIN)
        return "".join([head, BEGIN, *parts, "\n", END, rest.split(END)[1]])

    def _table(self, faults: list[str], backends: list[str], heads: list[str], notes: dict[str, int]) -> str:
        lines = [["fault", *heads], ["---"] * (len(backends) + 1)]
        lines += [[title(fault), *(self._entry(fault, backend, notes) for backend in backends)] for fault in faults]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    def _entry(self, fault: str, backend: str, notes: dict[str, int]) -> str:
        cell = self.cells.get((fault, backend))
        if cell is None:
            return ""
        if cell.outcome == "skipped":
            return f"– [{notes.setdefault(cell.why, len(notes) + 1)}]"
        times = [time_of(seconds) for seconds in (cell.detection, cell.recovery) if seconds is not None]
        return " ".join(["✓" if cell.outcome == "passed" else "✗", " / ".join(times)]).strip()


def title(fault: str) -> str:
    """A test's name as words."""
    return fault.replace("_", " ")
