"""What the cells found, as a page: faults by backends, with the times to detect and to recover."""

from __future__ import annotations

from dataclasses import dataclass, field
from inspect import cleandoc

HEAD = """\
# Reliability

What goes wrong in a run, and what wsync does then. Each cell of the tables below is a test with real processes: the
fault is made, the error is awaited, the survivors are looked at, and afterwards nothing may be left (threads,
descriptors, child processes, shared memory). This page is written by the tests themselves:

    make reliability

It needs three minutes on two cores, no GPU, and no root. One row, or one cell, is made again by
`pytest tests/chaos -k killed_between_updates`, or `-k "killed_between_updates and rpc"`.

In a cell, the first time is from the fault (or from the call that meets it) to the error that names the worker; the
second one is from there until the survivors, and the worker itself if it lives, act on a newer version.
Times of one run, on a machine that did other things as well. Where the fault is that somebody is silent, the deadline
was set to {deadline:g} s: the time to detect it is that deadline.
"""

LEGEND = "✓ as promised · ✗ not so · – cannot happen there: see the note\n"


@dataclass
class Cell:
    """One test: a fault against a backend.

    Attributes:
        fault: the row; the name of the test.
        backend: the column; empty if the fault has nothing to do with it.
        outcome: "passed", "failed" or "skipped"; empty before the end.
        why: it was skipped.
        detection: seconds.
        recovery: seconds.
    """

    fault: str
    backend: str
    outcome: str = ""
    why: str = ""
    detection: float | None = None
    recovery: float | None = None

    def detected(self, seconds: float) -> None:
        """From the fault to the error."""
        self.detection = seconds

    def recovered(self, seconds: float) -> None:
        """From the error to a newer version in use."""
        self.recovery = seconds


def time_of(seconds: float | None) -> str:
    """For people."""
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

    def page(self, backends: list[str], deadline: float) -> str:
        """The whole page."""
        by_backend = [fault for fault in self.rows if any((fault, backend) in self.cells for backend in backends)]
        others = [fault for fault in self.rows if fault not in by_backend]
        notes: dict[str, int] = {}
        parts = [HEAD.format(deadline=deadline), "\n## The matrix\n\n", LEGEND, "\n"]
        parts.append(self._table(by_backend, backends, backends, notes))
        if others:
            parts.append("\nWhatever the backend:\n\n" + self._table(others, [""], [""], notes))
        parts.append("\n" + "".join(f"{number}. {why}\n" for why, number in notes.items()) if notes else "")
        parts.append("\n## The faults\n")
        parts += [f"\n**{title(fault)}** (`{fault}`). {' '.join(self.rows[fault].split())}\n" for fault in self.rows]
        return "".join(parts)

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
