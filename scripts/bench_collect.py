"""Frames per second of collection, beside a bare loop of Gymnasium in the same run.

The bare loop steps the same environments with the same policy, in as many processes, and stores nothing; so does a loop
with random actions, drawn before: the simulator alone. All contenders of one width take turns, in short slices, so that
a noisy machine is noisy for all of them; what counts is the median of the ratios within a round. The policy is 2 x 64
tanh, or for images the Nature network.

    python scripts/bench_collect.py
    python scripts/bench_collect.py --env HalfCheetah-v5 --width 8      # needs gymnasium[mujoco]
    python scripts/bench_collect.py --env ALE/Pong-v5 --width 8         # needs gymnasium[atari,other]
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
import torch
import typer
from gymnasium.vector import SyncVectorEnv, VectorEnv
from harness.processes import worker_processes
from rich.console import Console
from rich.table import Table
from tensordict import TensorDictBase

import wsync
from collectors import Collector, GymEnv, MultiSyncCollector
from learning import CNN, MLP, Policy, make_actor_critic

Turn = Callable[[float], tuple[int, float]]
"""Work for so many seconds, at least; return the frames, and the seconds that it took."""
Entrant = Callable[[], AbstractContextManager[Turn]]


def make_one(env_id: str) -> gym.Env:
    """Make one environment; an Atari game as in https://arxiv.org/abs/1709.06009: 4 frames, grey, 84 × 84, stacked."""
    if not env_id.startswith("ALE/"):
        return gym.make(env_id)
    import ale_py  # noqa: F401  # pyright: ignore[reportMissingImports]  (registers the games)

    game = gym.make(env_id, frameskip=1)
    return gym.wrappers.FrameStackObservation(gym.wrappers.AtariPreprocessing(game, noop_max=0), 4)


def has_native(env_id: str) -> bool:
    """Whether Gymnasium has a vector environment made for ``env_id``, which steps all its environments in numpy."""
    return not env_id.startswith("ALE/") and gym.spec(env_id).vector_entry_point is not None


def gym_env(env_id: str, width: int) -> GymEnv:
    """Make ``width`` environments for a collector: the native vector environment where there is one."""
    if has_native(env_id):
        return GymEnv(env_id, width, vectorization_mode="auto", seed=0)
    return GymEnv(partial(make_one, env_id), width, seed=0)


def bare_env(env_id: str, width: int) -> gym.Env | VectorEnv:
    """Make the same for a bare loop, as fast as Gymnasium has it."""
    if width == 1:
        return make_one(env_id)
    if has_native(env_id):
        return gym.make_vec(env_id, width, vectorization_mode="vector_entry_point")
    return SyncVectorEnv([partial(make_one, env_id)] * width, copy=False)


def policy(env_id: str) -> Policy:
    """Make the policy that acts in every contender: 2 × 64 tanh, or the Nature network for images."""
    with closing(GymEnv(partial(make_one, env_id))) as env:
        seen, actions = env.observation_spec["observation"], env.action_spec
    torch.manual_seed(0)
    made, _ = make_actor_critic(MLP if len(seen.shape) == 1 else CNN, seen, actions)
    assert isinstance(made, Policy)
    return made


class BareLoop:
    """Steps ``width`` environments with the actions that the policy samples, or with ``random`` ones; stores nothing.

    Actions of a continuous space are not clipped, although they should be: this loop is to do no more than it must.
    """

    def __init__(self, env_id: str, width: int, random: bool) -> None:
        self.env, self.policy = bare_env(env_id, width), policy(env_id)
        self.width = width
        self._drawn = cycle([self.env.action_space.sample() for _ in range(64)]) if random else None
        self._observation, _ = self.env.reset(seed=0)

    @torch.inference_mode()
    def run(self, seconds: float) -> tuple[int, float]:
        """Step for so many seconds; return the frames, and the seconds that it took. A reset is no frame."""
        env, act, observation, frames = self.env, self._act, self._observation, 0
        vector, began = isinstance(env, VectorEnv), time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds:
            for _ in range(16):
                observation, _, terminated, truncated, _ = env.step(act(observation))
                if vector:  # an environment is reset in the step after the end of an episode
                    frames -= int(np.count_nonzero(terminated | truncated))
                elif terminated or truncated:
                    observation, _ = env.reset()
            frames += 16 * self.width
        self._observation = observation
        return frames, elapsed

    def _act(self, observation) -> Any:
        if self._drawn is not None:
            return next(self._drawn)
        seen = torch.as_tensor(observation)
        seen = seen if seen.dtype is torch.uint8 else seen.float()
        parameters = self.policy.distribution_parameters(seen)
        return self.policy.choose(parameters, self.policy.noise(parameters)).numpy()


def serve(channel: Connection, _worker: int, *made_of: Any) -> None:
    """Run a ``BareLoop`` for the number of seconds that ``channel`` receives; a target of ``worker_processes``."""
    loop = BareLoop(*made_of)
    try:
        while True:
            channel.send(loop.run(channel.recv()))
    except EOFError:
        loop.env.close()


@contextmanager
def bare(env_id: str, width: int, processes: int, random: bool = False) -> Iterator[Turn]:
    """Run the bare loop in this process, or in ``processes`` of their own at the same time, none waiting for another.

    Processes are asked for the same time, so their frames are added up.
    """
    if not processes:
        loop = BareLoop(env_id, width, random)
        yield loop.run
        loop.env.close()
        return
    with worker_processes(serve, processes, env_id, width, random) as pipes:

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
    make = partial(gym_env, env_id, width)
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


def contenders(env_id: str, width: int, steps: int, workers: list[int]) -> list[dict[str, Entrant]]:
    """Name all that take turns at this width, in groups: what acts in one process or several, the bare loop first."""
    groups: list[dict[str, Entrant]] = []
    for count in (0, *workers):
        where = "this process" if count == 0 else "1 worker" if count == 1 else f"{count} workers"
        collector = f"{'MultiSyncCollector' if count else 'Collector'}, {where}"
        collect = partial(ours, env_id, width, steps, count)
        loop = partial(bare, env_id, width, count)
        groups.append(
            {f"bare loop, {where}": loop, f"random actions, {where}": partial(loop, True), collector: collect}
        )
    return groups


def compare(groups: list[dict[str, Entrant]], rounds: int, seconds: float) -> dict[str, list[str]]:
    """Let each contender take its turns for ``seconds``, ``rounds`` times in alternation.

    Returns for each the cells of the table: its median frames/s, and its share of the bare loop in as many processes:
    the median over the rounds of the ratio within a round, and the quartiles.
    """
    speeds: dict[str, list[float]] = {name: [] for group in groups for name in group}
    with ExitStack() as stack:
        turns = {name: stack.enter_context(enter()) for group in groups for name, enter in group.items()}
        for turn in turns.values():
            turn(seconds / 2)
        for _ in range(rounds):
            for name, turn in turns.items():
                frames, elapsed = turn(seconds)
                speeds[name].append(frames / elapsed)
    rows = dict[str, list[str]]()
    for group in groups:
        bare_speeds = speeds[next(iter(group))]
        for name in group:
            shares = sorted(one / bare for one, bare in zip(speeds[name], bare_speeds, strict=True))
            quartiles = f"{shares[len(shares) // 4]:.2f}–{shares[-1 - len(shares) // 4]:.2f}"
            middle = statistics.median(shares)
            rows[name] = [f"{statistics.median(speeds[name]):,.0f}", f"{middle:.2f} x", quartiles]
    return rows


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
    table = Table(title=f"Collection, {env_id}, medians; load {os.getloadavg()[0]:.1f}")
    for heading in ("width", "collected by", "frames/s", "bare loop", "quartiles"):
        table.add_column(heading, justify="left" if heading == "collected by" else "right", no_wrap=True)
    for width, rows in results.items():
        for name, cells in rows.items():
            table.add_row(str(width), name, *cells)
        table.add_section()
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
