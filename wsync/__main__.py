"""``wsync status``: which version each worker has, in a terminal, as long as it runs; in a pipe, once."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from wsync.errors import missing_extra
from wsync.metrics import LEDGER

_USAGE = "usage: wsync status [HOST:PORT of wsync.serve_metrics | a run's folder; the newest one in outputs/]"
_COLUMNS = ("model", "worker", "where", "state", "sent", "installed", "behind", "since", "verified", "error")


def main() -> None:
    """Show the rows. In a pipe, the exit status is 1 if one stands out; it is also 1 if there are none to show."""
    if sys.argv[1:2] != ["status"] or len(sys.argv) > 3:
        sys.exit(_USAGE)
    try:
        from rich.console import Console
        from rich.live import Live
    except ModuleNotFoundError as error:
        raise missing_extra(error, "metrics") from error
    console = Console(width=None if sys.stdout.isatty() else 200)
    try:
        rows = read(*sys.argv[2:])
        if not console.is_terminal:
            console.print(table_of(rows))
            sys.exit(any(map(style_of, rows)))
        with Live(table_of(rows), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(1.0)
                live.update(table_of(read(*sys.argv[2:])), refresh=True)
    except KeyboardInterrupt:
        return
    except (OSError, ValueError) as error:
        sys.exit(f"wsync status: {error}")


def read(source: str = "") -> list[dict[str, Any]]:
    """Return the rows; OSError, ValueError: there are none, or they cannot be read."""
    if source and not Path(source).is_dir():
        with urlopen(f"http://{source}/ledger", timeout=5) as answer:
            return json.load(answer)
    found = Path(source or "outputs").rglob(LEDGER)
    return json.loads(max(found, key=lambda one: one.stat().st_mtime, default=Path(source, LEDGER)).read_bytes())


def table_of(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Return a table with a line for each row."""
    from rich.table import Column, Table

    columns = [Column(name, no_wrap=True, ratio=int(name == "error") or None) for name in _COLUMNS]
    table = Table(*columns, box=None, header_style="dim", expand=True)
    for row in rows:
        since = None if row["sent_at"] is None else f"{time.time() - row['sent_at']:.0f} s"
        doubt = "nothing has used its gate" if row["used"] is False else ""
        cells = {**row, "since": since, "error": row["error"] or doubt}
        table.add_row(*("–" if cells[name] is None else str(cells[name]) for name in _COLUMNS), style=style_of(row))
    return table


def style_of(row: Mapping[str, Any]) -> str:
    """Return how a row stands out: dead or missing; in doubt, or more than one version behind; not at all."""
    if row["state"] in ("dead", "never connected"):
        return "bold red"
    return "yellow" if (row["behind"] or 0) > 1 or row["error"] or row["used"] is False else ""


if __name__ == "__main__":
    main()
