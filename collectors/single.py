"""A collector in the trainer's own process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn

import wsync
from collectors.base import BaseCollector
from collectors.envs import GymEnv
from collectors.making import EnvMaker, make_env
from collectors.pickling import copy_of
from collectors.rollouts.acting import Actor, policy_scheme
from collectors.updating import UpdaterOrFactory


class Collector(BaseCollector):
    """Gathers batches in this process, with its own copy of the policy.

    Every scheme can be given: nothing has to be carried, so weights go through the same gate and version count
    straight into that copy. The policy itself reaches it only by ``update_policy_weights_``.

    Args:
        create_env_fn: makes the environment, or is one (a list of one is taken too).
        policy: a module that reads "observation" and writes "action"; or any function of a TensorDict; None acts at
            random. Whatever it wrote before is not handed to it again: there is no recurrence.
        policy_factory: makes the acting policy, instead of a copy of ``policy``.
        frames_per_batch: frames in a batch, rounded up to a multiple of the environments.
        total_frames: the end; -1 for none.
        device: where the policy acts.
        storing_device: where batches are put.
        weight_sync_schemes: ``{model_id: scheme}``; by default one for ``policy``, if that is a module with weights
            (where there is only a ``policy_factory``, there is none, and its weights stay as they are).
        weight_updater: of the older API, deprecated; or a function that makes one.
        max_frames_per_traj: episodes are truncated after so many steps.
        init_random_frames: so many frames begin with random actions.
        track_policy_version: whether batches have ``policy_version``.

    Raises:
        TypeError: no environment; or a policy that cannot be copied.
        ValueError: numbers out of range, or a weight_updater that the schemes contradict.
    """

    def __init__(
        self,
        create_env_fn: EnvMaker | GymEnv | list[EnvMaker],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        device: torch.device | str | None = None,
        storing_device: torch.device | str | None = None,
        weight_sync_schemes: Mapping[str, wsync.WeightSyncScheme] | None = None,
        weight_updater: UpdaterOrFactory | None = None,
        max_frames_per_traj: int | None = None,
        init_random_frames: int = 0,
        track_policy_version: bool = True,
    ) -> None:
        super().__init__(
            policy,
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            storing_device=storing_device,
            weight_sync_schemes=weight_sync_schemes,
            track_policy_version=track_policy_version,
            weight_updater=weight_updater,
        )
        makers = create_env_fn if isinstance(create_env_fn, list | tuple) else [create_env_fn]
        if len(makers) != 1:
            raise ValueError(f"a collector in one process has one environment function, not {len(makers)}")
        acting = policy_factory() if policy_factory is not None else copy_of(policy)
        self.env = make_env(makers[0])
        try:
            self._actor = Actor(
                self.env,
                acting,
                device=device,
                init_random_frames=init_random_frames,
                max_frames_per_traj=max_frames_per_traj,
            )
            for model_id, scheme in self.weight_sync_schemes.items():
                if not isinstance(scheme, wsync.NoWeightSyncScheme):
                    scheme.init_in_process(model_id, self._actor.get_model(model_id), self._source(model_id))
        except BaseException:
            self.shutdown()
            raise
        followed = policy_scheme(self.weight_sync_schemes)
        if followed is not None:
            self._actor.follow(followed)
        self._steps = -(-frames_per_batch // self.env.num_envs)

    def _source(self, model_id: str) -> nn.Module | None:
        """The trainer's model; None if only the acting side has it."""
        try:
            return super().get_model(model_id)
        except LookupError:
            return None

    def get_model(self, model_id: str) -> nn.Module:
        """See BaseCollector; or one that only the acting side has: it is in this process."""
        model = self._source(model_id)
        return self._actor.get_model(model_id) if model is None else model

    def cascade_weights(self, model_id: str) -> None:
        """See BaseCollector; a model that only the acting side has acts already."""
        if self._source(model_id) is not None:
            super().cascade_weights(model_id)

    def _gather(self) -> TensorDictBase:
        rollout = self._actor.rollout
        return rollout.collect(rollout.buffer(self._steps))

    def set_seed(self, seed: int) -> int:
        """Environment ``i`` gets ``seed + i``."""
        self._actor.rollout.seed(seed)
        return seed + self.env.num_envs

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See BaseCollector."""
        super().load_state_dict(state_dict)
        self._actor.rollout.frames = self.frames

    def interrupt(self) -> None:
        """Nobody is waited for here."""

    def _look_into(self, error: wsync.WeightSyncError) -> None:
        """It says it all: there is nobody else to ask."""

    def _close(self) -> None:
        for scheme in self.weight_sync_schemes.values():
            scheme.shutdown()
        self.env.close()
