"""Returns after a number of frames, for ``train.py`` beside Stable-Baselines3's PPO with the same settings, in one run.

    python scripts/bench_returns.py                                          # HalfCheetah, 100,000 frames, 3 seeds
    python scripts/bench_returns.py --env mujoco/hopper --frames 300000

The contenders take turns, seed by seed, each a process of its own; ours has two workers more. The return is the mean of
the last 20 episodes. Seconds count from the first step of an environment.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
LAST = 20
Outcome = dict[str, Any]


def train(env: str, frames: int, seed: int) -> Outcome:
    """Run train.py once; return its returns, seconds and frames."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"env={env}", f"total_frames={frames}", f"seed={seed}", "logger=none", "stop_when_solved=false"]
        command = [sys.executable, "train.py", *settings, f"hydra.run.dir={folder}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        summary = json.loads(Path(folder, "summary.json").read_text())
    returns = [value for row in rows for value in row["episode_returns"]]
    return {"returns": returns, "seconds": summary["seconds"], "frames": summary["frames"]}


def train_peer(env_id: str, frames: int, seed: int) -> Outcome:
    """Run the peer once; return the same."""
    command = [sys.executable, "scripts/bench/sb3_mujoco.py", env_id, str(frames), str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def main(
    env: Annotated[str, typer.Option(help="An option of env: mujoco/half_cheetah, mujoco/hopper, …")] = (
        "mujoco/half_cheetah"
    ),
    frames: Annotated[int, typer.Option(min=2048)] = 100_000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each contender, with seeds 0, 1, …")] = 3,
) -> None:
    """Measure, and print a table."""
    if find_spec("stable_baselines3") is None or find_spec("mujoco") is None:
        raise typer.BadParameter("stable-baselines3 or mujoco is missing: pip install -e '.[bench,mujoco]'")
    env_id = yaml.safe_load((ROOT / "conf" / "env" / f"{env}.yaml").read_text())["env"]["id"]
    results: dict[str, list[Outcome]] = {"train.py": [], "stable-baselines3": []}
    console = Console()
    for seed in range(seeds):
        for name, outcomes in results.items():
            outcome = train(env, frames, seed) if name == "train.py" else train_peer(env_id, frames, seed)
            outcomes.append(outcome)
            mean = statistics.fmean(outcome["returns"][-LAST:])
            console.print(f"{name}, seed {seed}: return {mean:.0f} in {outcome['seconds']:.0f} s", highlight=False)
    table = Table("", "return, median", "(all)", "seconds, median", "frames/s", box=None, title=f"{env_id}, {frames:,}")
    for name, outcomes in results.items():
        means = sorted(statistics.fmean(one["returns"][-LAST:]) for one in outcomes)
        seconds = statistics.median(one["seconds"] for one in outcomes)
        rate = statistics.median(one["frames"] / one["seconds"] for one in outcomes)
        every = " ".join(f"{mean:.0f}" for mean in means)
        table.add_row(name, f"{statistics.median(means):.0f}", every, f"{seconds:.0f}", f"{rate:,.0f}")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
