"""A training loop of one's own (REINFORCE), with Gymnasium alone: workers play episodes with the newest weights.

    python examples/own_loop.py [number of updates]

The library carries the weights. How episodes travel to the trainer is the program's own matter: here, a pipe of each
worker. (A queue that workers share may stay locked for ever when one of them is killed.)
"""

import sys
from contextlib import suppress
from multiprocessing.connection import Connection, wait

import gymnasium as gym
import torch
from torch import Tensor, nn
from torch import multiprocessing as mp
from torch.distributions import Categorical

import wsync

WORKERS, EPISODES, DISCOUNT = 2, 16, 0.99


def make_policy() -> nn.Sequential:
    """Return a network from observations to the logits of the actions."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))


def play(env: gym.Env, policy: nn.Module, scheme: wsync.WeightSyncScheme, seed: int) -> tuple[Tensor, ...]:
    """Play one episode; return for each step the version that acted, the observation, the action and the reward."""
    versions, observations, actions, rewards, done = [], [], [], [], False
    observation, _ = env.reset(seed=seed)
    while not done:
        observations.append(torch.as_tensor(observation))
        with torch.no_grad(), wsync.gate():  # a new version may be used from here on, and not before the next step
            versions.append(scheme.version)
            actions.append(Categorical(logits=policy(observations[-1])).sample())
        observation, reward, terminated, truncated, _ = env.step(actions[-1].item())
        rewards.append(float(reward))
        done = terminated or truncated
    return torch.tensor(versions), torch.stack(observations), torch.stack(actions), torch.tensor(rewards)


def work(scheme: wsync.WeightSyncScheme, index: int, episodes: Connection) -> None:
    """Play episodes until the trainer closes the pipe, or dies."""
    torch.set_num_threads(1)
    env, policy = gym.make("CartPole-v1"), make_policy()
    scheme.init_on_receiver("policy", model=policy, worker_idx=index)
    scheme.connect()
    seed = index
    with scheme, suppress(BrokenPipeError):
        while True:
            episodes.send([part.numpy() for part in play(env, policy, scheme, seed)])  # waits while the pipe is full
            seed += WORKERS


def receive(pipes: list[Connection], count: int) -> list:
    """Return the next ``count`` episodes; raises EOFError if a worker has died."""
    played: list = []
    while len(played) < count:
        played += [pipe.recv() for pipe in wait(pipes)]
    return played


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
    updates = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    context = mp.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(WORKERS)]
    policy, scheme = make_policy(), wsync.SharedMemWeightSyncScheme(acknowledge="published")
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    scheme.init_on_sender("policy", model=policy, num_workers=WORKERS)
    workers = [  # daemons end with the trainer, also if it raises an error
        context.Process(target=work, args=(scheme, index, pipes[index][1]), daemon=True) for index in range(WORKERS)
    ]
    for worker, (_, sending_end) in zip(workers, pipes, strict=True):
        worker.start()
        sending_end.close()  # only the worker has it now: if the worker dies, the pipe ends
    episodes = [receiving_end for receiving_end, _ in pipes]
    scheme.connect(processes=workers)

    for update in range(1, updates + 1):
        played = receive(episodes, EPISODES)
        optimizer.zero_grad()
        loss_of(policy, played).backward()
        optimizer.step()
        report = scheme.send()  # every forward that starts from now on uses the new weights
        if update % 10 == 0:
            length = sum(len(rewards) for *_, rewards in played) / len(played)
            first, last = (choose(choose(episode[0]) for episode in played) for choose in (min, max))
            print(
                f"update {update}: mean return {length:.0f} by versions {first} to {last}, "
                f"sent in {report.seconds * 1e6:.0f} µs"
            )

    for pipe in episodes:
        pipe.close()
    for worker in workers:
        worker.join()
    scheme.shutdown()
