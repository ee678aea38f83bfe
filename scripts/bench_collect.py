"""Frames per second of collection on CartPole-v1, beside Gymnasium's bare loop (and TorchRL) in the same run.

All contenders of one width take turns, in short slices, so that a noisy machine is noisy for all of them; what counts
is the median of the ratios within a round. The same policy (2 x 64 tanh, categorical) acts everywhere.

    python scripts/bench_collect.py --out outputs/bench_collect.json
    python scripts/bench_collect.py --peer          # where torchrl is installed
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
from typing import Annotated

import gymnasium as gym
import torch
import typer
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from rich.console import Console
from rich.table import Table
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase

import wsync
from collectors import GymEnv, MultiSyncCollector
from collectors.rollouts.rollout import Rollout
from learning.networks import Policy, make_policy

ENV = "CartPole-v1"
BARE = "gymnasium, bare loop"
Turn = Callable[[], int]
"""Do a little work; return how many frames it was."""
Contender = Callable[[], AbstractContextManager[Turn]]


def policy() -> Policy:
    """Make the policy that acts in every contender."""
    env = GymEnv(ENV)
    return make_policy(env.observation_spec["observation"], env.action_spec)


@contextmanager
def bare_loop(width: int, steps: int) -> Iterator[Turn]:
    """Step Gymnasium's fastest environment of this width; the policy acts, and nothing is stored."""
    network = policy().network
    env = gym.make(ENV) if width == 1 else CartPoleVectorEnv(width, max_episode_steps=500)
    observation, _ = env.reset(seed=0)

    def act() -> torch.Tensor:
        logits = network(torch.from_numpy(observation))
        return (logits - torch.empty_like(logits).exponential_().log_()).argmax(-1)  # the policy's own sampling

    @torch.no_grad()
    def turn() -> int:
        nonlocal observation
        for _ in range(steps):
            action = act().numpy()
            if isinstance(env, CartPoleVectorEnv):
                observation = env.step(action)[0]
                continue
            observation, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                observation, _ = env.reset()
        return steps * width

    yield turn
    env.close()


@contextmanager
def rollout(width: int, steps: int) -> Iterator[Turn]:
    """Run the loop that every collector uses, in this process: whole batches, with log-probabilities and versions."""
    env = GymEnv(ENV, width, seed=0, vectorization_mode="auto")
    loop = Rollout(env, policy())
    batch = loop.buffer(steps)
    yield lambda: frames_in(loop.collect(batch))
    env.close()


@contextmanager
def collector(width: int, steps: int, workers: int) -> Iterator[Turn]:
    """Iterate a synchronous collector that feeds its workers through shared memory."""
    with MultiSyncCollector(
        [functools.partial(GymEnv, ENV, num_envs=width, vectorization_mode="auto")] * workers,
        policy(),
        frames_per_batch=steps * width * workers,
        total_frames=-1,
        weight_sync_schemes={"policy": wsync.SharedMemWeightSyncScheme()},
        cat_results="stack",
    ) as batches:
        iterator = iter(batches)
        yield lambda: frames_in(next(iterator))


def frames_in(batch: TensorDictBase) -> int:
    """Count the frames of a batch; reset steps of Gymnasium's native vector environment are masked."""
    return int(batch.get("mask").sum()) if "mask" in batch.keys() else batch.numel()  # noqa: SIM118  (not a dict)


@contextmanager
def torchrl_collector(
    width: int, steps: int, workers: int, actor: Callable[[], TensorDictModuleBase]
) -> Iterator[Turn]:
    """Iterate TorchRL's collector: in this process for ``workers`` 0, else its synchronous one with processes."""
    from torchrl.collectors import Collector, MultiSyncCollector  # pyright: ignore[reportMissingImports]

    common = {"frames_per_batch": steps * width * max(workers, 1), "total_frames": -1}
    make = functools.partial(torchrl_env, width)
    batches = (
        MultiSyncCollector([make] * workers, actor(), cat_results="stack", **common)
        if workers
        else Collector(make, actor(), **common)
    )
    iterator = iter(batches)
    yield lambda: next(iterator).numel()
    batches.shutdown()


def torchrl_policy() -> TensorDictModuleBase:
    """Make the same network act the way that TorchRL's tutorials do it."""
    from tensordict.nn import TensorDictModule
    from torchrl.modules import ProbabilisticActor  # pyright: ignore[reportMissingImports]

    return ProbabilisticActor(
        TensorDictModule(policy().network, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )


def torchrl_env(width: int) -> object:
    """Make TorchRL's environments: one, its ``SerialEnv`` of up to 63, or Gymnasium's vector environment from 64 on."""
    from torchrl.envs import GymEnv as PeerEnv  # pyright: ignore[reportMissingImports]
    from torchrl.envs import GymWrapper, SerialEnv  # pyright: ignore[reportMissingImports]

    if width == 1:
        return PeerEnv(ENV, categorical_action_encoding=True)
    if width < 64:
        return SerialEnv(width, functools.partial(PeerEnv, ENV, categorical_action_encoding=True))
    # It does not take Gymnasium's native vector CartPole, nor any other that resets in the step after the end.
    settings = {"autoreset_mode": gym.vector.AutoresetMode.DISABLED}
    envs = gym.make_vec(ENV, num_envs=width, vectorization_mode="sync", vector_kwargs=settings)
    return GymWrapper(envs, categorical_action_encoding=True)


def contenders(width: int, steps: int, workers: list[int], peer: bool) -> dict[str, tuple[int, Contender]]:
    """Name all that take turns at this width, with the number of processes that act; the bare loop first."""
    found: dict[str, tuple[int, Contender]] = {
        BARE: (1, functools.partial(bare_loop, width, steps)),
        "rollout": (1, functools.partial(rollout, width, steps)),
    }
    for count in workers:
        found[f"MultiSyncCollector, {_workers(count)}"] = (count, functools.partial(collector, width, steps, count))
    for count in (0, *workers) if peer else ():
        name = f"torchrl, {_workers(count)}" if count else "torchrl"
        run = functools.partial(torchrl_collector, width, steps, count)
        found[name] = (max(count, 1), functools.partial(run, torchrl_policy))
        found[f"{name}, our policy"] = (max(count, 1), functools.partial(run, policy))
    return found


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def measure(entrants: dict[str, tuple[int, Contender]], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Let each contender take its turns for ``seconds``, ``rounds`` times in alternation; return frames/s by round."""
    speeds: dict[str, list[float]] = {name: [] for name in entrants}
    with ExitStack() as stack:
        turns = {name: stack.enter_context(entrant()) for name, (_, entrant) in entrants.items()}
        for turn in turns.values():
            turn()
        for _ in range(rounds):
            for name, turn in turns.items():
                frames, start = 0, time.perf_counter()
                while (elapsed := time.perf_counter() - start) < seconds:
                    frames += turn()
                speeds[name].append(frames / elapsed)
    return speeds


def compare(entrants: dict[str, tuple[int, Contender]], rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Measure; return for each contender its median frames/s, and each process's share of the bare loop.

    The share is the median over the rounds of the ratio within a round.
    """
    speeds = measure(entrants, rounds, seconds)
    return {
        name: {
            "processes": entrants[name][0],
            "frames_per_second": statistics.median(values),
            "of_bare_loop_per_process": statistics.median(
                speed / bare / entrants[name][0] for speed, bare in zip(values, speeds[BARE], strict=True)
            ),
        }
        for name, values in speeds.items()
    }


def show(results: dict[int, dict[str, dict[str, float]]]) -> None:
    """Print the table."""
    table = Table(title=f"Collection, {ENV}, medians")
    for heading in ("environments", "collected by", "frames/s", "bare loop, per process"):
        table.add_column(heading, justify="left" if heading == "collected by" else "right")
    for width, rows in results.items():
        for name, row in rows.items():
            speed, share = f"{row['frames_per_second']:,.0f}", f"{row['of_bare_loop_per_process']:.2f} x"
            table.add_row(str(width), name, speed, share)
        table.add_section()
    Console().print(table)


def main(
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
    results = {width: compare(contenders(width, steps, counts, peer), rounds, seconds) for width in widths}
    show(results)
    if out is not None:
        machine = {"cores": os.cpu_count(), "torch": torch.__version__, "gymnasium": gym.__version__}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps({"machine": machine, "steps": steps, "rounds": rounds, "widths": results}, indent=2))


if __name__ == "__main__":
    typer.run(main)
