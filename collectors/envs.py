"""``GymEnv``: Gymnasium environments, one or many at once, as TensorDicts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from collectors.environments.specs import ArrayTree, Spec, as_tensors, to_numpy
from collectors.environments.stepper import RESULTS, Stepper
from collectors.environments.transforms import Transform
from collectors.environments.vector import EnvSource, ScalarDriver, make_driver
from collectors.rollouts.rollout import Policy, Rollout


class GymEnv:
    """One Gymnasium environment, or ``num_envs`` of them stepped together.

    ``batch_size`` is ``[]`` for one environment and ``[E]`` for several. ("next", "observation") is the true successor,
    also at an episode's end, and ``observe()`` gives what to act on next: an ended episode starts again within the same
    step. Only a vector environment with Gymnasium's autoreset mode NEXT_STEP takes a step for that, and then the bool
    "mask" ``[E]`` is false for rows that a step has reset: there is nothing to learn from them. A collector's batches
    have these rows, and its number of frames does not include them.

    Args:
        env: a Gymnasium id or EnvSpec; or a function that makes an environment; or a made Env, or a made VectorEnv with
            autoreset mode DISABLED or NEXT_STEP. It is reset when it is first used.
        num_envs: how many (1 by default; a VectorEnv brings its own number).
        seed: for the first reset and random actions; row i is seeded as Gymnasium does.
        max_frames_per_traj: truncate episodes after so many steps.
        vectorization_mode: "sync" (the default) or "async", in which an ended episode starts again within the same
            step; "vector_entry_point", Gymnasium's native vector environment; or "auto": that one, if it is registered
            without wrappers, and neither ``make_kwargs`` nor ``max_frames_per_traj`` are given, else "sync".
        transforms: what changes rewards on their way out; see ``append_transform``.
        make_kwargs: for ``gymnasium.make``.

    Attributes:
        transform: the transforms in their order; ``"env.transform[0].module"`` is a model id in a collector's schemes.

    Raises:
        TypeError: ``env`` is none of these; or an observation or action space is not made of tensors of a fixed shape.
        ValueError: for arguments that contradict each other, or a vector environment with another autoreset mode.
        gymnasium.error.Error: for an unknown id.
    """

    def __init__(
        self,
        env: EnvSource,
        num_envs: int | None = None,
        *,
        seed: int | None = None,
        max_frames_per_traj: int | None = None,
        vectorization_mode: str | None = None,
        transforms: Iterable[Transform] = (),
        **make_kwargs: Any,
    ) -> None:
        if num_envs is not None and num_envs < 1:
            raise ValueError(f"num_envs is at least 1, not {num_envs}")
        if vectorization_mode == "auto" and max_frames_per_traj is not None:
            vectorization_mode = "sync"
        self.stepper = Stepper(make_driver(env, num_envs, vectorization_mode, make_kwargs), seed)
        self.num_envs = self.stepper.num_envs
        self.batch_size = torch.Size(() if self.num_envs == 1 else (self.num_envs,))
        self.stepper.limit(max_frames_per_traj)
        self.transform: list[Transform] = []
        for transform in transforms:
            self.append_transform(transform)

    if not TYPE_CHECKING:  # the type checker still reports a misspelt attribute of GymEnv

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of a single Gymnasium environment: ``"env.value_net"`` is a model id."""
            stepper = vars(self).get("stepper")  # absent during __init__ and unpickling
            if stepper is None or not isinstance(stepper.driver, ScalarDriver):
                raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")
            return stepper.driver.env.get_wrapper_attr(name)

    def append_transform(self, transform: Transform) -> Self:
        """Apply ``transform`` to ("next", "reward") after the existing transforms; return this environment.

        "episode_return" stays the sum of the environment's own rewards.

        Raises:
            TypeError: not a transform, or observations are several tensors.
        """
        if not isinstance(transform, Transform):
            raise TypeError(f"{transform!r} is not a transform: wrap a module in a ModuleTransform")
        if isinstance(self.stepper.observation, ArrayTree):
            names = ", ".join(self.stepper.observation.parts)
            raise TypeError(
                f"a transform reads one observation tensor, and there are several ({names}): wrap the environment in "
                "gymnasium.wrappers.FlattenObservation, or do without the transform"
            )
        self.stepper.append(transform)
        self.transform.append(transform)
        return self

    @property
    def observation_spec(self) -> dict[str, Any]:
        """That of one environment's "observation"; a Spec, or for a Dict or Tuple space a dictionary of them."""
        return {"observation": self.stepper.observation_spec}

    @property
    def action_spec(self) -> Spec:
        """The spec of one environment's action; a discrete one of n choices has shape ``(n,)``."""
        return self.stepper.action_spec

    def set_seed(self, seed: int) -> None:
        """Seed the random actions, and a reset that precedes the next step."""
        self.stepper.seed(seed)

    def reset(self, seed: int | None = None) -> TensorDict:
        """Start new episodes; return "observation" ``[*B, *obs]``, a TensorDict for Dict and Tuple spaces."""
        self.stepper.reset(seed)
        return self.observe()

    def observe(self) -> TensorDict:
        """Return the "observation" to act on now: after an episode's end, that of the new episode."""
        if not self.stepper.is_reset:
            self.stepper.reset()
        return TensorDict({"observation": self._observation()}, self.batch_size)

    def step(self, td: TensorDictBase) -> TensorDictBase:
        """Apply ``td``'s "action" (index, scores or one-hot; or continuous) and write its ("next", …).

        That is "observation" ``[*B, *obs]``; "reward" and "episode_return" (float32), "episode_length" (int64),
        "done", "terminated" and "truncated" (bool), each ``[*B, 1]``.

        Raises:
            KeyError: without an "action".
            ValueError: for actions of a wrong shape, an index out of range, NaN, or an action mask that allows nothing.
        """
        stepper, action = self.stepper, td.get("action")
        if not stepper.is_reset:
            stepper.reset()
        if action is None:
            raise KeyError(f'step needs an "action"; there are {sorted(td.keys())}')
        stepper.step(to_numpy(action))
        successor: dict[str, Any] = {
            name: self._tensor(getattr(stepper, name)[:, None], dtype) for name, dtype in RESULTS.items()
        }
        successor["observation"] = self._observation()
        if stepper.reset_step is not None:
            td.set("mask", self._tensor(~stepper.reset_step, np.bool_))
        td.set("next", TensorDict(successor, self.batch_size))
        stepper.reset_ended()
        return td

    def rollout(self, max_steps: int, policy: Policy | None = None) -> TensorDict:
        """Reset, then act for ``max_steps`` steps per environment, episode after episode; ``[T]`` or ``[E, T]``.

        See ``Rollout`` for what a policy is; None acts at random.
        """
        self.stepper.reset()
        rollout = Rollout(self, policy)
        batch = rollout.buffer(max_steps)
        rollout.collect(batch)
        return batch

    def close(self) -> None:
        """Close the environments; may be called twice."""
        self.stepper.driver.close()

    def _observation(self) -> torch.Tensor | TensorDict:
        """Return a copy: the array is written again in the next step."""
        observation = as_tensors(self.stepper.observation, self.num_envs).clone()
        return observation if self.batch_size else observation[0]

    def _tensor(self, array: Any, dtype: Any) -> torch.Tensor:
        tensor = torch.from_numpy(array.astype(dtype))  # a copy, too
        return tensor if self.batch_size else tensor[0]
