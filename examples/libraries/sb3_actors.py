"""Stable-Baselines3's PPO learns from the rollouts of two other processes, which act with its newest policy.

python examples/libraries/sb3_actors.py
"""

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from torch import multiprocessing as mp

import wsync

torch.set_num_threads(1)  # in each process: with more, they would wait for each other's cores

ENV, WORKERS, ENVS, STEPS = "CartPole-v1", 2, 8, 64
FIELDS = ["observations", "actions", "rewards", "returns", "episode_starts", "values", "log_probs", "advantages"]


def collect(scheme, index, pipe):
    """Collect a rollout, as PPO does it, whenever the trainer asks."""
    model = PPO("MlpPolicy", make_vec_env(ENV, ENVS, seed=index * ENVS), n_steps=STEPS, gamma=0.98, device="cpu")
    scheme.init_on_receiver("policy", model=model.policy, worker_idx=index)
    scheme.connect()
    _, callback = model._setup_learn(STEPS)
    while pipe.recv():
        model.ep_info_buffer.clear()
        model.collect_rollouts(model.env, callback, model.rollout_buffer, STEPS)
        rollout = {name: getattr(model.rollout_buffer, name) for name in FIELDS}
        pipe.send((scheme.version, rollout, list(model.ep_info_buffer)))
    scheme.shutdown()


class ActorPPO(PPO):
    """PPO that learns from the rollouts of other processes; of its own environments it needs only the spaces."""

    def collect_rollouts(self, env, callback, rollout_buffer, n_rollout_steps):
        callback.on_rollout_start()
        self.scheme.send()  # raises an error that names a worker which has died
        for pipe in self.pipes:
            pipe.send(True)
        answers = [pipe.recv() for pipe in self.pipes]  # EOFError: a worker has died meanwhile
        versions, rollouts, episodes = zip(*answers, strict=True)
        rollout_buffer.reset()
        for name in FIELDS:
            setattr(rollout_buffer, name, np.concatenate([rollout[name] for rollout in rollouts], axis=1))
        rollout_buffer.pos, rollout_buffer.full = n_rollout_steps, True
        self.num_timesteps += n_rollout_steps * env.num_envs
        for some in episodes:
            self.ep_info_buffer.extend(some)
        mean = np.mean([episode["r"] for episode in self.ep_info_buffer] or [0.0])
        print(f"version {min(versions)}: return {mean:.0f}", flush=True)
        callback.on_rollout_end()
        return True


if __name__ == "__main__":
    spaces = make_vec_env(ENV, WORKERS * ENVS)
    model = ActorPPO("MlpPolicy", spaces, n_steps=STEPS, batch_size=256, gamma=0.98, device="cpu", seed=0)
    model.scheme = wsync.SharedMemWeightSyncScheme()
    model.scheme.init_on_sender("policy", model=model.policy, num_workers=WORKERS)
    model.pipes, ends = zip(*[mp.Pipe() for _ in range(WORKERS)], strict=True)
    context = mp.get_context("spawn")
    workers = [context.Process(target=collect, args=(model.scheme, i, end), daemon=True) for i, end in enumerate(ends)]
    for worker, end in zip(workers, ends, strict=True):
        worker.start()
        end.close()  # so that `recv` raises an error when the worker has died
    model.scheme.connect(processes=workers)
    model.learn(20_000)
    for pipe in model.pipes:
        pipe.send(False)
    model.scheme.shutdown()
