"""A collector that acts in the trainer's process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

import wsync
from collectors import arguments
from collectors.arguments import EnvMaker, make_env
from collectors.base import BaseCollector
from collectors.batches import Staleness, warn_if_rounded
from collectors.envs import GymEnv
from collectors.rollouts.rollout import Actor, policy_scheme
from collectors.rollouts.sampled import check_policy


class Collector(BaseCollector):
    """Collects batches in this process, with a copy of the policy.

    It accepts every scheme and transports nothing: an update passes the same gate and version count into the copy.

    Args:
        create_env_fn: a function that makes the environment, or the environment (or a list of one of these).
        frames_per_batch: rows of a batch (frames, and rows that "mask" excludes), rounded up to a multiple of the
            number of environments.
        policy, policy_factory, weight_sync_schemes, …: as ``WorkerCollector``, for one worker; ``max_staleness`` is of
            use if another thread updates the weights.

    Raises:
        TypeError: the policy cannot be copied, or is not usable as a policy.
        ValueError: there is not exactly one environment function, a number is out of range, or ``weight_updater``
            contradicts the schemes.
        RuntimeError: a scheme is initialised already.
        LookupError: a model id leads nowhere.
    """

    def __init__(
        self,
        create_env_fn: EnvMaker | GymEnv | list[EnvMaker],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | Sequence[Callable[[], Any]] | None = None,
        device: torch.device | str | None = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int = 0,
        exploration_type: InteractionType | str | None = InteractionType.RANDOM,
        max_staleness: int | None = None,
        **options: Any,
    ) -> None:
        arguments.check_numbers(max_frames_per_traj, init_random_frames=init_random_frames)
        super().__init__(policy, policy_factory=policy_factory, staleness=Staleness(max_staleness), **options)
        makers = create_env_fn if isinstance(create_env_fn, list | tuple) else [create_env_fn]
        if len(makers) != 1:
            raise ValueError(f"a collector in one process has one environment function, not {len(makers)}")
        (factory,) = arguments.policy_factory_of_each(policy_factory, 1)
        arguments.initialise(policy, makers[0])
        acting = cloudpickle.loads(arguments.pickled(policy, "policy")) if factory is None else factory()
        check_policy(acting)
        self.env = make_env(makers[0])
        try:
            self._actor = Actor(
                self.env,
                acting,
                policy_scheme(self._worker_schemes),
                device=device,
                init_random_frames=init_random_frames,
                max_frames_per_traj=max_frames_per_traj,
                exploration_type=exploration_type,
            )
            self._actor.rollout.buffer(1)  # calls the policy once, so that its errors come now
            for model_id, scheme in self._worker_schemes.items():
                if not isinstance(scheme, wsync.NoWeightSyncScheme):
                    scheme.init_in_process(model_id, self._actor.get_model(model_id), self._source(model_id))
            self._connect_hosted()
            self._steps = -(-self.frames_per_batch // self.env.num_envs)
            warn_if_rounded(self.frames_per_batch, self._steps * self.env.num_envs)
        except BaseException:  # also Ctrl-C: the environments are closed
            self.shutdown()
            raise

    def _source(self, model_id: str) -> nn.Module | None:
        """Return the trainer's model; None if only the acting side has one."""
        try:
            return super().get_model(model_id)
        except LookupError:
            return None

    def get_model(self, model_id: str) -> nn.Module:
        """Return the trainer's model, or one that only the acting side has."""
        model = self._source(model_id)
        return self._actor.get_model(model_id) if model is None else model

    def cascade_weights(self, model_id: str) -> None:
        """Deliver an update that another scheme has installed in the trainer's model; the actor's own needs none."""
        if self._source(model_id) is not None:
            super().cascade_weights(model_id)

    def _find_all(self, path: str) -> list[Any]:
        return [self._actor.find(path)]

    def _gather(self) -> TensorDictBase:
        rollout = self._actor.rollout
        batch = rollout.buffer(self._steps)
        while not self._admits(rollout.collect(batch), 0):
            pass
        return batch

    def _seed_from(self, first: int) -> int:
        self._actor.rollout.seed(first)
        return first + self.env.num_envs

    def _resume(self) -> None:
        self._actor.rollout.frames = self.frames

    def interrupt(self) -> None:
        """Do nothing: a batch does not wait for workers."""

    def _close(self) -> None:
        with ExitStack() as steps:  # all are called, and an error is raised then
            steps.callback(self.env.close)
            for scheme in self.weight_sync_schemes.values():
                steps.callback(scheme.shutdown)
