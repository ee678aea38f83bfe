"""Frames per second of collection, beside a bare loop of Gymnasium (and TorchRL) in the same run.

The bare loop steps the same environments with the same policy, in as many processes, and stores nothing. All contenders
of one width take turns, in short slices, so that a noisy machine is noisy for all of them; what counts is the median of
the ratios within a round. The policy is 2 x 64 tanh, or for images the Nature network.

    python scripts/bench_collect.py --out outputs/bench_collect.json
    python scripts/bench_collect.py --env HalfCheetah-v5 --width 8      # needs gymnasium[mujoco]
    python scripts/bench_collect.py --env ALE/Pong-v5 --width 8         # needs gymnasium[atari,other]
    python scripts/bench_collect.py --peer                              # where torchrl is installed
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import gymnasium as gym
import torch
import typer
from harness import bare_loop
from harness.bare_loop import BareLoop, Turn, gym_env, policy
from harness.processes import worker_processes
from rich.console import Console
from rich.table import Table
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

import wsync
from collectors import MultiSyncCollector
from collectors.batch_layout import frames_of
from collectors.rollouts.rollout import Rollout

Contender = Callable[[], AbstractContextManager[Turn]]
Entrants = dict[str, tuple[int, Contender]]


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
            pipes.send(seconds)
            answers = pipes.receive()
            return sum(frames for frames, _ in answers), max(elapsed for _, elapsed in answers)

        yield turn


def timed(batch: Callable[[], TensorDictBase]) -> Turn:
    """Return the turn that takes batch after batch."""

    def turn(seconds: float) -> tuple[int, float]:
        frames, began = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds:
            frames += frames_of(batch())
        return frames, elapsed

    return turn


@contextmanager
def rollout(env_id: str, width: int, steps: int) -> Iterator[Turn]:
    """Run the loop that every collector uses, in this process: whole batches, with log-probabilities and versions."""
    env = gym_env(env_id, width)
    loop = Rollout(env, policy(env_id))
    batch = loop.buffer(steps)
    yield timed(lambda: loop.collect(batch))
    env.close()


@contextmanager
def collector(env_id: str, width: int, steps: int, workers: int) -> Iterator[Turn]:
    """Iterate a synchronous collector that feeds its workers through shared memory."""
    with MultiSyncCollector(
        [functools.partial(gym_env, env_id, width)] * workers,
        policy(env_id),
        frames_per_batch=steps * width * workers,
        total_frames=-1,
        weight_sync_schemes={"policy": wsync.SharedMemWeightSyncScheme()},
        cat_results="stack",
    ) as batches:
        iterator = iter(batches)
        yield timed(lambda: next(iterator))


@contextmanager
def torchrl_collector(
    env_id: str, width: int, steps: int, workers: int, actor: Callable[[str], TensorDictModuleBase]
) -> Iterator[Turn]:
    """Iterate TorchRL's collector: in this process for ``workers`` 0, else its synchronous one with processes."""
    from torchrl.collectors import Collector, MultiSyncCollector  # pyright: ignore[reportMissingImports]

    common: dict[str, Any] = {"frames_per_batch": steps * width * max(workers, 1), "total_frames": -1}
    make: Any = functools.partial(torchrl_env, env_id, width)
    batches = (
        MultiSyncCollector([make] * workers, actor(env_id), cat_results="stack", **common)
        if workers
        else Collector(make, actor(env_id), **common)
    )
    iterator = iter(batches)
    yield timed(lambda: next(iterator))
    batches.shutdown()


def torchrl_policy(env_id: str) -> TensorDictModuleBase:
    """Make the same network act the way that TorchRL's tutorials do it; a choice among actions."""
    from tensordict.nn import TensorDictModule
    from torchrl.modules import ProbabilisticActor  # pyright: ignore[reportMissingImports]

    return ProbabilisticActor(
        TensorDictModule(policy(env_id).network, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def torchrl_env(env_id: str, width: int) -> Any:
    """Make TorchRL's environments: one, its ``SerialEnv`` of up to 63, or Gymnasium's vector environment from 64 on."""
    from torchrl.envs import GymWrapper, SerialEnv  # pyright: ignore[reportMissingImports]

    def one() -> Any:
        return GymWrapper(bare_loop.make_one(env_id), categorical_action_encoding=True)

    if width < 64:
        return one() if width == 1 else SerialEnv(width, one)
    # It does not take Gymnasium's native vector CartPole, nor any other that resets in the step after the end.
    mode = gym.vector.AutoresetMode.DISABLED
    envs = gym.vector.SyncVectorEnv([functools.partial(bare_loop.make_one, env_id)] * width, autoreset_mode=mode)
    return GymWrapper(envs, categorical_action_encoding=True)


def contenders(env_id: str, width: int, steps: int, workers: list[int], peer: bool) -> list[Entrants]:
    """Name all that take turns at this width, in groups: what acts in one process or several, the bare loop first."""
    groups: list[Entrants] = []
    for count in (0, *workers):
        processes = "this process" if count == 0 else "1 worker" if count == 1 else f"{count} workers"
        ours = functools.partial(collector, env_id, width, steps, count)
        own = functools.partial(rollout, env_id, width, steps) if count == 0 else ours
        group: Entrants = {
            f"bare loop, {processes}": (count, functools.partial(bare, env_id, width, count)),
            f"{'rollout' if count == 0 else 'MultiSyncCollector'}, {processes}": (count, own),
        }
        if peer:
            run = functools.partial(torchrl_collector, env_id, width, steps, count)
            if has_choices(env_id):
                group[f"torchrl, {processes}"] = (count, functools.partial(run, torchrl_policy))
            group[f"torchrl, {processes}, our policy"] = (count, functools.partial(run, policy))
        groups.append(group)
    return groups


def has_choices(env_id: str) -> bool:
    """Whether an action is a choice."""
    return isinstance(bare_loop.make_one(env_id).action_space, gym.spaces.Discrete)


def measure(groups: list[Entrants], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Let each contender take its turns for ``seconds``, ``rounds`` times in alternation; return frames/s by round."""
    entrants = {name: entrant for group in groups for name, (_, entrant) in group.items()}
    speeds: dict[str, list[float]] = {name: [] for name in entrants}
    with ExitStack() as stack:
        turns = {name: stack.enter_context(entrant()) for name, entrant in entrants.items()}
        for turn in turns.values():
            turn(seconds / 2)
        for _ in range(rounds):
            for name, turn in turns.items():
                frames, elapsed = turn(seconds)
                speeds[name].append(frames / elapsed)
    return speeds


def compare(groups: list[Entrants], rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Measure; return for each contender its median frames/s, and its share of the bare loop in as many processes.

    The share is the median over the rounds of the ratio within a round, with the quartiles.
    """
    speeds, rows = measure(groups, rounds, seconds), {}
    for group in groups:
        bare_speeds = speeds[next(iter(group))]
        for name, (count, _) in group.items():
            shares = sorted(one / bare for one, bare in zip(speeds[name], bare_speeds, strict=True))
            rows[name] = {
                "workers": count,
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
    peer: Annotated[bool, typer.Option(help="run TorchRL's collectors too")] = False,
    out: Annotated[Path | None, typer.Option(help="write the figures here, as JSON")] = None,
) -> None:
    """Measure collection and print frames/s, and the ratio to Gymnasium's bare loop."""
    torch.set_num_threads(1)
    counts = [count for count in workers if count > 0]
    results = {width: compare(contenders(env_id, width, steps, counts, peer), rounds, seconds) for width in widths}
    show(env_id, results)
    if out is not None:
        machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "torch": torch.__version__}
        facts = {"env": env_id, "machine": machine, "gymnasium": gym.__version__, "steps": steps, "rounds": rounds}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({**facts, "widths": results}, indent=2))


if __name__ == "__main__":
    typer.run(main)
