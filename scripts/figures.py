"""All figures of the performance page, by one command: ``make figures``, a quarter of an hour on an idle machine.

Runs the benchmarks below one after the other, each as a user would, and writes their tables with the commands into
docs/figures.md, the pictures beside it. A benchmark that fails is on the page as well, with the end of its output, and
the exit status is 1.

    python scripts/figures.py                       # needs pip install -e '.[bench,mujoco,atari]'
    python scripts/figures.py --only forms --only phases
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "figures.md"
PACKAGES = ("torch", "tensordict", "gymnasium", "ray", "torchrl", "stable-baselines3")
WIDTH = 150  # columns of the tables


@dataclass(frozen=True)
class Benchmark:
    """One section of the page."""

    name: str  # for --only
    title: str
    text: str
    command: str
    picture: str = ""  # the file in the folder of its run that is shown, which ``out=`` names


BENCHMARKS = (
    Benchmark(
        "send",
        "A send, beside TorchRL",
        "Two workers. Both sides are trainers with workers of their own and take turns; every value is checked after "
        "every round. *copy* is the ratio to a plain copy of the same bytes, in the same process and in turn. "
        "TorchRL's other schemes work inside its collectors only: see the next table.",
        "scripts/bench_sync.py kind=send backends=[shared_mem,multiprocess] mib=[0.0625,1,16,64] workers=[2] "
        "rounds=60 seconds=5 peer=torchrl",
        "latency.png",
    ),
    Benchmark(
        "update",
        "A collector's update_policy_weights_(), beside TorchRL",
        "The same between two batches, where caches are cold. *gloo*: without shared memory, as to workers on "
        "other machines, here over the loopback device.",
        "scripts/bench_sync.py kind=update policy_mib=[0.018,1] workers=[2] rounds=40 seconds=4 peer=torchrl",
        "latency.png",
    ),
    Benchmark(
        "forms",
        "The calling forms",
        "`send` with each kind of argument, after `init_on_sender(model=…)` and after `init_on_sender(weights=…)`. "
        "*In turn*: another form before each call. *A byte and back*: by a pipe to each of two processes.",
        "scripts/bench_forms.py",
    ),
    Benchmark(
        "phases",
        "Where the time of a small update goes",
        "18 KiB in 6 tensors to two workers. *Warm*: one update after another. *Cold*: other work between two updates.",
        "scripts/bench_forms.py --phases",
    ),
    Benchmark(
        "cartpole",
        "Collection: CartPole",
        "Frames per second of whole batches, beside Gymnasium's bare loop with the same policy in as many processes, "
        "which stores nothing. CartPole has Gymnasium's native vector environment: all environments in one call.",
        "scripts/bench_collect.py --width 8 --width 64 --worker 2 --rounds 9",
    ),
    Benchmark(
        "half_cheetah",
        "Collection: HalfCheetah",
        "",
        "scripts/bench_collect.py --env HalfCheetah-v5 --width 8 --worker 2 --rounds 9 --steps 128",
    ),
    Benchmark(
        "pong",
        "Collection: Pong",
        "With the network of DQN's paper on four grey frames.",
        "scripts/bench_collect.py --env ALE/Pong-v5 --width 4 --worker 2 --rounds 5 --steps 32",
    ),
    Benchmark(
        "solve",
        "Training: CartPole until it is solved, beside Stable-Baselines3",
        "Seconds count from the first step of an environment. Ours steps all environments at once and has two "
        "workers; Stable-Baselines3 has its tuned settings.",
        "scripts/bench_returns.py --solve --seeds 5",
    ),
    Benchmark(
        "returns",
        "Training: HalfCheetah, beside Stable-Baselines3 and SBX",
        "The same settings on all sides, 100,000 frames. Two seeds compare the times. They do not compare returns, "
        "which differ by hundreds from seed to seed: see [Performance](performance.md#collection-and-training).",
        "scripts/bench_returns.py --seeds 2 --sbx",
    ),
)
_PROGRESS = re.compile(r"→|(send|update) .*: p50 |.*, seed \d+: |A\.L\.E|\[Powered")  # or known from the table
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run(benchmark: Benchmark, console: Console) -> tuple[str, bool]:
    """Run a benchmark; return its section of the page, and whether it has succeeded."""
    console.print(f"{benchmark.title} …", end=" ", highlight=False)
    environment = {**os.environ, "COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb"}
    load, began = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *benchmark.command.split()]
        if benchmark.picture:
            command.append(f"out={folder}")
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        image, picture = "", Path(folder, benchmark.picture)
        if picture.is_file():
            shutil.copy(picture, PAGE.parent / "images" / f"{benchmark.name}.png")
            image = f"![{benchmark.title}](images/{benchmark.name}.png)"
    seconds = time.monotonic() - began
    console.print(f"{seconds:.0f} s" if done.returncode == 0 else f"[red]exit status {done.returncode}[/]")
    lines = [line.rstrip() for line in _COLOURS.sub("", done.stdout).splitlines() if not _PROGRESS.match(line)]
    if done.returncode:
        lines = [f"exit status {done.returncode}", *lines[-10:], *done.stderr.splitlines()[-10:]]
    table = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
    note = (
        f"`python {shlex.join(benchmark.command.split())}` ({seconds:.0f} s; load before: {load:.1f}; {date.today()})"
    )
    parts = [f"## {benchmark.title}", benchmark.text, image, note, f"```text\n{table}\n```"]
    return "\n\n".join(filter(None, parts)), done.returncode == 0


def machine() -> str:
    """Return what the figures depend on: cores and versions, in a sentence."""
    installed = {one.name: one.version for one in metadata.distributions()}
    versions = ", ".join(f"{package} {installed[package]}" for package in PACKAGES if package in installed)
    system = f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores ({platform.machine()}), {system}, {versions}."


def main(
    only: Annotated[list[str] | None, typer.Option(help="A benchmark by name; the page keeps the others.")] = None,
) -> None:
    """Measure, and write the page."""
    chosen = [one for one in BENCHMARKS if only is None or one.name in only]
    if unknown := set(only or ()) - {one.name for one in chosen}:
        known = ", ".join(one.name for one in BENCHMARKS)
        raise typer.BadParameter(f"unknown benchmark {', '.join(sorted(unknown))}: choose from {known}")
    console = Console()
    head = [
        "# Figures\n\n*This page is made by `make figures`, which takes a quarter of an hour. "
        "[Performance](performance.md) explains it.*\n\nBenchmarks that compare two sides run both in alternation, "
        "in one run, and print the ratio. Where a machine is shared, read the ratios rather than the times. p50 and "
        "p95 are the median and the 95th percentile.",
        f"Measured with {machine()}",
    ]
    before = PAGE.read_text().split("\n## ")[1:] if only else []
    failed, sections = False, {one.partition("\n")[0]: f"## {one.rstrip()}" for one in before}
    for one in chosen:
        sections[one.title], succeeded = run(one, console)
        failed |= not succeeded
        ordered = [sections[each.title] for each in BENCHMARKS if each.title in sections]
        PAGE.write_text("\n\n".join(head + ordered) + "\n")  # after each: an interrupted run leaves a page
    console.print(f"→ {PAGE.relative_to(ROOT)}", highlight=False)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
