"""A training loop of one's own (REINFORCE), with Gymnasium alone: workers play episodes with the newest weights.

    python examples/own_loop.py [number of updates]

The library carries the weights. How episodes travel to the trainer is the program's own matter: here, a pipe of each
worker. (A queue that workers share may stay locked for ever when one of them is killed.) A worker that is killed is
replaced; Ctrl-C ends the trainer and its workers in order.
"""

import signal
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
CONTEXT = mp.get_context("spawn")


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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at Ctrl-C the trainer closes the pipe
    torch.set_num_threads(1)
    env, policy = gym.make("CartPole-v1"), make_policy()
    scheme.init_on_receiver("policy", model=policy, worker_idx=index)
    scheme.connect()
    seed = index
    with scheme, suppress(BrokenPipeError):
        while True:
            episodes.send([part.numpy() for part in play(env, policy, scheme, seed)])  # waits while the pipe is full
            seed += WORKERS


def start(scheme: wsync.WeightSyncScheme, index: int) -> tuple[mp.Process, Connection]:
    """Start a worker, the first one or a replacement; return it, and its end of a new pipe."""
    receiving_end, sending_end = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=work, args=(scheme, index, sending_end), daemon=True)
    process.start()
    sending_end.close()  # only the worker has it now: if the worker dies, the pipe ends
    return process, receiving_end


def receive(scheme: wsync.WeightSyncScheme, workers: list[tuple[mp.Process, Connection]], count: int) -> list:
    """Return the next ``count`` episodes. In the place of a worker that was killed, another one is started.

    RuntimeError: a worker has failed, with its own traceback; another one would fail as well.
    """
    played: list = []
    while len(played) < count:
        ready = wait([pipe for _, pipe in workers])
        for index, (process, episodes) in enumerate(workers):
            if episodes in ready:
                try:
                    played.append(episodes.recv())
                except (EOFError, ConnectionResetError) as error:  # the worker has ended
                    process.join()
                    if process.exitcode > 0:
                        raise RuntimeError(f"worker {index} has failed") from error
                    workers[index] = start(scheme, index)  # joins by itself, with the newest weights
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
    policy, scheme = make_policy(), wsync.SharedMemWeightSyncScheme(acknowledge="published")
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    scheme.init_on_sender("policy", model=policy, num_workers=WORKERS)
    workers = [start(scheme, index) for index in range(WORKERS)]
    try:
        scheme.connect(processes=[process for process, _ in workers])
        for update in range(1, updates + 1):
            played = receive(scheme, workers, EPISODES)
            optimizer.zero_grad()
            loss_of(policy, played).backward()
            optimizer.step()
            try:
                report = scheme.send()  # every forward that starts from now on uses the new weights
            except (wsync.WorkerDied, wsync.NotConnected) as error:  # the others have the update
                print(error)  # the pipe has ended as well: ``receive`` starts another worker
                continue
            if update % 10 == 0:
                length = sum(len(rewards) for *_, rewards in played) / len(played)
                first, last = (choose(choose(episode[0]) for episode in played) for choose in (min, max))
                print(
                    f"update {update}: mean return {length:.0f} by versions {first} to {last}, "
                    f"sent in {report.seconds * 1e6:.0f} µs"
                )
    except KeyboardInterrupt:
        print("interrupted")
    finally:  # also after an error: a worker may wait for room in its pipe, and would wait for ever
        for _, episodes in workers:
            episodes.close()
        scheme.shutdown()
        for process, _ in workers:
            process.join(10)
            process.kill()  # a stopped one does not end by itself
