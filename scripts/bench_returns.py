"""Trainings of ``train.py`` beside Stable-Baselines3's PPO, in one run: returns over frames, or seconds until solved.

    python scripts/bench_returns.py                                          # HalfCheetah, 100,000 frames, 3 seeds
    python scripts/bench_returns.py --env mujoco/hopper --frames 300000 --out outputs/hopper
    python scripts/bench_returns.py --env cartpole_masked --also policy=mlp  # the peer: RecurrentPPO of sb3-contrib
    python scripts/bench_returns.py --sbx                                    # SBX, PPO in JAX, as a second peer
    python scripts/bench_returns.py --solve --seeds 5                        # CartPole until it is solved

The contenders take turns, seed by seed, each a process of its own; ours has two workers more. They have the same
settings, except with ``--solve``: there each has tuned ones. With ``--at-once 4`` four of them run at a time; their
seconds are then no measure. The return is the mean of the last 20 episodes. Seconds count from the first step of an
environment. The folder ``--out`` gets ``results.json``, with every episode's return, and ``returns.png``, as soon as a
run has ended. The exit status is 1 if a run of ours with ``--solve`` did not solve it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from hydra import compose, initialize_config_dir
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from learning.config import register_configs
from learning.reporting.plots import BLUE, INK, MUTED, ORANGE, new_figure
from learning.summary import return_text

ROOT = Path(__file__).resolve().parents[1]
OURS, PEER, SBX = "train.py", "stable-baselines3", "sbx"
COLOURS = (BLUE, ORANGE, MUTED, "#0f766e")
POINTS, LAST = 200, 20  # of a curve; episodes in a mean
TUNED = (  # by the zoo of Stable-Baselines3 for its PPO; the rates fall to a fiftieth over 100,000 frames
    *("algorithm=ppo_cartpole_zoo", "num_workers=1", "num_envs=8", "frames_per_batch=256", "total_frames=200000"),
    *("algorithm.anneal_frames=100000", "algorithm.lr_end_factor=0.02", "algorithm.clip_final=4e-3"),
    *("algorithm.value_coef=1", "env.solved_at=475"),  # its vf_coef is 0.5
)
Outcome = Mapping[str, Any]
"""``returns`` (the frames at the end of each episode, and its return), ``solved``, ``seconds`` and ``frames``."""
Results = Mapping[str, Sequence[Outcome]]


def train(overrides: Sequence[str]) -> Outcome:
    """Run train.py once."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", *overrides, "logger=none", f"hydra.run.dir={folder}"]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
        summary = json.loads(Path(folder, "summary.json").read_text())
    returns = [(row["frames"], value) for row in rows for value in row["episode_returns"]]
    return {"returns": returns, **{name: summary[name] for name in ("solved", "seconds", "frames")}}


def train_peer(settings: Any, peer: str) -> Outcome:
    """Run a peer once with the settings of a run of train.py."""
    command = [sys.executable, "scripts/harness/sb3.py", json.dumps(settings), peer]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def settings_of(overrides: Sequence[str]) -> Any:
    """Return the settings that train.py has with `overrides`, as plain values."""
    register_configs()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return OmegaConf.to_container(compose("train", overrides=[*overrides]), resolve=True)


def last_mean(returns: Sequence[tuple[float, float]], frames: float) -> float:
    """Return the mean of the last returns that ended within `frames`; NaN before the first."""
    ended = [value for at, value in returns if at <= frames][-LAST:]
    return float(np.mean(ended)) if ended else float("nan")


def learning_curves(results: Results, title: str) -> Figure:
    """Draw the mean over the seeds of each contender, and the range from the lowest to the highest seed."""
    figure, (ax,) = new_figure(8, 1, title, "line: mean of the seeds; band: from the lowest to the highest")
    for (name, outcomes), colour in zip(results.items(), COLOURS, strict=False):
        if not outcomes:
            continue
        at = np.linspace(0, max(one["frames"] for one in outcomes), POINTS + 1)[1:]
        curves = np.array([[last_mean(one["returns"], frames) for frames in at] for one in outcomes])
        begun = ~np.isnan(curves).any(0)
        at, curves = at[begun], curves[:, begun]
        count = f"{len(outcomes)} seed{'s' if len(outcomes) > 1 else ''}"
        ax.plot(at, curves.mean(0), color=colour, linewidth=2, label=f"{name}, {count}")
        ax.fill_between(at, curves.min(0), curves.max(0), color=colour, alpha=0.18, linewidth=0)
    ax.set_xlabel("frames (environment steps)", color=INK)
    ax.set_ylabel(f"return, mean of {LAST} episodes", color=INK)
    ax.set_xlim(left=0)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    figure.legend(loc="outside lower left", frameon=False, fontsize=9)
    return figure


def table(results: Results, title: str) -> Table:
    """Return a table of all contenders, with the peer's time over ours."""
    shown = Table("", "return", "(each)", "solved", "seconds", "(each)", "frames/s", "peer took", box=None, title=title)
    peer = statistics.median(one["seconds"] for one in results[PEER]) if results.get(PEER) else None
    for name, outcomes in results.items():
        means = [last_mean(one["returns"], one["frames"]) for one in outcomes]
        seconds = [one["seconds"] for one in outcomes]
        middle = statistics.median(seconds)
        shown.add_row(
            name,
            f"{return_text(statistics.mean(means))} ± {return_text(statistics.pstdev(means))}",
            " ".join(map(return_text, means)),
            f"{sum(one['solved'] for one in outcomes)} of {len(outcomes)}",
            f"{middle:.1f}",
            " ".join(f"{one:.1f}" for one in seconds),
            f"{statistics.median(one['frames'] / one['seconds'] for one in outcomes):,.0f}",
            f"{peer / middle:.1f} ×" if peer and name != PEER else "",
        )
    return shown


def main(
    env: Annotated[str, typer.Option(help="An option of env: mujoco/half_cheetah, atari/pong, …")] = (
        "mujoco/half_cheetah"
    ),
    frames: Annotated[int, typer.Option(min=2048)] = 100_000,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each contender, with seeds 0, 1, …")] = 3,
    also: Annotated[list[str] | None, typer.Option(help="One more contender of ours: overrides of train.py")] = None,
    solve: Annotated[bool, typer.Option("--solve", help="CartPole until it is solved, instead")] = False,
    at_once: Annotated[int, typer.Option(min=1, help="Runs at a time")] = 1,
    peer: Annotated[bool, typer.Option(help="Run Stable-Baselines3 as well")] = True,
    sbx: Annotated[bool, typer.Option("--sbx", help="Run SBX as well")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the returns and the picture")] = None,
) -> None:
    """Measure, and print a table."""
    for module in ["stable_baselines3"] * peer + ["sbx"] * sbx:
        if find_spec(module) is None:
            raise typer.BadParameter(f"{module} is not installed here: pip install -e '.[bench]', or say --no-peer")
    fixed = [] if solve else [f"env={env}", f"total_frames={frames}", "stop_when_solved=false"]
    contenders = {OURS: []} | {f"{OURS} {one}": one.split() for one in also or []}
    contenders |= {name: [*TUNED] if solve else [] for name, runs in ((PEER, peer), (SBX, sbx)) if runs}
    results: dict[str, list[Outcome]] = {name: [] for name in contenders}
    title, console = "CartPole, until it is solved" if solve else f"env={env}, {frames:,} frames", Console()
    runs = [(seed, name) for seed in range(seeds) for name in contenders]
    with ThreadPoolExecutor(at_once) as pool:
        pending = []
        for seed, name in runs:
            overrides = [*fixed, *contenders[name], f"seed={seed}"]
            peers = name in (PEER, SBX)
            call = partial(train_peer, settings_of(overrides), name) if peers else partial(train, overrides)
            pending.append(pool.submit(call))
        for (seed, name), outcome in zip(runs, (one.result() for one in pending), strict=True):
            results[name].append(outcome)
            mean = return_text(last_mean(outcome["returns"], outcome["frames"]))
            console.print(f"{name}, seed {seed}: return {mean} in {outcome['seconds']:.1f} s", highlight=False)
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                (out / "results.json").write_text(json.dumps(results))
                learning_curves(results, title).savefig(out / "returns.png")
    console.print(table(results, title))
    if solve and not all(one["solved"] for name in results if name.startswith(OURS) for one in results[name]):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
