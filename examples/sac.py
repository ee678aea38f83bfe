"""Soft actor-critic in one file: workers act, this process learns from replay and sends them the actor's weights.

    python examples/sac.py [--frames 20000] [--seed 0]

Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905, with the settings of rl-baselines3-zoo for Pendulum-v1. Only the
actor is sent; critics and temperature stay here. The replay memory is a TensorDict: for uniform samples that is a dozen
lines. TorchRL's ReplayBuffer takes the same batches: ``buffer.extend(frames)``.
"""

import argparse
import copy
import math
from collections import deque

import torch
from torch import nn

from collectors import GymEnv, MultiAsyncCollector
from wsync import SharedMemWeightSyncScheme

GAMMA, TAU, LR, CAPACITY, BATCH = 0.99, 0.005, 1e-3, 1_000_000, 256
LEARNING_STARTS, FRAMES_PER_UPDATE = 100, 64  # one gradient step per frame


def mlp(inputs, outputs):
    """Return a network with two hidden layers."""
    return nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs))


class Actor(nn.Module):
    """A Gaussian squashed by tanh into the action range; called with a TensorDict, it writes a sampled ``action``."""

    def __init__(self, observations, low, high):
        super().__init__()
        self.network = mlp(observations, 2 * len(low))
        self.register_buffer("centre", (low + high) / 2)
        self.register_buffer("half_range", (high - low) / 2)

    def forward(self, tensordict):
        return tensordict.set("action", self.sample(tensordict["observation"])[0])

    def sample(self, observation):
        """Return actions, and their log-probabilities in units of half the range (appendix C of the paper)."""
        mean, log_std = self.network(observation).chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-20, 2).exp())
        raw = normal.rsample()
        log_slope = 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))  # of tanh, without rounding to 0
        return self.centre + self.half_range * raw.tanh(), (normal.log_prob(raw) - log_slope).sum(-1)


class Replay:
    """The last `capacity` frames, in memory that is allocated once."""

    def __init__(self, capacity):
        self.capacity, self.added, self.storage = capacity, 0, None

    def __len__(self):
        return min(self.added, self.capacity)

    def add(self, frames):
        if self.storage is None:
            self.storage = frames[:1].expand(self.capacity).clone()
        self.storage[torch.arange(self.added, self.added + len(frames)) % self.capacity] = frames
        self.added += len(frames)

    def sample(self, size):
        return self.storage[torch.randint(len(self), (size,))]


def main(total_frames, seed):
    """Train; print the mean return of the last 20 episodes."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    env = GymEnv("Pendulum-v1")
    observations, spec = env.observation_spec["observation"].shape[-1], env.action_spec
    actor = Actor(observations, torch.as_tensor(spec.low), torch.as_tensor(spec.high))
    critics = nn.ModuleList([mlp(observations + spec.shape[-1], 1) for _ in range(2)])
    targets = copy.deepcopy(critics)
    log_alpha = torch.zeros((), requires_grad=True)
    of_actor, of_critics, of_alpha = (
        torch.optim.Adam(parameters, lr=LR) for parameters in (actor.parameters(), critics.parameters(), [log_alpha])
    )
    replay, returns, shown = Replay(min(CAPACITY, total_frames + FRAMES_PER_UPDATE)), deque(maxlen=20), 0

    def values(networks, observation, action):
        return torch.stack([one(torch.cat([observation, action], -1)).squeeze(-1) for one in networks])

    def learn(frames):
        alpha, observation = log_alpha.exp().detach(), frames["observation"]
        with torch.no_grad():
            action, log_prob = actor.sample(frames["next", "observation"])
            future = values(targets, frames["next", "observation"], action).min(0).values - alpha * log_prob
            goes_on = ~frames["next", "terminated"].squeeze(-1)
            goal = frames["next", "reward"].squeeze(-1) + GAMMA * goes_on * future
        critic_loss = (values(critics, observation, frames["action"]) - goal).square().mean(-1).sum()
        of_critics.zero_grad()
        critic_loss.backward()
        of_critics.step()

        action, log_prob = actor.sample(observation)
        actor_loss = (alpha * log_prob - values(critics, observation, action).min(0).values).mean()
        of_actor.zero_grad()
        actor_loss.backward()
        of_actor.step()

        alpha_loss = -log_alpha * (log_prob.detach() - spec.shape[-1]).mean()  # target entropy: minus the dimension
        of_alpha.zero_grad()
        alpha_loss.backward()
        of_alpha.step()
        with torch.no_grad():
            for target, critic in zip(targets.parameters(), critics.parameters(), strict=True):
                target.lerp_(critic, TAU)

    collector = MultiAsyncCollector(
        [lambda: GymEnv("Pendulum-v1", num_envs=2)] * 2,
        actor,
        frames_per_batch=FRAMES_PER_UPDATE,
        total_frames=total_frames,
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme(acknowledge="published")},
    )
    collector.set_seed(seed)
    with collector:
        for batch in collector:
            batch = batch[batch["mask"]] if "mask" in batch.keys() else batch.reshape(-1)  # noqa: SIM118
            replay.add(batch.select("observation", "action", "next"))
            returns.extend(batch["next", "episode_return"][batch["next", "done"]].tolist())
            if len(replay) >= LEARNING_STARTS:
                for _ in range(FRAMES_PER_UPDATE):
                    learn(replay.sample(BATCH))
                collector.update_policy_weights_(actor)
            if returns and (replay.added - shown >= 800 or replay.added >= total_frames):
                shown = replay.added
                print(f"frames {shown:6,}  return {sum(returns) / len(returns):7.1f}  alpha {log_alpha.exp():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="SAC on Pendulum-v1")
    parser.add_argument("--frames", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    main(chosen.frames, chosen.seed)
