"""Progress bars of the scripts."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress_bar(console: Console | None = None, field: str | None = None) -> Progress:
    """Return a transient bar with description, count and elapsed time, and the task field ``field`` if given."""
    extra = () if field is None else (TextColumn(f"{{task.fields[{field}]}}"),)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), *extra)
    return Progress(*columns, console=console, transient=True, disable=console is not None and not console.is_terminal)
