"""Stable-Baselines3's PPO on CartPole-v1, with the values tuned for it, until it is solved: one JSON line.

    python scripts/bench/sb3_ppo.py SEED

A process of its own, that ``scripts/bench_train.py`` starts. Solved as everywhere here: the mean of the last 100
training returns is at least 475. Seconds count from the first step of an environment.
"""

from __future__ import annotations

import json
import sys
import time
from collections import deque
from collections.abc import Callable

import torch
from stable_baselines3 import PPO  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.callbacks import BaseCallback  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]

FRAMES = 200_000
SCHEDULE = 100_000  # the tuned values decay linearly over so many frames
SOLVED, WINDOW = 475.0, 100


def falling(value: float) -> Callable[[float], float]:
    """A value that falls linearly to 0 over ``SCHEDULE`` frames, as a schedule of what remains of ``FRAMES``."""
    return lambda remaining: value * max(0.02, 1.0 - (1.0 - remaining) * FRAMES / SCHEDULE)


class UntilSolved(BaseCallback):
    """Ends training when it is solved."""

    def __init__(self) -> None:
        super().__init__()
        self.returns: deque[float] = deque(maxlen=WINDOW)
        self.started = 0.0
        self.solved = False

    def _on_rollout_start(self) -> None:
        self.started = self.started or time.perf_counter()

    def _on_step(self) -> bool:
        self.returns.extend(info["episode"]["r"] for info in self.locals["infos"] if "episode" in info)
        self.solved = len(self.returns) == WINDOW and sum(self.returns) / WINDOW >= SOLVED
        return not self.solved


def main(seed: int) -> None:
    """Train, and say how long it took."""
    torch.set_num_threads(1)
    model = PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", n_envs=8, seed=seed), n_steps=32, batch_size=256, n_epochs=20,
        gae_lambda=0.8, gamma=0.98, ent_coef=0.0, learning_rate=falling(1e-3), clip_range=falling(0.2), seed=seed,
        device="cpu",
    )  # fmt: skip
    watch = UntilSolved()
    model.learn(FRAMES, callback=watch)
    seconds = time.perf_counter() - watch.started
    print(json.dumps({"solved": watch.solved, "seconds": seconds, "frames": model.num_timesteps}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
