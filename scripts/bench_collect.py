"""Frames per second of collection, beside a bare loop of Gymnasium in the same run.

The bare loop steps the same environments with the same policy, in as many processes, and stores nothing. All contenders
of one width take turns, in short slices, so that a noisy machine is noisy for all of them; what counts is the median of
the ratios within a round. The policy is 2 x 64 tanh, or for images the Nature network.

    python scripts/bench_collect.py
    python scripts/bench_collect.py --env HalfCheetah-v5 --width 8      # needs gymnasium[mujoco]
    python scripts/bench_collect.py --env ALE/Pong-v5 --width 8         # needs gymnasium[atari,other]
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Annotated, Any

import torch
import typer
from harness import bare_loop
from harness.bare_loop import BareLoop, Turn, gym_env, policy
from harness.processes import worker_processes
from rich.console import Console
from rich.table import Table
from tensordict import TensorDictBase

import wsync
from collectors import Collector, MultiSyncCollector

Entrants = dict[str, Callable[[], AbstractContextManager[Turn]]]


@contextmanager
def bare(env_id: str, width: int, processes: int) -> Iterator[Turn]:
    """Run the bare loop in this process, or in ``processes`` of their own at the same time, none waiting for another.

    Processes are asked for the same time, so their frames are added up.
    """
    if not processes:
        loop = BareLoop(env_id, width)
        yield loop.run
        loop.env.close()
        return
    with worker_processes(bare_loop.serve, processes, env_id, width) as pipes:

        def turn(seconds: float) -> tuple[int, float]:
            answers = pipes.ask(seconds)
            return sum(frames for frames, _ in answers), max(elapsed for _, elapsed in answers)

        yield turn


def timed(batches: Iterator[TensorDictBase]) -> Turn:
    """Return the turn that takes batch after batch."""

    def turn(seconds: float) -> tuple[int, float]:
        frames, began = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds:
            frames += next(batches).numel()
        return frames, elapsed

    return turn


@contextmanager
def ours(env_id: str, width: int, steps: int, workers: int) -> Iterator[Turn]:
    """Iterate a collector: in this process, or a synchronous one that feeds its workers through shared memory."""
    make = functools.partial(gym_env, env_id, width)
    options: dict[str, Any] = {"frames_per_batch": steps * width * max(workers, 1), "total_frames": -1}
    if workers:
        schemes: dict[str, wsync.WeightSyncScheme] = {"policy": wsync.SharedMemWeightSyncScheme()}
        made = MultiSyncCollector(
            [make] * workers, policy(env_id), weight_sync_schemes=schemes, cat_results="stack", **options
        )
    else:
        made = Collector(make, policy(env_id), **options)
    with made as collector:
        yield timed(iter(collector))


def contenders(env_id: str, width: int, steps: int, workers: list[int]) -> list[Entrants]:
    """Name all that take turns at this width, in groups: what acts in one process or several, the bare loop first."""
    groups: list[Entrants] = []
    for count in (0, *workers):
        where = "this process" if count == 0 else "1 worker" if count == 1 else f"{count} workers"
        groups.append(
            {
                f"bare loop, {where}": functools.partial(bare, env_id, width, count),
                f"{'MultiSyncCollector' if count else 'Collector'}, {where}": functools.partial(
                    ours, env_id, width, steps, count
                ),
            }
        )
    return groups


def compare(groups: list[Entrants], rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Let each contender take its turns for ``seconds``, ``rounds`` times in alternation.

    Returns for each its median frames/s, and its share of the bare loop in as many processes: the median over the
    rounds of the ratio within a round, with the quartiles.
    """
    entrants = {name: entrant for group in groups for name, entrant in group.items()}
    speeds: dict[str, list[float]] = {name: [] for name in entrants}
    with ExitStack() as stack:
        turns = {name: stack.enter_context(entrant()) for name, entrant in entrants.items()}
        for turn in turns.values():
            turn(seconds / 2)
        for _ in range(rounds):
            for name, turn in turns.items():
                frames, elapsed = turn(seconds)
                speeds[name].append(frames / elapsed)
    rows = {}
    for group in groups:
        bare_speeds = speeds[next(iter(group))]
        for name in group:
            shares = sorted(one / bare for one, bare in zip(speeds[name], bare_speeds, strict=True))
            rows[name] = {
                "frames_per_second": statistics.median(speeds[name]),
                "of_bare_loop": statistics.median(shares),
                "lower_quartile": shares[len(shares) // 4],
                "upper_quartile": shares[-1 - len(shares) // 4],
            }
    return rows


def show(env_id: str, results: dict[int, dict[str, dict[str, float]]]) -> None:
    """Print the table."""
    table = Table(title=f"Collection, {env_id}, medians; load {os.getloadavg()[0]:.1f}")
    for heading in ("width", "collected by", "frames/s", "bare loop", "quartiles"):
        table.add_column(heading, justify="left" if heading == "collected by" else "right", no_wrap=True)
    for width, rows in results.items():
        for name, row in rows.items():
            speed, share = f"{row['frames_per_second']:,.0f}", f"{row['of_bare_loop']:.2f} x"
            table.add_row(str(width), name, speed, share, f"{row['lower_quartile']:.2f}–{row['upper_quartile']:.2f}")
        table.add_section()
    Console().print(table)


def main(
    env_id: Annotated[str, typer.Option("--env", help="Gymnasium id")] = "CartPole-v1",
    widths: Annotated[list[int], typer.Option("--width", help="environments per process")] = [1, 8, 64],  # noqa: B006
    workers: Annotated[list[int], typer.Option("--worker", help="worker processes; 0 for none")] = [1, 2],  # noqa: B006
    steps: Annotated[int, typer.Option(min=1, help="steps per environment and batch")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="turns of each contender")] = 7,
    seconds: Annotated[float, typer.Option(min=0.001, help="length of a turn")] = 0.4,
) -> None:
    """Measure collection and print frames/s, and the ratio to Gymnasium's bare loop."""
    torch.set_num_threads(1)
    counts = [count for count in workers if count > 0]
    results = {width: compare(contenders(env_id, width, steps, counts), rounds, seconds) for width in widths}
    show(env_id, results)


if __name__ == "__main__":
    typer.run(main)
