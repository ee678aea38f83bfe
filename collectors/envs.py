"""``GymEnv``: Gymnasium environments, one or many at once, as TensorDicts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

import torch
from tensordict import TensorDict, TensorDictBase

from collectors.environments.specs import Spec, to_numpy
from collectors.environments.stepper import Stepper, Steps
from collectors.environments.transforms import Transform
from collectors.environments.vector import EnvSource, ScalarDriver, make_driver
from collectors.rollouts.rollout import Policy, Rollout


class GymEnv:
    """One Gymnasium environment, or ``num_envs`` of them stepped together.

    ``batch_size`` is ``[]`` for one environment and ``[E]`` for several. An ended episode begins anew within the same
    step, so that every row is a real frame: ("next", "observation") is the true successor, also at an episode's end,
    and ``observe()`` what to act on next.

    Attributes:
        transform: the transforms in their order; ``append_transform`` adds one. A collector's schemes find the module
            of the first one by the name ``"env.transform[0].module"``.
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
        """Make the environment; it is reset when it is first used.

        Args:
            env: a Gymnasium id or EnvSpec; or a function that makes an environment; or a made Env or VectorEnv.
            num_envs: how many (1 by default; a VectorEnv brings its own number).
            seed: for the first reset and random actions; row i is seeded as Gymnasium does.
            max_frames_per_traj: truncate episodes after so many steps.
            vectorization_mode: "sync", "async" or "vector_entry_point"; by default Gymnasium's native vector
                environment where rows of it can be reset when they end (CartPole), else "sync".
            transforms: what changes observations and rewards on their way out; see ``append_transform``.
            **make_kwargs: for ``gymnasium.make``.

        Raises:
            TypeError: for an observation or action space that cannot be one tensor.
            ValueError: for arguments that do not fit, or a vector environment that resets in the step after the end.
            gymnasium.error.Error: for an unknown id.
        """
        if num_envs is not None and num_envs < 1:
            raise ValueError(f"num_envs is at least 1, not {num_envs}")
        self.stepper: Steps = Stepper(make_driver(env, num_envs, vectorization_mode, make_kwargs), seed)
        self.num_envs = self.stepper.num_envs
        self.batch_size = torch.Size(() if self.num_envs == 1 else (self.num_envs,))
        self.max_frames_per_traj = max_frames_per_traj
        self.transform: list[Transform] = []
        for transform in transforms:
            self.append_transform(transform)

    if not TYPE_CHECKING:  # a misspelt name of GymEnv's own is still found out

        def __getattr__(self, name: str) -> Any:
            """What the one Gymnasium environment inside has: a model of it is ``"env.value_net"`` for a collector.

            Raises:
                AttributeError: it has no such thing; or there are several environments, and so several such things.
            """
            stepper = vars(self).get("stepper")  # not there yet while this is made or unpickled
            if stepper is None or not isinstance(stepper.driver, ScalarDriver):
                raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")
            return stepper.driver.env.get_wrapper_attr(name)

    def append_transform(self, transform: Transform) -> Self:
        """Have ``transform`` change what comes out, after the transforms that are there; return this environment.

        "observation" and ("next", "observation") are then what an encoder makes of them (``observation_spec`` follows),
        ("next", "reward") what a reward model says; "episode_return" goes on counting the environment's own reward.
        A rollout or a collector that has the environment already keeps what it was given.

        Raises:
            TypeError: this is no transform, or one that gives no tensor.
            ValueError: one of a wrong shape.
        """
        if not isinstance(transform, Transform):
            raise TypeError(f"{transform!r} is not a transform: wrap a module in a ModuleTransform")
        self.stepper = transform.around(self.stepper)
        self.transform.append(transform)
        return self

    @property
    def observation_spec(self) -> dict[str, Spec]:
        """The spec of one environment's "observation"."""
        return {"observation": self.stepper.observation_spec}

    @property
    def action_spec(self) -> Spec:
        """The spec of one environment's action; a discrete one of n choices has shape ``(n,)``."""
        return self.stepper.action_spec

    @property
    def max_frames_per_traj(self) -> int | None:
        """Steps after which an episode is truncated; None: when the environment says so."""
        return self.stepper.max_frames_per_traj

    @max_frames_per_traj.setter
    def max_frames_per_traj(self, limit: int | None) -> None:
        self.stepper.max_frames_per_traj = limit

    def set_seed(self, seed: int) -> None:
        """Make what follows reproducible; the next step begins with a reset."""
        self.stepper.seed(seed)

    def reset(self, seed: int | None = None) -> TensorDict:
        """Begin new episodes; return "observation" ``[*B, *obs]``."""
        self.stepper.reset(seed)
        return self.observe()

    def observe(self) -> TensorDict:
        """Return the "observation" to act on now: after an episode's end, that of the new episode."""
        if not self.stepper.is_reset:
            self.stepper.reset()
        return TensorDict({"observation": self._tensor(self.stepper.observation)}, self.batch_size)

    def step(self, td: TensorDictBase) -> TensorDictBase:
        """Apply ``td``'s "action" (index, scores or one-hot; or continuous) and write its ("next", …).

        That is "observation" ``[*B, *obs]``; "reward" and "episode_return" (float32), "episode_length" (int64),
        "done", "terminated" and "truncated" (bool), each ``[*B, 1]``.

        Raises:
            KeyError: without an "action".
            ValueError: for actions of a wrong shape, or that there are not (an index out of range, scores of NaN).
        """
        stepper = self.stepper
        if not stepper.is_reset:
            stepper.reset()
        action = td.get("action")
        if action is None:
            raise KeyError(f'step needs an "action"; there are {sorted(td.keys())}')
        stepper.step(to_numpy(action))
        columns = {
            "reward": stepper.reward,
            "done": stepper.done,
            "terminated": stepper.terminated,
            "truncated": stepper.truncated,
            "episode_return": stepper.episode_return.astype("float32"),
            "episode_length": stepper.episode_length,
        }
        successor = {key: self._tensor(column[:, None]) for key, column in columns.items()}
        successor["observation"] = self._tensor(stepper.observation)
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

    def _tensor(self, array: Any) -> torch.Tensor:
        tensor = torch.tensor(array)  # a copy: the array is written again in the next step
        return tensor if self.batch_size else tensor[0]
