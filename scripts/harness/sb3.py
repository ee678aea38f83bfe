"""PPO of Stable-Baselines3 or SBX, or RecurrentPPO of sb3-contrib, with the settings of a run of train.py; prints JSON.

    python scripts/harness/sb3.py '{"env": {...}, "algorithm": {...}, ...}' stable-baselines3    # or sbx

A process of its own, which ``bench_returns.py`` starts. Environments, wrappers and PPO's settings
are those of the run; the networks are ``MlpPolicy``, ``CnnPolicy`` or ``MlpLstmPolicy``. It has no ``reward_scale`` and
``epochs_final``. With ``stop_when_solved`` it ends when the mean of the last 100 returns reaches ``env.solved_at``.
Seconds count from the first step of an environment.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import torch
from hydra.utils import instantiate
from stable_baselines3 import PPO  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.atari_wrappers import ClipRewardEnv  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.callbacks import BaseCallback  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]
from stable_baselines3.common.vec_env import VecEnv, VecNormalize  # pyright: ignore[reportMissingImports]

POLICIES = {"learning.MLP": "MlpPolicy", "learning.CNN": "CnnPolicy", "learning.RNN": "MlpLstmPolicy"}
WINDOW = 100  # episodes in the mean return that is compared with the threshold of a solved environment
Settings = dict[str, Any]


class Returns(BaseCallback):
    """Collects the returns of episodes, each with the number of frames at its end; ends training at `solved_at`."""

    def __init__(self, solved_at: float | None) -> None:
        super().__init__()
        self.started, self.solved_at, self.solved = 0.0, solved_at, False
        self.returns: list[tuple[int, float]] = []

    def _on_rollout_start(self) -> None:
        self.started = self.started or time.perf_counter()

    def _on_step(self) -> bool:
        ended = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        self.returns += [(self.num_timesteps, float(value)) for value in ended]
        if self.solved_at is None or not ended or len(self.returns) < WINDOW:
            return True
        self.solved = sum(value for _, value in self.returns[-WINDOW:]) / WINDOW >= self.solved_at
        return not self.solved


def make_one(env: Settings) -> gymnasium.Env:
    """Make one environment, as train.py does."""
    kwargs = {name: value for name, value in env["kwargs"].items() if name != "vectorization_mode"}
    made = gymnasium.make(env["id"], **kwargs)
    for wrapper in env["wrappers"]:
        made = instantiate(wrapper, made, _convert_="all")
    return made


def environments(settings: Settings) -> VecEnv:
    """Make all environments of a run, in this process."""
    env, count = settings["env"], settings["num_workers"] * settings["num_envs"]
    wrapper = ClipRewardEnv if env["rewards"] == "sign" else None  # around the one that records returns
    made = make_vec_env(partial(make_one, env), n_envs=count, seed=settings["seed"], wrapper_class=wrapper)
    observations, rewards = env["normalize_observations"], env["rewards"] == "normalized"
    if not observations and not rewards:
        return made
    return VecNormalize(made, norm_obs=observations, norm_reward=rewards, gamma=settings["algorithm"]["gamma"])


def falling(first: float, final: float | None, frames: int, total: int) -> Callable[[float], float]:
    """Return the schedule of a value from `first` to `final` over `frames`, of the part that remains of `total`."""
    final = first if final is None else final
    return lambda remaining: final + max(0.0, 1.0 - (1.0 - remaining) * total / frames) * (first - final)


def make_model(settings: Settings, made: VecEnv, peer: str) -> Any:
    """Make the peer's algorithm with the settings of the run."""
    ppo, total = settings["algorithm"], settings["total_frames"]
    policy, schedule = POLICIES[settings["policy"]["_target_"]], (ppo["anneal_frames"], total)
    algorithm: Any = PPO
    if peer == "sbx":
        from sbx import PPO as algorithm  # pyright: ignore[reportMissingImports]
    elif policy == "MlpLstmPolicy":
        from sb3_contrib import RecurrentPPO as algorithm  # pyright: ignore[reportMissingImports]
    return algorithm(
        policy, made, n_steps=settings["frames_per_batch"] // made.num_envs, batch_size=ppo["minibatch_size"],
        n_epochs=ppo["epochs"], gamma=ppo["gamma"], gae_lambda=ppo["gae_lambda"],
        vf_coef=ppo["value_coef"] / 2, normalize_advantage=ppo["normalize_advantage"],  # no half in its value loss
        ent_coef=ppo["entropy_coef"], max_grad_norm=ppo["max_grad_norm"],
        seed=settings["seed"], device=settings["device"],
        learning_rate=falling(ppo["lr"], ppo["lr"] * ppo["lr_end_factor"], *schedule),
        clip_range=falling(ppo["clip"], ppo["clip_final"], *schedule),
    )  # fmt: skip


def main(settings: Settings, peer: str) -> None:
    """Train, and print the returns and the seconds."""
    torch.set_num_threads(settings["threads"])
    solved_at = settings["env"]["solved_at"] if settings["stop_when_solved"] else None
    model, watch = make_model(settings, environments(settings), peer), Returns(solved_at)
    model.learn(settings["total_frames"], callback=watch)
    seconds = time.perf_counter() - watch.started
    found = {"returns": watch.returns, "solved": watch.solved, "seconds": seconds, "frames": model.num_timesteps}
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
