"""What all collectors have in common: iteration, and the count of frames; ``updating.py`` says how they are updated."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from itertools import chain
from numbers import Integral
from types import SimpleNamespace
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from torch import nn

import wsync
from collectors.rollouts.acting import find_in
from collectors.updating import UpdaterOrFactory, Updating, appoint
from collectors.workers.recovery import Failures


class BaseCollector(Updating):
    """Gathers experience in batches, with copies of a policy that are updated on demand.

    Iterate over it; update it with ``update_policy_weights_``; use it as a context manager, or ``shutdown`` it.

    Attributes:
        frames: so many were delivered: counted when a batch reaches the caller.
        failures: of workers, and what was done about them.
        num_workers: how many act.
    """

    num_workers: int = 1

    def __init__(
        self,
        policy: Any,
        *,
        frames_per_batch: int,
        total_frames: int,
        storing_device: torch.device | str | None,
        weight_sync_schemes: Mapping[str, wsync.WeightSyncScheme] | None,
        track_policy_version: bool,
        weight_updater: UpdaterOrFactory | None = None,
    ) -> None:
        for name, number in (("frames_per_batch", frames_per_batch), ("total_frames", total_frames)):
            if not isinstance(number, Integral):
                raise TypeError(f"{name} is a whole number, not {number!r}")
        if frames_per_batch < 1:
            raise ValueError(f"frames_per_batch is at least 1, not {frames_per_batch}")
        if total_frames != -1 and total_frames < 1:
            raise ValueError(f"total_frames is at least 1, or -1 for no end, not {total_frames}")
        if not isinstance(weight_sync_schemes, Mapping | None):
            what = type(weight_sync_schemes).__name__
            raise TypeError(f"weight_sync_schemes is {{model_id: scheme}}, {{'policy': …}} for instance, not a {what}")
        for model_id, scheme in (weight_sync_schemes or {}).items():
            if not isinstance(scheme, wsync.WeightSyncScheme):
                what = scheme if isinstance(scheme, type | str) else type(scheme)
                raise TypeError(f"the scheme for '{model_id}' is a WeightSyncScheme, not {what!r}")
        if weight_sync_schemes is None and isinstance(policy, nn.Module) and _has_weights(policy):
            weight_sync_schemes = {"policy": self._default_scheme()}
        self.policy = policy
        self.frames_per_batch = frames_per_batch
        self.total_frames = total_frames
        self.storing_device = storing_device
        torch.empty(0, device=storing_device)  # raises now, if there is no such device
        self.weight_sync_schemes = dict(weight_sync_schemes or {})
        self.track_policy_version = track_policy_version
        self.frames = 0
        self.closed = False
        self.failures = Failures()
        self.weight_updater = None if weight_updater is None else appoint(weight_updater, self, policy)

    def _default_scheme(self) -> wsync.WeightSyncScheme:
        """What carries the policy if nobody says."""
        return wsync.SharedMemWeightSyncScheme(acknowledge="published")

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Batches, until ``total_frames`` have been gathered."""
        return self

    def __next__(self) -> TensorDictBase:
        """The next batch."""
        if self.closed:
            raise RuntimeError("this collector has been shut down")
        if self.total_frames != -1 and self.frames >= self.total_frames:
            raise StopIteration
        batch = self._gather()
        self.frames += batch.numel()
        if not self.track_policy_version:
            batch = batch.exclude("policy_version")
        return batch if self.storing_device is None else batch.to(self.storing_device)

    @abstractmethod
    def _gather(self) -> TensorDictBase:
        """One batch, in memory that nobody writes again."""

    @abstractmethod
    def interrupt(self) -> None:
        """Do not wait much longer for the batch under way; harmless in a signal handler."""

    def get_model(self, model_id: str) -> nn.Module:
        """The trainer's model called ``model_id``: ``"policy"``, or a path below the policy.

        Raises:
            LookupError: only the workers have it (or nobody).
        """
        if self.policy is None:
            raise LookupError(f"no '{model_id}' here: this collector was given no policy")
        return find_in(SimpleNamespace(policy=self.policy), self.policy, model_id)

    def cascade_weights(self, model_id: str) -> None:
        """Pass on to whoever acts an update that this collector's own model has just been given by a scheme above."""
        self.update_policy_weights_(model_id=model_id)

    @abstractmethod
    def set_seed(self, seed: int) -> int:
        """Make what follows reproducible: environment ``i`` of all gets ``seed + i``. Returns the next free seed."""

    def state_dict(self) -> dict[str, Any]:
        """The counters; environments have no state that can be saved, so episodes begin anew."""
        return {"frames": self.frames}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on counting where ``state_dict`` was taken; random frames that were had then are not had again."""
        self.frames = int(state_dict["frames"])

    def shutdown(self) -> None:
        """End workers, schemes and environments. Harmless when repeated."""
        if not self.closed:
            self.closed = True
            self._close()

    @abstractmethod
    def _close(self) -> None:
        """End everything."""

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(self, *_: object) -> None:
        """Shut down."""
        self.shutdown()


def _has_weights(policy: nn.Module) -> bool:
    """Whether there is something to carry; a rule wrapped in a module (``TensorDictModule(rule, …)``) has nothing."""
    return next(chain(policy.parameters(), policy.buffers()), None) is not None
