"""A batch as a rollout writes it: by steps."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from tensordict import TensorDictBase

from collectors.environments.stepper import Steps


class Columns:
    """Numpy views of a batch's tensors with time in front and E behind it, so that a step is one small write each."""

    def __init__(self, batch: TensorDictBase, policy_keys: Iterable[str], batched: bool) -> None:
        """Bind to ``batch`` (``[T]``, or ``[E, T]`` where ``batched``), which must be on the CPU."""

        def rows(*key: str) -> np.ndarray:
            array = batch.get(key).numpy()
            return array.swapaxes(0, 1) if batched else array[:, None]

        self.steps = batch.batch_size[-1]
        self.observation, self.version = rows("observation"), rows("policy_version")
        self.action = rows("action")
        self.others = {key: rows(key) for key in policy_keys if key != "action"}
        self.successor = rows("next", "observation")
        self.reward, self.done, self.terminated, self.truncated, self.episode_return, self.episode_length = (
            rows("next", key)[..., 0]
            for key in ("reward", "done", "terminated", "truncated", "episode_return", "episode_length")
        )

    def write_result(self, t: int, stepper: Steps) -> None:
        """Write what the step gave into row ``t``."""
        self.successor[t] = stepper.observation
        self.reward[t] = stepper.reward
        self.terminated[t] = stepper.terminated
        self.truncated[t] = stepper.truncated
        self.done[t] = stepper.done
        self.episode_return[t] = stepper.episode_return
        self.episode_length[t] = stepper.episode_length
