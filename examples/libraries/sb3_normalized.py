"""Stable-Baselines3 trains PPO with VecNormalize; another process plays, with weights and statistics of one version.

python examples/libraries/sb3_normalized.py
"""

import numpy as np
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import ConvertCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize
from torch import multiprocessing as mp
from torch import nn

import wsync
from wsync.integrations.stable_baselines3 import WsyncCallback

torch.set_num_threads(1)  # in both processes: with more, they would wait for each other's cores


class NormalizedPolicy(nn.Module):
    """A policy, and the statistics of the observations as buffers: they travel with its weights."""

    def __init__(self, policy, env):
        super().__init__()
        self.policy, self.env = policy, env
        self.register_buffer("statistics", torch.zeros(2, *env.obs_rms.mean.shape, dtype=torch.float64))
        self.copy_statistics()

    def copy_statistics(self, *_):
        """Copy the environment's statistics, in the trainer after each step."""
        self.statistics[:] = torch.from_numpy(np.stack([self.env.obs_rms.mean, self.env.obs_rms.var]))
        return True  # training goes on

    def predict(self, observations):
        """Return the most likely actions. A method of the model is one forward pass, which sees one version."""
        self.env.obs_rms.mean, self.env.obs_rms.var = self.statistics.numpy().copy()
        return self.policy.predict(self.env.normalize_obs(observations), deterministic=True)[0]


def play(scheme):
    """Play episodes with the newest policy, until the trainer shuts down."""
    raw = make_vec_env("CartPole-v1")
    env = VecNormalize(raw, training=False)  # only normalises, by the trainer's statistics
    model = NormalizedPolicy(PPO("MlpPolicy", env, device="cpu").policy, env)
    scheme.init_on_receiver("policy", model=model, worker_idx=0)
    scheme.connect()
    observations = raw.reset()
    while not scheme.finished:
        observations, _, done, infos = raw.step(model.predict(observations))
        if done[0]:
            print(f"version {scheme.version}: return {infos[0]['episode']['r']:.0f}", flush=True)
            scheme.receive(timeout=0)  # returns at once; raises NotConnected if the trainer has died
    scheme.shutdown()


if __name__ == "__main__":
    env = VecNormalize(make_vec_env("CartPole-v1", 4, seed=0))
    model = PPO("MlpPolicy", env, n_steps=128, device="cpu", seed=0)
    sent = NormalizedPolicy(model.policy, env)
    scheme = wsync.SharedMemWeightSyncScheme(acknowledge="published")  # does not wait for the player
    scheme.init_on_sender("policy", model=sent, num_workers=1)
    player = mp.get_context("spawn").Process(target=play, args=(scheme,), daemon=True)
    player.start()
    scheme.connect(processes=[player])
    model.learn(6_000, callback=[ConvertCallback(sent.copy_statistics), WsyncCallback(scheme)])
    print(scheme.metrics)
    scheme.shutdown()
    player.join()
