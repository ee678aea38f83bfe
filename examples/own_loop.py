"""A training loop of one's own (REINFORCE), with Gymnasium alone: workers play episodes with the newest weights.

    python examples/own_loop.py

The library carries the weights. How episodes travel to the trainer is the program's own matter: here, a queue.
"""

from contextlib import suppress
from queue import Full

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch import multiprocessing as mp
from torch.distributions import Categorical

import wsync

WORKERS, UPDATES, EPISODES, DISCOUNT = 2, 40, 16, 0.99


def make_policy() -> nn.Sequential:
    """Return a network from observations to the logits of the actions."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


def play(env: gym.Env, policy: nn.Module, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Play one episode; return its observations, actions and rewards."""
    observations, actions, rewards, done = [], [], [], False
    observation, _ = env.reset(seed=seed)
    while not done:
        observations.append(torch.as_tensor(observation))
        with torch.no_grad():
            actions.append(Categorical(logits=policy(observations[-1])).sample())  # a new version may be used from here
        observation, reward, terminated, truncated, _ = env.step(actions[-1].item())
        rewards.append(float(reward))
        done = terminated or truncated
    return torch.stack(observations), torch.stack(actions), torch.tensor(rewards)


def work(scheme: wsync.WeightSyncScheme, index: int, episodes: mp.Queue, stop) -> None:
    """Play episodes until the trainer sets ``stop``."""
    torch.set_num_threads(1)
    env, policy = gym.make("CartPole-v1"), make_policy()
    scheme.init_on_receiver("policy", model=policy, worker_idx=index)
    scheme.connect()
    seed = index
    while not stop.is_set():
        episode = (scheme.version, *(part.numpy() for part in play(env, policy, seed)))
        with suppress(Full):  # the trainer has not taken the others yet, or has stopped
            episodes.put(episode, timeout=1.0)
        seed += WORKERS
    episodes.cancel_join_thread()  # the trainer takes no more: do not wait until it has
    scheme.shutdown()
    episodes.cancel_join_thread()  # episodes that are not read any more


def loss_of(policy: nn.Module, played: list) -> Tensor:
    """Return REINFORCE's loss, with returns normalised over the episodes."""
    returns = []
    for _, _, _, rewards in played:
        discounted, total = [], 0.0
        for reward in reversed(rewards.tolist()):
            total = reward + DISCOUNT * total
            discounted.insert(0, total)
        returns.append(torch.tensor(discounted))
    advantage = torch.cat(returns)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    observations = torch.cat([torch.from_numpy(episode[1]) for episode in played])
    actions = torch.cat([torch.from_numpy(episode[2]) for episode in played])
    return -(Categorical(logits=policy(observations)).log_prob(actions) * advantage).mean()


if __name__ == "__main__":
    torch.set_num_threads(1)
    context = mp.get_context("spawn")
    episodes, stop = context.Queue(maxsize=2 * EPISODES), context.Event()
    policy, scheme = make_policy(), wsync.SharedMemWeightSyncScheme(acknowledge="published")
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    scheme.init_on_sender("policy", model=policy, num_workers=WORKERS)
    workers = [context.Process(target=work, args=(scheme, index, episodes, stop)) for index in range(WORKERS)]
    for worker in workers:
        worker.start()
    scheme.connect(processes=workers)

    for update in range(1, UPDATES + 1):
        played = [episodes.get(timeout=60.0) for _ in range(EPISODES)]  # raises Empty if no worker is left
        optimizer.zero_grad()
        loss_of(policy, played).backward()
        optimizer.step()
        report = scheme.send()  # every forward that starts from now on uses the new weights
        if update % 10 == 0:
            length = sum(len(rewards) for *_, rewards in played) / EPISODES
            print(f"update {update}: mean return {length:.0f}, sent in {report.seconds * 1e6:.0f} µs")

    stop.set()
    for worker in workers:
        worker.join()
    scheme.shutdown()
