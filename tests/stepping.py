"""Environments in which nothing happens; in each step of some, a byte goes into a pipe, for which a test can wait."""

import os
import select

import gymnasium
import numpy as np
from tensordict.nn import TensorDictModule
from torch import nn

STEPS = 8  # of a batch


class Quiet(gymnasium.Env):
    observation_space: gymnasium.Space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space: gymnasium.Space = gymnasium.spaces.Discrete(2)

    def _observe(self):
        return np.zeros(self.observation_space.shape or (), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        return self._observe(), 0.0, False, False, {}


class Counted(Quiet):
    def __init__(self, path: str) -> None:
        self.pipe = os.open(path, os.O_WRONLY)

    def step(self, action):
        os.write(self.pipe, b"*")
        return super().step(action)

    def close(self):
        os.close(self.pipe)


def wait_for(reading: int, count: int) -> None:
    """Wait until ``count`` steps have been taken; the test's own deadline limits it."""
    while count:
        count -= len(os.read(reading, count))


def more_come(reading: int, within: float = 0.3) -> bool:
    return bool(select.select([reading], [], [], within)[0])


def policy() -> TensorDictModule:
    return TensorDictModule(nn.Linear(4, 2), in_keys=["observation"], out_keys=["action"])


class Held(Counted):
    """Takes a byte from the pipe ``gate`` in each step, and waits for one."""

    def __init__(self, path: str, gate: str) -> None:
        super().__init__(path)
        self.gate = os.open(gate, os.O_RDONLY)

    def step(self, action):
        result = super().step(action)
        os.read(self.gate, 1)
        return result

    def close(self):
        super().close()
        os.close(self.gate)
