"""What the collection benchmark compares with: environments as Gymnasium makes them, and a loop that stores nothing."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv

from collectors import GymEnv
from learning import CNN, MLP, Policy, make_actor_critic


def make_one(env_id: str) -> gym.Env:
    """Make one environment; an Atari game as in https://arxiv.org/abs/1709.06009: 4 frames, grey, 84 × 84, stacked."""
    if not env_id.startswith("ALE/"):
        return gym.make(env_id)
    import ale_py  # noqa: F401  # pyright: ignore[reportMissingImports]  (registers the games)

    game = gym.make(env_id, frameskip=1)
    return gym.wrappers.FrameStackObservation(gym.wrappers.AtariPreprocessing(game, noop_max=0), 4)


def has_native(env_id: str) -> bool:
    """Whether Gymnasium has a vector environment made for ``env_id``, which steps all its environments in numpy."""
    return not env_id.startswith("ALE/") and gym.spec(env_id).vector_entry_point is not None


def gym_env(env_id: str, width: int) -> GymEnv:
    """Make ``width`` environments for a collector: the native vector environment where there is one."""
    if has_native(env_id):
        return GymEnv(env_id, width, vectorization_mode="auto", seed=0)
    return GymEnv(functools.partial(make_one, env_id), width, seed=0)


def bare_env(env_id: str, width: int) -> gym.Env | VectorEnv:
    """Make the same for a bare loop, as fast as Gymnasium has it."""
    if width == 1:
        return make_one(env_id)
    if has_native(env_id):
        return gym.make_vec(env_id, width, vectorization_mode="vector_entry_point")
    return SyncVectorEnv([functools.partial(make_one, env_id)] * width, copy=False)


def policy(env_id: str) -> Policy:
    """Make the policy that acts in every contender: 2 × 64 tanh, or the Nature network for images."""
    with closing(GymEnv(functools.partial(make_one, env_id))) as env:
        seen, actions = env.observation_spec["observation"], env.action_spec
    torch.manual_seed(0)
    made, _ = make_actor_critic(MLP if len(seen.shape) == 1 else CNN, seen, actions)
    assert isinstance(made, Policy)
    return made


class BareLoop:
    """Steps ``width`` environments with the actions that the policy samples; stores nothing.

    Actions of a continuous space are not clipped, although they should be: this loop is to do no more than it must.
    """

    def __init__(self, env_id: str, width: int) -> None:
        self.env, self.policy = bare_env(env_id, width), policy(env_id)
        self.width = width
        self._observation, _ = self.env.reset(seed=0)

    @torch.inference_mode()
    def run(self, seconds: float) -> tuple[int, float]:
        """Step for so many seconds; return the frames, and the seconds that it took. A reset is no frame."""
        env, act, observation, frames = self.env, self._act, self._observation, 0
        vector, began = isinstance(env, VectorEnv), time.perf_counter()
        while (elapsed := time.perf_counter() - began) < seconds:
            for _ in range(16):
                observation, _, terminated, truncated, _ = env.step(act(observation))
                if vector:  # an environment is reset in the step after the end of an episode
                    frames -= int(np.count_nonzero(terminated | truncated))
                elif terminated or truncated:
                    observation, _ = env.reset()
            frames += 16 * self.width
        self._observation = observation
        return frames, elapsed

    def _act(self, observation) -> object:
        seen = torch.as_tensor(observation)
        seen = seen if seen.dtype is torch.uint8 else seen.float()
        parameters = self.policy.distribution_parameters(seen)
        return self.policy.choose(parameters, self.policy.noise(parameters)).numpy()


def serve(channel: Connection, _worker: int, env_id: str, width: int) -> None:
    """Run a ``BareLoop`` for the number of seconds that ``channel`` receives; a target of ``worker_processes``."""
    loop = BareLoop(env_id, width)
    try:
        while True:
            channel.send(loop.run(channel.recv()))
    except EOFError:
        loop.env.close()


Turn = Callable[[float], tuple[int, float]]
"""Work for so many seconds, at least; return the frames, and the seconds that it took."""
