"""Returns over frames, of ``train.py`` beside Stable-Baselines3's PPO with the same settings, in one run.

    python scripts/bench_returns.py                                          # HalfCheetah, 100,000 frames, 3 seeds
    python scripts/bench_returns.py --env mujoco/hopper --frames 300000 --out outputs/hopper
    python scripts/bench_returns.py --env cartpole_masked --also policy=mlp  # the peer: RecurrentPPO of sb3-contrib

The contenders take turns, seed by seed, each a process of its own; ours has two workers more. With ``--at-once 4`` four
of them run at a time; their seconds are then no measure. The return is the mean of the last episodes. Seconds count
from the first step of an environment. The folder ``--out`` gets ``results.json``, with every episode's return, and
``returns.png``, as soon as a run has ended.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from harness.training import PEER, Outcome, check_peer, settings_of, train, train_peer
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich.console import Console
from rich.table import Table

from learning.reporting.plots import BLUE, INK, MUTED, ORANGE, new_figure

OURS = "train.py"
COLOURS = (BLUE, ORANGE, MUTED, "#0f766e")
POINTS = 200
Results = Mapping[str, Sequence[Outcome]]


def last_mean(returns: Sequence[tuple[float, float]], frames: float, last: int) -> float:
    """Return the mean of the `last` returns that ended within `frames`; NaN before the first."""
    ended = [value for at, value in returns if at <= frames][-last:]
    return float(np.mean(ended)) if ended else float("nan")


def learning_curves(results: Results, title: str, last: int) -> Figure:
    """Draw the mean over the seeds of each contender, and the range from the lowest to the highest seed."""
    figure, (ax,) = new_figure(8, 1, title, "line: mean of the seeds; band: from the lowest to the highest")
    for (name, outcomes), colour in zip(results.items(), COLOURS, strict=False):
        if not outcomes:
            continue
        at = np.linspace(0, max(one["frames"] for one in outcomes), POINTS + 1)[1:]
        curves = np.array([[last_mean(one["returns"], frames, last) for frames in at] for one in outcomes])
        begun = ~np.isnan(curves).any(0)
        at, curves = at[begun], curves[:, begun]
        count = f"{len(outcomes)} seed{'s' if len(outcomes) > 1 else ''}"
        ax.plot(at, curves.mean(0), color=colour, linewidth=2, label=f"{name}, {count}")
        ax.fill_between(at, curves.min(0), curves.max(0), color=colour, alpha=0.18, linewidth=0)
    ax.set_xlabel("frames (environment steps)", color=INK)
    ax.set_ylabel(f"return, mean of {last} episodes", color=INK)
    ax.set_xlim(left=0)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    figure.legend(loc="outside lower left", frameon=False, fontsize=9)
    return figure


def in_digits(value: float | np.floating) -> str:
    """Return a return for the table: with one decimal if it is below 10, as on Atari."""
    return f"{value:.1f}" if abs(value) < 10 else f"{value:.0f}"


def table(results: Results, title: str, last: int) -> Table:
    """Return a table of all contenders."""
    shown = Table("", "return", "(each)", "seconds", "(each)", "frames/s", box=None, title=title)
    for name, outcomes in results.items():
        means = [last_mean(one["returns"], one["frames"], last) for one in outcomes]
        seconds = [one["seconds"] for one in outcomes]
        rate = statistics.median(one["frames"] / one["seconds"] for one in outcomes)
        shown.add_row(
            name,
            f"{in_digits(np.mean(means))} ± {in_digits(np.std(means))}",
            " ".join(map(in_digits, means)),
            f"{statistics.median(seconds):.0f}",
            " ".join(f"{one:.0f}" for one in seconds),
            f"{rate:,.0f}",
        )
    return shown


def main(
    env: Annotated[str, typer.Option(help="An option of env: mujoco/half_cheetah, atari/pong, …")] = (
        "mujoco/half_cheetah"
    ),
    frames: Annotated[int, typer.Option(min=2048)] = 100_000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each contender, with seeds 0, 1, …")] = 3,
    also: Annotated[list[str] | None, typer.Option(help="One more contender of ours: overrides of train.py")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Runs at a time")] = 1,
    peer: Annotated[bool, typer.Option(help="Run Stable-Baselines3 as well")] = True,
    last: Annotated[int, typer.Option(min=1, help="Episodes in a mean")] = 20,
    out: Annotated[Path | None, typer.Option(help="Folder for the returns and the picture")] = None,
) -> None:
    """Measure, and print a table."""
    if peer:
        check_peer()
    fixed = [f"env={env}", f"total_frames={frames}", "logger=none", "stop_when_solved=false"]
    contenders = {OURS: []} | {f"{OURS} {one}": one.split() for one in also or []} | ({PEER: []} if peer else {})
    results: dict[str, list[Outcome]] = {name: [] for name in contenders}
    title, console = f"env={env}, {frames:,} frames", Console()
    runs = [(seed, name) for seed in range(seeds) for name in contenders]
    with ThreadPoolExecutor(at_once) as pool:
        pending = []
        for seed, name in runs:
            overrides = [*fixed, *contenders[name], f"seed={seed}"]
            call = partial(train_peer, settings_of(overrides)) if name == PEER else partial(train, overrides)
            pending.append(pool.submit(call))
        for (seed, name), outcome in zip(runs, (one.result() for one in pending), strict=True):
            results[name].append(outcome)
            mean = last_mean(outcome["returns"], outcome["frames"], last)
            console.print(
                f"{name}, seed {seed}: return {in_digits(mean)} in {outcome['seconds']:.0f} s", highlight=False
            )
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                (out / "results.json").write_text(json.dumps(results))
                learning_curves(results, title, last).savefig(out / "returns.png")
    console.print(table(results, title, last))
    if out is not None:
        console.print(f"files: {out}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
