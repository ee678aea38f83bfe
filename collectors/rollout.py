"""The hot loop of every collector: one policy acts in one (vectorised) environment, into a batch made beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from collectors.specs import to_numpy
from collectors.stepper import Steps

Policy = Callable[[TensorDictBase], TensorDictBase]
NO_VERSION = -1
"""``policy_version`` of frames in which no policy acted (random ones)."""


class Steppable(Protocol):
    """What a rollout needs of an environment (``GymEnv``)."""

    stepper: Steps
    batch_size: torch.Size


def _no_version() -> int:
    return 0


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
        self.others = [(key, rows(key)) for key in policy_keys if key != "action"]
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
        version: Callable[[], int] = _no_version,
        gate: AbstractContextManager[object] | None = None,
        init_random_frames: int = 0,
        max_frames_per_traj: int | None = None,
    ) -> None:
        """Bind ``policy`` to ``env``.

        Args:
            env: the environments; the rollout owns their state from here on.
            policy: reads "observation" and writes "action" (``[*B]`` index, ``[*B, n]`` scores or one-hot,
                ``[*B, dim]`` continuous) and whatever else; None for random actions.
            device: where the policy's input has to be; its outputs come back to the CPU.
            version: called right after each policy call, inside the gate; stored as ``policy_version``.
            gate: entered around each policy call, and nothing else.
            init_random_frames: so many frames begin with random actions (``policy_version`` -1; "action_log_prob"
                is that of the uniform choice, NaN where the bounds are infinite; other policy outputs are 0).
            max_frames_per_traj: truncate episodes after so many steps.

        Raises:
            ValueError: for a limit that the environment cannot keep.
        """
        self.stepper, self.batch_size = env.stepper, env.batch_size
        self.policy, self.version, self.gate = policy, version, gate or nullcontext()
        self.init_random_frames = init_random_frames
        self.frames = 0
        if max_frames_per_traj is not None:
            self.stepper.max_frames_per_traj = max_frames_per_traj
        self._batched = len(self.batch_size) > 0
        observation = torch.from_numpy(self.stepper.observation)
        self._observation = observation if self._batched else observation[0]
        self._device = torch.device(device or "cpu")
        self._input = TensorDict({}, self.batch_size, device=self._device)
        self._outputs: dict[str, torch.Tensor] | None = None
        self._read: Callable[[torch.Tensor], np.ndarray] = to_numpy

    def seed(self, seed: int) -> None:
        """Make what follows reproducible: environments, random actions, and torch's global generator."""
        torch.manual_seed(seed)
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
        stepper = self.stepper

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros((*size, *shape), dtype=dtype)

        batch = TensorDict({"observation": zeros(self._observation.dtype, *stepper.observation_spec.shape)}, size)
        for key, value in self._policy_outputs().items():
            batch.set(key, zeros(value.dtype, *value.shape[len(self.batch_size) :]))
        batch.set("policy_version", zeros(torch.int64))
        flags = {key: zeros(torch.bool, 1) for key in ("done", "terminated", "truncated")}
        sums = {"reward": zeros(torch.float32, 1), "episode_return": zeros(torch.float32, 1)}
        successor = {"observation": torch.zeros_like(batch.get("observation"))}
        batch.set("next", TensorDict(successor | sums | flags | {"episode_length": zeros(torch.int64, 1)}, size))
        return batch

    def collect(self, batch: TensorDictBase) -> TensorDictBase:
        """Fill ``batch``, made by ``buffer`` (or a slice of such ones), and return it.

        What the environment or the policy raises comes out as it is; the batch is then undefined.
        """
        columns, stepper = Columns(batch, self._policy_outputs(), self._batched), self.stepper
        if not stepper.is_reset:
            stepper.reset()
        with torch.no_grad():
            for t in range(columns.steps):
                columns.observation[t] = stepper.observation
                random = self.policy is None or self.frames < self.init_random_frames
                action = self._act_randomly(columns, t) if random else self._act(columns, t)
                stepper.step(action)
                columns.write_result(t, stepper)
                stepper.reset_ended()
                self.frames += stepper.num_envs
        return batch

    def _act(self, columns: Columns, t: int) -> np.ndarray:
        assert self.policy is not None
        # On the CPU the environment has written into the policy's input already, unless a policy has put something
        # else under this name.
        if self._input.get("observation") is not self._observation:
            self._input.set("observation", self._observation.to(self._device))
        with self.gate:
            output = self.policy(self._input)
            version = self.version()
        columns.version[t] = version
        for key, rows in columns.others:
            rows[t] = self._read(output.get(key))
        columns.action[t] = action = self._read(output.get("action"))
        return action

    def _act_randomly(self, columns: Columns, t: int) -> np.ndarray:
        action = self.stepper.sample()
        row, n = columns.action[t], self.stepper.action_spec.n or 0
        one_hot = n > 0 and row.ndim > 1 and row.shape[-1] == n
        columns.action[t] = np.arange(n) == action[:, None] if one_hot else action.reshape(row.shape)
        for key, rows in columns.others:
            rows[t] = self.stepper.uniform_log_prob if key == "action_log_prob" else 0
        columns.version[t] = NO_VERSION
        return action

    def _policy_outputs(self) -> dict[str, torch.Tensor]:
        """Return one output of each key, found at the first call."""
        if self._outputs is None:
            self._outputs = self._probe()
        return self._outputs

    def _probe(self) -> dict[str, torch.Tensor]:
        stepper = self.stepper
        if not stepper.is_reset:
            stepper.reset()
        if self.policy is None:
            spec = stepper.action_spec
            shape = self.batch_size if spec.is_discrete else (*self.batch_size, *spec.shape)
            return {"action": torch.zeros(shape, dtype=spec.dtype)}
        devices = [self._device] if self._device.type == "cuda" else []
        self._input.set("observation", self._observation.clone().to(self._device))
        with torch.random.fork_rng(devices), torch.no_grad(), self.gate:
            output = self.policy(self._input)
        outputs: dict[str, torch.Tensor] = {
            key: value
            for key, value in output.items()
            if isinstance(value, torch.Tensor) and key not in ("observation", "policy_version")
        }
        if "action" not in outputs:
            raise ValueError(f'the policy wrote {sorted(outputs)}, and no "action" among them')
        if all(value.is_cpu and value.dtype is not torch.bfloat16 for value in outputs.values()):
            self._read = torch.Tensor.numpy  # half the time of the general way
        return {key: torch.from_numpy(to_numpy(value)) for key, value in outputs.items()}
