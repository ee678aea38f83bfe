"""The terminal output of a run: a live display or plain lines, and a table at the end."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console, Group
from rich.filesize import decimal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from learning import checkpoint
from learning.progress import WINDOW, Row
from learning.reporting import Reporter
from learning.reporting.files import relative_path
from learning.summary import return_text
from wsync.metrics import PHASES

COMPILING = "compiling the gradient step in the first update, which takes a while …"


def microseconds(value: float | None) -> str:
    """Write a duration with the unit that fits: µs, ms or s."""
    if value is None:
        return "–"
    if value < 1e3:
        return f"{value:.1f} µs" if 0 < value < 10 else f"{value:.0f} µs"
    return f"{value / 1e3:.1f} ms" if value < 1e6 else f"{value / 1e6:.1f} s"


def number(value: float | None, digits: int = 1) -> str:
    """Write a figure, or a dash where there is none yet."""
    return "–" if value is None else f"{value:,.{digits}f}"


def worker_pids(collector: object) -> list[int]:
    """Return the process ids of a collector's workers that this process has started, in the order of their indices."""
    processes = [getattr(worker, "process", None) for worker in getattr(collector, "remote_workers", ())]
    return [process.pid for process in processes if process is not None]


@dataclass
class ConsoleReporter(Reporter):
    """Shows a run in `console`: live if that is a terminal, else a plain line every `interval` seconds at most.

    A terminal that cannot move its cursor (TERM=dumb) gets plain lines, too.
    """

    title: str
    total_frames: int
    console: Console = field(default_factory=lambda: Console(highlight=False))
    interval: float = 1.0
    solved_at: float | None = None  # mean return that counts as solved
    resumed: str = ""  # what the run continues, in words
    resume_command: str = ""  # continues a run that was interrupted or has failed, followed by its folder
    compiles: bool = False  # the gradient step, in the first update
    prefix: str = ""  # of every line, where several runs write to one terminal; there is no live display then
    worker_pids: Sequence[int] = ()  # set when the workers have been started, before `begin`
    _began: float = 0.0
    _shown_at: float = -math.inf
    _first: Row | None = None  # speeds are those since then: the first update may have compiled
    _latest: Row | None = None
    _printed: Row | None = None
    _folder: Path | None = None
    _live: Live | None = None
    _stopping: bool = False

    def begin(self, folder: Path, config: dict[str, Any]) -> None:
        self._folder, self._began = folder, time.monotonic()
        self.say(Text.assemble((self.title, "bold"), f" → {relative_path(folder)}"))
        if self.resumed:
            self.say(self.resumed)
        if self.worker_pids:
            self.say(f"worker processes: {', '.join(map(str, self.worker_pids))}")
        if self.console.is_terminal and not self.console.is_dumb_terminal and not self.prefix:
            self._live = Live(console=self.console, get_renderable=self._render, refresh_per_second=4)
            self._live.start()
        elif self.compiles:
            self.say(COMPILING)

    def say(self, line: Text | str) -> None:
        """Print a line, above the live display."""
        self.console.print(Text.assemble(self.prefix, line), soft_wrap=True)

    def _told(self, row: Row) -> tuple[list[str], dict[str, str]]:
        """Return the frames, and the time left once it is known; and the figures of a row, as text."""
        first, told, sync = self._first or row, [f"{row.frames:,}/{self.total_frames:,}"], row.weight_sync
        speed = None if row is first else (row.frames - first.frames) / max(row.seconds - first.seconds, 1e-9)
        if speed and row.frames < self.total_frames:
            told.append(f"{timedelta(seconds=(self.total_frames - row.frames) // speed)} left")
        few = f" ({row.episodes_in_mean} episodes)" if 0 < row.episodes_in_mean < WINDOW else ""
        shown = {"frames/s": number(speed, 0), "return": return_text(row.episode_return_mean_100, self.solved_at) + few}
        shown |= {"sync p50": microseconds(sync.p50_us if sync else None), "version": f"{row.version:,}"}
        if row.staleness_max:
            shown["staleness"] = f"{number(row.staleness)} (max {row.staleness_max})"
        return told, shown | ({"too old": f"{row.dropped_batches:,} batches"} if row.dropped_batches else {})

    def _render(self) -> Group:
        row, took = self._latest, timedelta(seconds=int(time.monotonic() - self._began))
        now = f"{took}, collecting the first batch" + (f", then {COMPILING}" if self.compiles else " …")
        lines: list[Any] = [Text(now, style="dim")]
        if row is not None:
            (frames, *left), shown = self._told(row)
            bar = Table.grid("", Column(ratio=1), "", padding=(0, 1, 0, 0), expand=True)
            done = ProgressBar(self.total_frames, row.frames)
            bar.add_row("[bold]frames", done, f"{frames} · {', '.join([str(took), *left])}")
            pairs = [Text.assemble((f"{name} ", "dim"), (text, "bold")) for name, text in shown.items()]
            lines = [bar, Columns(pairs, padding=(0, 3))]  # a pair is not broken at the end of a line
        if self._stopping:
            lines.append(Text("stopping after this batch; Ctrl-C again ends at once", style="bold yellow"))
        return Group(*lines)

    def note_stop_request(self) -> None:
        self._stopping = True

    def update(self, row: Row) -> None:
        self._latest, self._first = row, self._first or row
        if self._live is None and time.monotonic() - self._shown_at >= self.interval:
            self._print_line(row)

    def _print_line(self, row: Row) -> None:
        self._printed, self._shown_at = row, time.monotonic()
        told, shown = self._told(row)
        self.say(" | ".join([f"frames {told[0]}", *told[1:], *(f"{name} {text}" for name, text in shown.items())]))

    def finish(self, summary: dict[str, Any]) -> None:
        """Show the table, the verdict, the folder and how to continue; nothing if the run has not begun."""
        if self._folder is None:
            return
        if self._live is not None:
            self._live.stop()
        elif self._latest is not None and self._latest is not self._printed:
            self._print_line(self._latest)
        table = summary_table(summary)
        table.title, table.title_justify = self.prefix.strip() or None, "left"
        self.console.print(table)
        style = "bold red" if summary["status"] == "failed" else "bold green" if summary["solved"] else "bold yellow"
        verdict = Text.assemble(self.prefix, (summary["verdict"], style))
        self.console.print(verdict, soft_wrap=not self.console.is_terminal)
        self.say(f"files: {relative_path(self._folder)}")
        failed, before = summary["status"] == "failed", summary.get("resumed_from", {"frames": 0})["frames"]
        cut_off = summary["status"] == "interrupted" or (failed and summary["frames"] > before)  # else it fails again
        if cut_off and self.resume_command and (self._folder / checkpoint.FILE).is_file():
            self.say(f"continue it by: {self.resume_command}{shlex.quote(relative_path(self._folder))}")
        chosen = "collector.on_worker_failure" in str(summary.get("overrides"))
        if failed and str(summary.get("error")).startswith("WorkerDied") and not chosen:
            self.say("to go on when a worker dies: collector.on_worker_failure=restart (or drop)")


def summary_table(summary: dict[str, Any]) -> Table:
    """Return a run's summary as a table: training on the left, weight sync on the right."""
    sync, stale, table = summary["weight_sync"], summary["staleness"], Table(box=SIMPLE_HEAD)
    for name in ("training", "sync since resume" if "resumed_from" in summary else "weight sync"):
        table.add_column(name)
        table.add_column(justify="right")
    limit = "" if stale["max_staleness"] is None else f" (limit {stale['max_staleness']})"
    mean = return_text(summary["episode_return_mean_100"], summary["solved_at"])
    dropped = f"{stale['dropped_batches']:,} batches ({stale['dropped_frames']:,} frames)"
    left = [
        ("status", summary["status"]),
        ("solved", f"after {summary['solved_after_frames']:,}" if summary["solved"] else "no"),
        ("frames", f"{summary['frames']:,}"),
        ("wall-clock", f"{summary['seconds']:.1f} s"),
        ("  learning", f"{summary['seconds_learning']:.1f} s"),
        ("frames/s", number(summary["frames_per_second"], 0)),
        ("episodes", f"{summary['episodes']:,}"),
        (f"return, last {min(summary['episodes'], WINDOW)}", mean),
        ("staleness, mean", f"{number(stale['mean'], 2)} versions"),
        ("staleness, max", f"{stale['max']}{limit}"),
        *([] if stale["run_ahead"] is None else [("run-ahead", f"{stale['run_ahead']} batches")]),
        *([("dropped, too old", dropped)] if limit else []),
    ]
    right = [
        ("scheme", str(sync["scheme"])),
        ("updates", f"{sync['updates']:,} (version {sync['version']:,})"),
        ("payload", decimal(sync["bytes"])),
        *((f"latency {key}", microseconds(us)) for key, us in sync["latency_us"].items() if us is not None),
        *((f"  {phase}", microseconds(sync["phases_us"][phase])) for phase in PHASES if sync["phases_us"][phase]),
    ]
    if sync["seconds"]:
        right += [("all updates", f"{sync['seconds']:.3g} s ({sync['share']:.1%})")]
    for one, other in zip_longest(left, right, fillvalue=("", "")):
        table.add_row(*one, *other)
    return table
