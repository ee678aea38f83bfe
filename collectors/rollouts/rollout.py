"""The acting part of a worker: a policy acts in a (vectorised) environment and fills a preallocated batch."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, set_interaction_type
from torch import nn

import wsync
from collectors.environments import specs
from collectors.environments.specs import as_tensors
from collectors.environments.stepper import RESULTS
from collectors.rollouts import action_source as sources
from collectors.rollouts.action_source import NO_VERSION, ActionSource, Gate, Policy
from collectors.rollouts.sampled import acts_in_parts


class Rollout:
    """Steps one environment with one policy; episodes continue from batch to batch.

    ``collect`` fills a batch that ``buffer`` made; it may be in shared memory, and several batches may alternate. All
    top-level tensors that the policy writes are stored (bfloat16 as float32), except "observation", "policy_version"
    and "is_init", which the rollout writes.

    Args:
        env: a ``GymEnv``; only the rollout may step it afterwards.
        policy: reads "observation" and writes "action" (``[*B]`` index, ``[*B, n]`` scores or one-hot, ``[*B, dim]``
            continuous) and other outputs, or a module that maps one tensor to the other; None for random actions. What
            it writes under ("next", key) is its input ``key`` in the next step: see ``RecurrentState``.
        device: device of the policy's input; outputs are copied to the CPU.
        version: called after each step's policy call, inside the gate; stored as ``policy_version``.
        gate: wraps a function so that it runs inside a gate; applied to the policy call and the reading of its
            outputs. The parts of a ``SampledPolicy`` always run inside wsync's gate.
        init_random_frames: the first frames have random actions, of those that an "action_mask" in the observation
            allows (``policy_version`` -1; "action_log_prob" is that of the draw, "is_init" is true; other policy
            outputs are 0).
        max_frames_per_traj: truncate episodes after this many steps, if ``env`` does not do so earlier.
        exploration_type: how a policy with a distribution acts; None: as ``set_interaction_type`` says outside.
    """

    def __init__(
        self,
        env: Any,
        policy: Policy | None = None,
        *,
        device: torch.device | str | None = None,
        version: Callable[[], int] = lambda: 0,
        gate: Gate = lambda function: function,
        init_random_frames: int = 0,
        max_frames_per_traj: int | None = None,
        exploration_type: InteractionType | str | None = None,
    ) -> None:
        self.stepper, self.batch_size = env.stepper, env.batch_size
        self._acting = nullcontext() if exploration_type is None else set_interaction_type(exploration_type)
        self.policy = policy
        self.init_random_frames = init_random_frames
        self.frames = 0
        self.stepper.limit(max_frames_per_traj)
        self._batched = len(self.batch_size) > 0
        self._device = torch.device(device or "cpu")
        self._gate, self._version = gate, version
        self._at_random = sources.RandomActions(self.stepper, self._batched)
        self._ended_at_random = False  # whether the last batch did

    def seed(self, seed: int) -> None:
        """Seed the environments, the random actions, and the process's global generators."""
        seed = operator.index(seed)
        seed_generators(seed)
        self.stepper.seed(seed)

    def buffer(self, steps: int) -> TensorDict:
        """Make an empty batch of ``steps`` per environment: ``[T]``, or ``[E, T]``.

        The first call runs the policy once on the current observation, without a step, to see what it writes.
        """
        if steps < 1:
            raise ValueError(f"a batch has at least one step, not {steps}")
        size = torch.Size((*self.batch_size, steps))

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros((*size, *shape), dtype=dtype)

        def observations() -> torch.Tensor | TensorDict:
            return as_tensors(specs.zeros(self.stepper.observation_spec, *size), *size)

        batch = TensorDict({"observation": observations()}, size)
        outputs = self._source.outputs
        written = {key: zeros(value.dtype, *value.shape[len(self.batch_size) :]) for key, value in outputs.items()}
        batch.update({key: value for key, value in written.items() if isinstance(key, str)})
        batch.set("policy_version", zeros(torch.int64))
        if self.stepper.reset_step is not None:
            batch.set("mask", zeros(torch.bool))
        results = {name: torch.from_numpy(np.zeros((*size, 1), dtype)) for name, dtype in RESULTS.items()}
        batch.set("next", TensorDict({"observation": observations(), **results}, size))
        for key in written.keys() - batch.keys():  # the state of a recurrent policy, ("next", …)
            batch.set(key, written[key])
        return batch

    def collect(self, batch: TensorDictBase) -> TensorDictBase:
        """Fill ``batch``, made by ``buffer`` (or a slice of such ones), and return it.

        Errors of the environment and the policy are raised unchanged, and the batch is then undefined. After an error
        of the environment, the next batch starts new episodes.
        """
        source, stepper = self._source, self.stepper
        columns = sources.Columns(batch, source.outputs, self._batched)
        policy_from = columns.steps  # step of this batch from which on the policy acts
        versions = np.full(columns.steps, NO_VERSION)
        if not stepper.is_reset:
            stepper.reset()
        with torch.no_grad(), self._acting:
            for t in range(columns.steps):
                if t < policy_from and self.policy is not None and self.frames >= self.init_random_frames:
                    policy_from = t
                    source.begin(range(t, columns.steps), after_random=self._ended_at_random or policy_from > 0)
                columns.observation[t] = stepper.observation
                action, versions[t] = (self._at_random if t < policy_from else source).act(columns, t)
                stepper.step(action)
                columns.write_result(t, stepper)
                self.frames += stepper.num_envs
                if stepper.reset_step is not None:
                    self.frames -= int(stepper.reset_step.sum())
                stepper.reset_ended()
            if policy_from < columns.steps:
                source.finish(columns, policy_from)
        self._ended_at_random = policy_from == columns.steps
        columns.version[:] = versions[:, None]
        return batch

    @cached_property
    def _source(self) -> ActionSource:
        """The source of actions; the policy is run once to make it."""
        policy: Any = self.policy
        if policy is None:
            return self._at_random
        if not self.stepper.is_reset:
            self.stepper.reset()
        common = (policy, self.stepper, self._batched, self._device, self._version)
        with torch.no_grad(), self._acting:
            in_parts = acts_in_parts(policy)
            return sources.PolicyInParts(*common) if in_parts else sources.CalledPolicy(*common, self._gate)


def seed_generators(seed: int) -> None:
    """Seed this process's global generators: those of torch, of numpy and of Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


class Actor:
    """Acts with a policy and records the version that acted in each frame.

    It is also the context of a worker's schemes; model ids are ``"policy"``, ``"env.value_net"``, or a path in the
    policy (``"critic"``) or in the environment (``"transform[0].module"``).
    """

    def __init__(
        self,
        env: Any,
        policy: Any,
        scheme: wsync.WeightSyncScheme | None,
        *,
        device: torch.device | str | None,
        **limits: Any,
    ) -> None:
        self.env = env
        module = policy if isinstance(policy, nn.Module) else None
        self.policy = policy if module is None or device is None else module.to(device)
        if scheme is not None:  # the gate makes weights and version match
            limits |= {"version": lambda: scheme.installed_version, "gate": partial(wsync.gated, model=module)}
        self.rollout = Rollout(env, self.policy, device=device, **limits)

    def get_model(self, model_id: str) -> nn.Module:
        """Return the model called ``model_id`` in this worker."""
        return find_in(self._roots, model_id, wsync.find_model)

    def find(self, path: str) -> Any:
        """Return the object at ``path``, which begins as a model id does; raise LookupError if there is none."""
        return find_in(self._roots, path, wsync.find_object)

    @property
    def _roots(self) -> Mapping[str, object]:
        models = SimpleNamespace(policy=self.policy, env=self.env)  # "policy" and "env.…" are model ids
        return {"the collector": models, "its policy": self.policy, "its environment": self.env}


def policy_scheme(schemes: Mapping[str, wsync.WeightSyncScheme]) -> wsync.WeightSyncScheme | None:
    """Return the scheme with ``policy_version`` as its version: the policy's, or else the first that sends weights."""
    carrying = {name: scheme for name, scheme in schemes.items() if scheme.sends_weights}
    return carrying.get("policy") or next(iter(carrying.values()), None)


def find_in(roots: Mapping[str, object], path: str, find: Callable[[object, str], Any]) -> Any:
    """Return ``find(root, path)`` of the first of ``roots``, by name, that has ``path``."""
    misses: dict[str, wsync.NoSuchPath] = {}
    for name, root in roots.items():
        if root is not None:
            try:
                return find(root, path)
            except wsync.NoSuchPath as miss:
                misses[name] = miss
    furthest = max(len(miss.reached) for miss in misses.values())
    said = [f"in {name}, {miss.lacking}" for name, miss in misses.items() if len(miss.reached) == furthest]
    raise LookupError(f"no '{path}' in this collector: {'; '.join(said).replace('the context', 'it')}")
