"""``wsync status``: which version each worker has, in a terminal, as long as it runs; in a pipe, once.

It is beside the package, and imports nothing of it: importing PyTorch would take seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

LEDGER = "ledger.json"
"""The file in a run's folder that has its rows."""
_USAGE = "usage: wsync status [HOST:PORT of wsync.serve_metrics | a run's folder; the newest one in outputs/]"
_COLUMNS = ("model", "worker", "where", "state", "sent", "installed", "behind", "since", "verified", "error")


def main() -> None:
    """Show the rows. The exit status is 1 if there are none; in a pipe, also if one stands out."""
    if {"-h", "--help"} & {*sys.argv}:
        return print(_USAGE)
    if sys.argv[1:2] != ["status"] or len(sys.argv) > 3:
        sys.exit(_USAGE)
    try:
        from rich.console import Console
        from rich.live import Live
    except ModuleNotFoundError as error:
        sys.exit(f"wsync status: {error.name} is not installed: pip install -e '.[metrics]' in a clone of wsync")
    console = Console(width=None if sys.stdout.isatty() else 200)
    try:
        table = table_of(read(*sys.argv[2:]))
        if not console.is_terminal:
            with console.capture() as printed:
                console.print(table)
            print(*(line.rstrip() for line in printed.get().splitlines()), sep="\n")
            sys.exit(any(row.style for row in table.rows))
        with Live(table, console=console, auto_refresh=False) as live:
            while True:
                time.sleep(1.0)  # between two readings of the rows
                live.update(table_of(read(*sys.argv[2:])), refresh=True)
    except KeyboardInterrupt:
        return
    except (OSError, ValueError) as error:
        sys.exit(f"wsync status: {error}")


def read(source: str = "") -> list[dict[str, Any]]:
    """Return the rows, which say if a run is over. OSError, ValueError: there are none, or they cannot be read."""
    if source and not Path(source).is_dir():
        if ":" not in source:
            raise ValueError(f"there is no folder {source}; an address is HOST:PORT")
        with urlopen(f"http://{source}/ledger", timeout=5) as answer:
            return json.load(answer)
    found = Path(source or "outputs").rglob(LEDGER)
    path = max(found, key=lambda one: one.stat().st_mtime, default=Path(source, LEDGER))
    rows, written, summary = json.loads(path.read_bytes()), path.stat().st_mtime, path.with_name("summary.json")
    over = summary.exists() and summary.stat().st_mtime >= written  # else it is of a run that this one continues
    failed = (json.loads(summary.read_bytes()).get("error") or "").partition("\n")[0] if over else ""
    for row in rows:
        host, _, pid = row.get("trainer", "").rpartition(":")
        killed = not over and host == os.uname().nodename and not os.path.exists(f"/proc/{pid}")
        row["now"] = written if over or killed else time.time()
        if over and row["state"] == "alive":
            row["state"], row["error"] = "ended", row["error"] or failed
        elif killed:
            row["state"], row["error"] = "dead", row["error"] or "its trainer's process is gone"
    return rows


def table_of(rows: list[dict[str, Any]]) -> Any:
    """Return a line for each row: red if it is dead or missing, yellow if in doubt, or more than a version behind."""
    from rich.table import Column, Table

    columns = [Column(name, no_wrap=True, ratio=int(name == "error") or None) for name in _COLUMNS]
    table = Table(*columns, box=None, header_style="dim", expand=True)
    for row in rows:
        row["since"] = row["sent_at"] and f"{row.get('now', time.time()) - row['sent_at']:.0f} s"
        if row["used"] == 0:
            row["error"] = row["error"] or "no call has entered its gate"
        doubt = "yellow" if row["error"] or (row["behind"] or 0) > 1 else None
        style = "bold red" if row["state"] in ("dead", "never connected") else doubt
        table.add_row(*("–" if row[name] is None else str(row[name]) for name in _COLUMNS), style=style)
    return table


if __name__ == "__main__":
    main()
