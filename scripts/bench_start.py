"""Seconds until a process can begin: imports of wsync, torch, tensordict and (where it is installed) TorchRL, in turn.

What counts is the median of the ratios within a round, to `import tensordict`.

    python scripts/bench_start.py --rounds 9
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

STATEMENTS = ("import torch", "import tensordict", "import wsync", "import wsync, collectors, learning")
PEER = "import torchrl.collectors, torchrl.weight_update"


def seconds(statement: str) -> float:
    """Of a process of its own, from its start to its end."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - began


def main(rounds: Annotated[int, typer.Option(min=1, help="processes of each kind")] = 7) -> None:
    """Measure, and print the medians."""
    statements = [*STATEMENTS, *([PEER] if find_spec("torchrl") else [])]
    for statement in statements:
        seconds(statement)  # what is compiled once is kept
    taken = [{one: seconds(one) for one in statements} for _ in track(range(rounds), transient=True)]
    table = Table(title=f"Process start, medians of {rounds}")
    for heading in ("", "s", "of import tensordict"):
        table.add_column(heading, justify="right" if heading else "left")
    for one in statements:
        ratio = statistics.median(turn[one] / turn["import tensordict"] for turn in taken)
        table.add_row(one, f"{statistics.median(turn[one] for turn in taken):.2f}", f"{ratio:.2f} x")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
