"""Stable-Baselines3 trains PPO on CartPole; another process plays with its newest policy all the while.

python examples/libraries/sb3.py
"""

import gymnasium
import torch
from stable_baselines3 import PPO
from torch import multiprocessing as mp

import wsync
from wsync.integrations.stable_baselines3 import WsyncCallback

torch.set_num_threads(1)  # in both processes: with more, they would wait for each other's cores


def play(scheme):
    """Play episodes with the most likely actions, until the trainer shuts down."""
    env = gymnasium.make("CartPole-v1")
    policy = PPO("MlpPolicy", env, device="cpu").policy
    scheme.init_on_receiver("policy", model=policy, worker_idx=0)
    scheme.connect()
    while not scheme.finished:
        observation, done, total = env.reset()[0], False, 0.0
        while not done:
            action, _ = policy.predict(observation, deterministic=True)  # of one version: `predict` enters the gate
            observation, reward, terminated, truncated, _ = env.step(action)
            done, total = terminated or truncated, total + float(reward)
        print(f"version {scheme.version}: return {total:.0f}", flush=True)
        scheme.receive(timeout=0)  # returns at once; raises NotConnected if the trainer has died
    scheme.shutdown()


if __name__ == "__main__":
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=512, device="cpu", seed=0)
    scheme = wsync.SharedMemWeightSyncScheme(acknowledge="published")  # does not wait for the player
    scheme.init_on_sender("policy", model=model.policy, num_workers=1)
    player = mp.get_context("spawn").Process(target=play, args=(scheme,), daemon=True)
    player.start()
    scheme.connect(processes=[player])
    model.learn(10_000, callback=WsyncCallback(scheme, on_worker_error=print))  # goes on without a dead player
    print(scheme.metrics)
    scheme.shutdown()
    player.join()
