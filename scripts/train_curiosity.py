"""A policy and a second model that are trained and synchronised together: random network distillation.

The reward in MountainCar-v0 is 1 for reaching the goal and 0 otherwise, and a random policy does not reach it. A bonus
for rare observations helps: the error of a network that learns to predict another, random one (Burda et al.,
https://arxiv.org/abs/1810.12894). A transform computes the bonus in the environment. After each batch the trainer
sends the policy and the curiosity.

    python scripts/train_curiosity.py                      # the predictor in a Ray actor that all workers share
    python scripts/train_curiosity.py --transform local    # a copy in each worker, updated at once with the policy
    python scripts/train_curiosity.py --scale 0            # the control: no bonus
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

import gymnasium as gym
import numpy as np
import torch
import typer
from harness.backends import ray_cluster
from harness.console import progress_bar
from torch import Tensor, nn

import wsync
from collectors import GymEnv, ModuleTransform, MultiCollector, MultiSyncCollector
from learning import PPO, make_critic, make_policy

Where = StrEnum("Where", ["ray", "local"])
PPO_SETTINGS: dict[str, Any] = {
    "epochs": 4, "minibatch_size": 512, "lr": 1e-3, "entropy_coef": 0.003, "reward_scale": 5.0,
    "normalize_advantage": False,  # it would blow up the critic's errors where there is no reward: the car drifts
}  # fmt: skip
KEYS: dict[str, Any] = {"in_keys": [("next", "reward"), ("next", "observation")], "out_keys": [("next", "reward")]}


class GoalOnly(gym.Wrapper):
    """The reward is 1 for reaching the goal, and 0 otherwise."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step; only the reward differs."""
        observation, _, terminated, truncated, info = self.env.step(action)
        return observation, float(terminated), terminated, truncated, info


def mountain_car() -> gym.Env:
    """Make one environment; position and velocity lie between -1 and 1."""
    one = np.ones(2, np.float32)
    return GoalOnly(gym.wrappers.RescaleObservation(gym.make("MountainCar-v0"), -one, one))


class Curiosity(nn.Module):
    """Adds to a reward the error of a trained predictor of a random target.

    Args:
        scale: the bonus of an error as large as their root mean square over all frames so far, which is ``spread``.
    """

    spread: Tensor

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        first, second, third = nn.Linear(2, 64), nn.Linear(64, 64), nn.Linear(64, 32)
        for layer in (first, second, third):  # a target that varies a lot is not guessed from a part of it
            nn.init.orthogonal_(layer.weight, 2.0**0.5)
            nn.init.uniform_(layer.bias, -1.0, 1.0)
        self.target = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third).requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
        self.register_buffer("spread", torch.ones(()))
        self.square_sum, self.count = 0.0, 0  # the trainer's alone

    def error(self, observation: Tensor) -> Tensor:
        """Squared distance of prediction and target, ``[*B, 2]`` to ``[*B]``."""
        scaled = 4.0 * observation
        return (self.predictor(scaled) - self.target(scaled)).square().sum(-1)

    def forward(self, reward: Tensor, successor: Tensor) -> Tensor:
        """Reward ``[E, 1]`` and successor ``[E, 2]`` to the sum of reward and bonus, ``[E, 1]``."""
        return reward + self.scale * (self.error(successor) / self.spread).unsqueeze(-1)

    @torch.no_grad()
    def observe(self, observation: Tensor) -> None:
        """Take ``observation`` ``[n, 2]`` into the spread."""
        self.square_sum += self.error(observation).square().sum().item()
        self.count += len(observation)
        self.spread.fill_((self.square_sum / self.count) ** 0.5)

    def learn(self, observation: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Pass once over ``observation`` ``[n, 2]``."""
        for part in observation[torch.randperm(len(observation))].split(512):
            optimizer.zero_grad()
            self.error(part).mean().backward()
            optimizer.step()


Schemes = dict[str, wsync.WeightSyncScheme]
Workers = tuple[MultiCollector, Schemes, Callable[[], object]]
"""A collector, the schemes by name, and the function that updates the workers."""


@contextmanager
def local_workers(policy: nn.Module, curiosity: Curiosity, num_envs: int, **options: Any) -> Iterator[Workers]:
    """Give each worker a copy of both models; an update switches both at once."""
    make_env = partial(GymEnv, mountain_car, num_envs, transforms=[ModuleTransform(curiosity, **KEYS)])
    names = {"policy": policy, "env.transform[0].module": curiosity}
    schemes: Schemes = {name: wsync.SharedMemWeightSyncScheme() for name in names}
    with MultiSyncCollector([make_env] * 2, policy, weight_sync_schemes=schemes, **options) as collector:
        yield collector, schemes, lambda: collector.update_policy_weights_(weights_dict=names)


@contextmanager
def ray_workers(policy: nn.Module, curiosity: Curiosity, num_envs: int, **options: Any) -> Iterator[Workers]:
    """Give each worker a copy of the policy; the curiosity is in one Ray actor."""
    from collectors import RayModuleTransform  # Ray is slow to import

    schemes: Schemes = {"policy": wsync.SharedMemWeightSyncScheme()}
    own = wsync.RayModuleTransformScheme()
    with ray_cluster(), RayModuleTransform(partial(Curiosity, curiosity.scale), **KEYS) as transform, own:
        own.init_on_sender("module", context=transform, model=curiosity)
        own.connect()
        make_env = partial(GymEnv, mountain_car, num_envs, transforms=[transform])
        with MultiSyncCollector([make_env] * 2, policy, weight_sync_schemes=schemes, **options) as collector:

            def send() -> None:
                collector.update_policy_weights_(policy)
                own.send()

            yield collector, {**schemes, "curiosity": own}, send


def main(
    transform: Annotated[Where, typer.Option(help="where the environments' curiosity is")] = Where.ray,
    frames: Annotated[int, typer.Option(help="to train for")] = 400_000,
    batch: Annotated[int, typer.Option(help="frames between two updates")] = 8192,
    num_envs: Annotated[int, typer.Option(help="environments in each of the two workers")] = 32,
    scale: Annotated[float, typer.Option(help="of the bonus")] = 0.5,
    seed: int = 0,
) -> None:
    """Train, and print the results."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    space = GymEnv(mountain_car)
    policy, curiosity = make_policy(2, space.action_spec), Curiosity(scale)
    learner = PPO(policy, make_critic(2), **PPO_SETTINGS)
    optimizer = torch.optim.Adam(curiosity.predictor.parameters(), lr=1e-3)
    curiosity.observe(space.rollout(2000).get("observation"))  # how large an error is, to begin with

    workers_for = local_workers if transform is Where.local else ray_workers
    goals, first, bonus, reached, done, began = deque[float](maxlen=100), 0.0, 0.0, 0.0, 0, time.monotonic()
    with workers_for(policy, curiosity, num_envs, frames_per_batch=batch) as workers, progress_bar() as bar:
        collector, schemes, send = workers
        task = bar.add_task("", total=frames)
        collector.set_seed(seed)
        while done < frames:
            rows = next(collector)
            done += rows.numel()
            step = rows.get("next")
            goals.extend(step.get("episode_return")[step.get("done")].gt(0).float().tolist())
            bonus = (step.get("reward") - step.get("terminated").float()).mean().item()
            first = first or bonus
            learner.update(rows)
            seen = step.get("observation").flatten(0, -2)
            curiosity.observe(seen)
            curiosity.learn(seen, optimizer)
            send()
            reached = statistics.mean(goals) if goals else 0.0
            bar.update(task, completed=done, description=f"goals {reached:.2f}  bonus {bonus:.4f}")
        print(f"transform {transform}: {done:,} frames in {time.monotonic() - began:.0f} s")
        print(f"the goal was reached in {reached:.0%} of the last {len(goals)} episodes")
        print(f"mean bonus of a batch: {first:.4f} at the start, {bonus:.4f} at the end")
        versions = [one.version for one in schemes.values()]
        print(f"policy: version {versions[0]}, curiosity: version {versions[1]}")


if __name__ == "__main__":
    typer.run(main)
