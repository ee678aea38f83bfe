"""The hot loop of every collector: one policy acts in one (vectorised) environment, into a batch made beforehand."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from typing import Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from collectors.environments.stepper import Steps
from collectors.rollouts.asking import (
    NO_VERSION,
    Asking,
    AtRandom,
    ByCalling,
    Gate,
    InParts,
    Policy,
    no_gate,
    no_version,
)
from collectors.rollouts.columns import Columns
from collectors.rollouts.sampled import SampledPolicy, says_its_parts

__all__ = ["NO_VERSION", "Policy", "Rollout", "Steppable"]


class Steppable(Protocol):
    """What a rollout needs of an environment (``GymEnv``)."""

    stepper: Steps
    batch_size: torch.Size


class Rollout:
    """Steps one environment with one policy; the state of the episodes carries over from batch to batch.

    ``collect`` fills a batch that ``buffer`` made; it may live in shared memory, and several may take turns.
    All top-level tensors that the policy writes are stored, as it wrote them.
    """

    def __init__(
        self,
        env: Steppable,
        policy: Policy | None = None,
        *,
        device: torch.device | str | None = None,
        version: Callable[[], int] = no_version,
        gate: Gate = no_gate,
        init_random_frames: int = 0,
        max_frames_per_traj: int | None = None,
    ) -> None:
        """Bind ``policy`` to ``env``.

        Args:
            env: the environments; the rollout owns their state from here on.
            policy: reads "observation" and writes "action" (``[*B]`` index, ``[*B, n]`` scores or one-hot,
                ``[*B, dim]`` continuous) and whatever else; None for random actions. Whatever it wrote before is not
                handed to it again: there is no recurrence. A ``SampledPolicy`` is asked for its parts, which takes a
                third less time.
            device: where the policy's input has to be; its outputs come back to the CPU.
            version: called right after each step's policy call, inside the gate; stored as ``policy_version``.
            gate: makes of a function one that runs inside it; it gets the policy call, and what reads its outputs. The
                parts of a ``SampledPolicy`` are asked for inside wsync's own in any case.
            init_random_frames: so many frames begin with random actions (``policy_version`` -1; "action_log_prob"
                is that of the uniform choice, NaN where the bounds are infinite; other policy outputs are 0).
            max_frames_per_traj: truncate episodes after so many steps, if ``env`` does not do so earlier.

        Raises:
            ValueError: for a limit that the environment cannot keep.
        """
        self.stepper, self.batch_size = env.stepper, env.batch_size
        self.policy = policy
        self.init_random_frames = init_random_frames
        self.frames = 0
        if max_frames_per_traj is not None:
            own = self.stepper.max_frames_per_traj
            self.stepper.max_frames_per_traj = max_frames_per_traj if own is None else min(own, max_frames_per_traj)
        self._batched = len(self.batch_size) > 0
        self._device = torch.device(device or "cpu")
        self._gate, self._version = gate, version
        self._at_random = AtRandom(self.stepper, self._batched)
        self._asking: Asking | None = None

    def seed(self, seed: int) -> None:
        """Make what follows reproducible: environments, random actions, and the process's global generators."""
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        self.stepper.seed(seed)

    def buffer(self, steps: int) -> TensorDict:
        """Make an empty batch of ``steps`` per environment: ``[T]``, or ``[E, T]``.

        The first call runs the policy once on the current observation, acting nothing, to learn what it writes.

        Raises:
            ValueError: if the policy writes no "action", or steps is not positive.
        """
        if steps < 1:
            raise ValueError(f"a batch has at least one step, not {steps}")
        size = torch.Size((*self.batch_size, steps))
        spec = self.stepper.observation_spec

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros((*size, *shape), dtype=dtype)

        batch = TensorDict({"observation": zeros(spec.dtype, *spec.shape)}, size)
        for key, value in self._ask().outputs.items():
            batch.set(key, zeros(value.dtype, *value.shape[len(self.batch_size) :]))
        batch.set("policy_version", zeros(torch.int64))
        flags = {key: zeros(torch.bool, 1) for key in ("done", "terminated", "truncated")}
        sums = {"reward": zeros(torch.float32, 1), "episode_return": zeros(torch.float32, 1)}
        successor = {"observation": torch.zeros_like(batch.get("observation"))}
        batch.set("next", TensorDict(successor | sums | flags | {"episode_length": zeros(torch.int64, 1)}, size))
        return batch

    def collect(self, batch: TensorDictBase) -> TensorDictBase:
        """Fill ``batch``, made by ``buffer`` (or a slice of such ones), and return it.

        What the environment or the policy raises comes out as it is, and the batch is then undefined. If it was raised
        within a step of the environment (or a reset), so are the episodes: the next batch begins new ones.
        """
        asking, stepper = self._ask(), self.stepper
        columns = Columns(batch, asking.outputs, self._batched)
        first = self._random_steps(columns.steps)
        versions = np.full(columns.steps, NO_VERSION)
        if not stepper.is_reset:
            stepper.reset()
        with torch.no_grad():
            if first < columns.steps:
                asking.begin(columns.steps - first)
            for t in range(columns.steps):
                columns.observation[t] = stepper.observation
                action, versions[t] = (self._at_random if t < first else asking).act(columns, t)
                stepper.step(action)
                columns.write_result(t, stepper)
                stepper.reset_ended()
                self.frames += stepper.num_envs
            if first < columns.steps:
                asking.finish(columns, first)
        columns.version[:] = versions[:, None]
        return batch

    def _random_steps(self, steps: int) -> int:
        """How many of the next ``steps`` begin with fewer than ``init_random_frames``; without a policy, all."""
        if self.policy is None:
            return steps
        left = -(-(self.init_random_frames - self.frames) // self.stepper.num_envs)
        return min(max(left, 0), steps)

    def _ask(self) -> Asking:
        """Return how the policy is asked; the first call runs it once."""
        in_parts, asking = says_its_parts(self.policy), self._asking
        if asking is None:
            asking = self._probe(in_parts)
        elif isinstance(asking, InParts) and not in_parts:  # somebody has set hooks
            asking = self._probe(in_parts, keys=asking.outputs)  # buffers were made for these
        self._asking = asking
        return asking

    def _probe(self, in_parts: bool, keys: Collection[str] | None = None) -> Asking:
        if self.policy is None:
            return self._at_random
        if not self.stepper.is_reset:
            self.stepper.reset()
        with torch.no_grad():
            if in_parts and isinstance(self.policy, SampledPolicy):
                return InParts(self.policy, self.stepper, self._batched, self._device, self._version)
            return ByCalling(self.policy, self.stepper, self._batched, self._device, self._version, self._gate, keys)
