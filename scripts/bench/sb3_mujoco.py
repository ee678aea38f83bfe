"""Stable-Baselines3's PPO on a MuJoCo environment, with its defaults and normalisation: one JSON line.

    python scripts/bench/sb3_mujoco.py HalfCheetah-v5 100000 SEED

A process of its own, that ``scripts/bench_returns.py`` starts. Two environments, 2048 frames for each update, as
``conf/env/mujoco``. Seconds count from the first step of an environment.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from stable_baselines3 import PPO  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.callbacks import BaseCallback  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.vec_env import VecNormalize  # pyright: ignore[reportMissingImports]


class Returns(BaseCallback):
    """Collects the returns of episodes."""

    def __init__(self) -> None:
        super().__init__()
        self.started = 0.0
        self.returns: list[float] = []

    def _on_rollout_start(self) -> None:
        self.started = self.started or time.perf_counter()

    def _on_step(self) -> bool:
        self.returns.extend(float(info["episode"]["r"]) for info in self.locals["infos"] if "episode" in info)
        return True


def main(env_id: str, frames: int, seed: int) -> None:
    """Train, and print the returns and the seconds."""
    torch.set_num_threads(1)
    environments = VecNormalize(make_vec_env(env_id, n_envs=2, seed=seed))
    model = PPO("MlpPolicy", environments, n_steps=1024, seed=seed, device="cpu")
    watch = Returns()
    model.learn(frames, callback=watch)
    seconds = time.perf_counter() - watch.started
    print(json.dumps({"returns": watch.returns, "seconds": seconds, "frames": model.num_timesteps}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
