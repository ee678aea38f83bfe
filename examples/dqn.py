"""DQN in one file: worker processes act, this process learns from replay and sends them the network's weights.

    python examples/dqn.py [--frames 50000] [--seed 0]

Mnih et al. 2015, https://www.nature.com/articles/nature14236, with the settings of rl-baselines3-zoo for CartPole-v1.
Epsilon is a buffer of the network, so it reaches the workers with the weights. The replay memory is a TensorDict: for
uniform samples that is a dozen lines. TorchRL's ReplayBuffer takes the same batches: ``buffer.extend(frames)``.
"""

import argparse
import copy
from collections import deque

import torch
from torch import nn

from collectors import GymEnv, MultiAsyncCollector
from wsync import SharedMemWeightSyncScheme

GAMMA, LR, CAPACITY, BATCH, MAX_GRAD_NORM = 0.99, 2.3e-3, 100_000, 64, 10.0
LEARNING_STARTS, FRAMES_PER_UPDATE, STEPS_PER_UPDATE = 1000, 256, 128
EPSILON_FINAL, EXPLORATION_FRACTION = 0.04, 0.16


class QNetwork(nn.Module):
    """Values of the actions; called with a TensorDict, it writes an epsilon-greedy ``action``."""

    def __init__(self, observations, actions):
        super().__init__()
        hidden = [nn.Linear(observations, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU()]
        self.values = nn.Sequential(*hidden, nn.Linear(256, actions))
        self.register_buffer("epsilon", torch.ones(()))

    def forward(self, tensordict):
        values = self.values(tensordict["observation"])
        best = values.argmax(-1)
        explore = torch.rand(best.shape) < self.epsilon
        return tensordict.set("action", torch.where(explore, torch.randint_like(best, values.shape[-1]), best))


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
    env = GymEnv("CartPole-v1")
    online = QNetwork(env.observation_spec["observation"].shape[-1], env.action_spec.shape[-1])
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.values.parameters(), lr=LR)
    replay, returns, shown = Replay(CAPACITY), deque(maxlen=20), 0

    collector = MultiAsyncCollector(
        [lambda: GymEnv("CartPole-v1", num_envs=4)] * 2,
        online,
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
                for _ in range(STEPS_PER_UPDATE):
                    frames = replay.sample(BATCH)
                    with torch.no_grad():
                        future = target.values(frames["next", "observation"]).max(-1).values
                        goes_on = ~frames["next", "terminated"].squeeze(-1)
                        goal = frames["next", "reward"].squeeze(-1) + GAMMA * goes_on * future
                    value = online.values(frames["observation"]).gather(-1, frames["action"].unsqueeze(-1)).squeeze(-1)
                    loss = nn.functional.smooth_l1_loss(value, goal)
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(online.values.parameters(), MAX_GRAD_NORM)
                    optimizer.step()
                target.load_state_dict(online.state_dict())

            explored = min(1.0, replay.added / (EXPLORATION_FRACTION * total_frames))
            online.epsilon.fill_(1.0 + explored * (EPSILON_FINAL - 1.0))
            collector.update_policy_weights_(online)
            if returns and (replay.added - shown >= 2500 or replay.added >= total_frames):
                shown = replay.added
                print(f"frames {shown:6,}  return {sum(returns) / len(returns):6.1f}  epsilon {online.epsilon:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="DQN on CartPole-v1")
    parser.add_argument("--frames", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    main(chosen.frames, chosen.seed)
