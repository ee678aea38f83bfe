"""Seconds until CartPole-v1 is solved, for ``train.py`` with each backend, beside Stable-Baselines3 in the same run.

    python scripts/bench_train.py                                    # shared memory, 5 seeds, beside the peer
    python scripts/bench_train.py --backends all --no-peer           # every backend

The contenders take turns, seed by seed, each a process of its own with two workers (the peer: one process). Seconds
count from the first step of an environment. The exit status is 1 if a run of ours did not solve it.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from harness.backends import BACKENDS, check
from harness.console import progress_bar
from harness.training import PEER, ROOT, Outcome, check_peer, settings_of, train, train_peer
from rich.console import Console
from rich.table import Table

TUNED = (  # by the zoo of Stable-Baselines3 for its PPO; the rates fall to a fiftieth over 100,000 frames
    *("algorithm=ppo_cartpole_zoo", "num_workers=1", "num_envs=8", "frames_per_batch=256", "total_frames=200000"),
    *("algorithm.anneal_frames=100000", "algorithm.lr_end_factor=0.02", "algorithm.clip_final=4e-3"),
    *("algorithm.value_coef=1", "env.solved_at=475"),  # its vf_coef is 0.5
)
Results = Mapping[str, Sequence[Outcome]]


def table(results: Results) -> Table:
    """Return a table of all contenders, with the peer's time over ours."""
    shown = Table("", "solved", "seconds, median", "(all)", "frames", "frames/s", "peer took", box=None)
    for column in shown.columns[1:]:
        column.justify = "right"
    peer = statistics.median(one["seconds"] for one in results[PEER]) if results.get(PEER) else None
    for name, outcomes in results.items():
        seconds = sorted(one["seconds"] for one in outcomes)
        middle = statistics.median(seconds)
        shown.add_row(
            name,
            f"{sum(one['solved'] for one in outcomes)} of {len(outcomes)}",
            f"{middle:.1f}",
            " ".join(f"{one:.1f}" for one in seconds),
            f"{statistics.median(one['frames'] for one in outcomes):,.0f}",
            f"{statistics.median(one['frames'] / one['seconds'] for one in outcomes):,.0f}",
            f"{peer / middle:.1f} ×" if peer and name != PEER else "",
        )
    return shown


def main(
    backends: Annotated[str, typer.Option(help="Names with commas between, or 'all'.")] = "shared_mem",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each contender, with seeds 0, 1, …")] = 5,
    peer: Annotated[bool, typer.Option(help="Beside Stable-Baselines3's PPO, tuned.")] = True,
    out: Annotated[Path, typer.Option(help="A folder for results.json.")] = ROOT / "outputs/bench_train",
) -> None:
    """Measure, show, and write."""
    chosen = BACKENDS if backends == "all" else tuple(backends.split(","))
    check(chosen, BACKENDS)
    if peer:
        check_peer()
    names = [*chosen, *([PEER] if peer else [])]
    results: dict[str, list[Outcome]] = {name: [] for name in names}
    console = Console()
    with progress_bar(console) as bar:
        task = bar.add_task("", total=seeds * len(names))
        for seed in range(seeds):
            for name in names:
                bar.update(task, description=f"{name}, seed {seed}")
                if name == PEER:
                    outcome = train_peer(settings_of([*TUNED, f"seed={seed}"]))
                else:
                    outcome = train([f"weight_sync={name}", f"seed={seed}", "logger=none"])
                results[name].append(outcome)
                how = "solved" if outcome["solved"] else "[red]not solved[/]"
                bar.console.print(
                    f"{name}, seed {seed}: {how} in {outcome['seconds']:.1f} s, {outcome['frames']:,} frames"
                )
                bar.advance(task)
    console.print(table(results))
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(results, indent=1))
    console.print(f"→ {os.path.relpath(out)}", highlight=False)
    if not all(one["solved"] for name in chosen for one in results[name]):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
