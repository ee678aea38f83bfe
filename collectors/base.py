"""The interface of all collectors: iteration over batches, and updates of the weights that act."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from numbers import Integral
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from torch import nn

import wsync
from collectors.rollouts.acting import TrainedModels, find_in
from collectors.updaters import WeightUpdaterBase, make_updater
from collectors.workers.records import Failures

UpdaterOrFactory = WeightUpdaterBase | Callable[[], WeightUpdaterBase]


class BaseCollector(ABC):
    """Collects batches of experience with copies of a policy, which are updated on demand.

    Iterate over it for batches, update it by ``update_policy_weights_``, and end it by ``shutdown`` or as a context
    manager.

    Attributes:
        frames: frames of the batches that were returned so far.
        failures: how often workers have failed, and what was done.
        num_workers: number of workers.
        weight_sync_schemes: ``{model_id: scheme}``.
        weight_updater: of the older API; decides which weights the policy's update sends to which worker.
        closed: whether the collector was shut down.
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
        _check_frames(frames_per_batch, total_frames)
        _check_schemes(weight_sync_schemes)
        if weight_sync_schemes is None and isinstance(policy, nn.Module) and _has_weights(policy):
            weight_sync_schemes = {"policy": self._default_scheme()}
        self.policy = policy
        self.frames_per_batch = frames_per_batch
        self.total_frames = total_frames
        self.storing_device = storing_device
        torch.empty(0, device=storing_device)  # raises now if there is no such device
        self.weight_sync_schemes = dict(weight_sync_schemes or {})
        self.track_policy_version = track_policy_version
        self.frames = 0
        self.closed = False
        self.failures = Failures()
        self.weight_updater = None if weight_updater is None else make_updater(weight_updater, self, policy)

    def _default_scheme(self) -> wsync.WeightSyncScheme:
        """Return the policy's scheme for a collector that was given no schemes."""
        return wsync.SharedMemWeightSyncScheme(acknowledge="published")

    # --- batches ---

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Return batches, until ``total_frames`` were collected."""
        return self

    def __next__(self) -> TensorDictBase:
        """Return the next batch."""
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
        """Return one batch, in memory that is not written to again. Called by ``__next__``."""

    @abstractmethod
    def interrupt(self) -> None:
        """Limit the wait for the batch in progress. May be called from a signal handler."""

    @abstractmethod
    def set_seed(self, seed: int) -> int:
        """Seed the environments: environment ``i`` of all gets ``seed + i``. Returns the next free seed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the counters. The state of environments cannot be saved: episodes begin anew."""
        return {"frames": self.frames}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue to count where ``state_dict`` was taken; its random frames are not repeated."""
        self.frames = int(state_dict["frames"])

    # --- weights ---

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        /,
        *,
        policy: nn.Module | None = None,
        weights: Any = None,
        model_id: str | None = None,
        worker_ids: int | Sequence[int] | None = None,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> None:
        """Deliver weights to the workers; every frame that is begun afterwards is acted with them.

        Args:
            policy_or_weights: a module, a TensorDict or a state dict; with no weights at all, the registered policy's.
            policy: a module.
            weights: a TensorDict or a state dict.
            model_id: the model; by default ``"policy"``, or the model of the only scheme.
            worker_ids: one, several, or (None) all workers.
            weights_dict: ``{model_id: weights}`` of several models: all or nothing, on every worker.

        Raises:
            ValueError: arguments contradict each other, or a worker is unknown.
            TypeError: the weights, or ``weights_dict``, have no known form.
            KeyError: the model has no scheme; names the models that have one.
            wsync.NotConnected: the collector was shut down.
            wsync.WeightSyncError: as ``WeightSyncScheme.send``.
        """
        if self.closed:
            raise _shut_down()
        source = policy_or_weights
        if policy is not None or weights is not None:
            source = _the_one({"the positional argument": policy_or_weights, "policy": policy, "weights": weights})
        if weights_dict is not None:
            if source is not None or model_id is not None:
                raise ValueError("weights_dict cannot be combined with policy, weights or model_id")
            self._update_together(weights_dict, worker_ids)
        elif self.weight_updater is not None and model_id in (None, self.default_model_id):
            self.weight_updater.update_weights(source, worker_ids)
        else:
            self._deliver(self._scheme(model_id).send, source, worker_ids)

    def send_weights(
        self,
        weights: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        *,
        model_id: str | None = None,
        wait: bool = True,
    ) -> None:
        """Deliver weights as ``update_policy_weights_`` does, without the ``weight_updater``, which calls this method.

        Args:
            weights: as for ``WeightSyncScheme.send``.
            worker_ids: one, several, or (None) all workers.
            model_id: the model; by default ``"policy"``, or the model of the only scheme.
            wait: whether to wait for the acknowledgements.

        Raises:
            KeyError: the model has no scheme; names the models that have one.
            wsync.NotConnected: the collector was shut down.
            wsync.WeightSyncError: as ``WeightSyncScheme.send``.
        """
        if self.closed:
            raise _shut_down()
        scheme = self._scheme(model_id)
        self._deliver(scheme.send if wait else scheme.send_async, weights, worker_ids)

    def _deliver(
        self, send: Callable[[Any, Any], object], weights: Any, worker_ids: int | Sequence[int] | None
    ) -> None:
        """Call ``send(weights, worker_ids)``; overridden where a worker may fail."""
        send(weights, worker_ids)

    def _update_together(self, weights_dict: Mapping[str, Any], worker_ids: int | Sequence[int] | None) -> None:
        if not isinstance(weights_dict, Mapping) or isinstance(weights_dict, TensorDictBase):
            raise TypeError(f"weights_dict is {{model_id: weights}}, not a {type(weights_dict).__name__}")
        if not weights_dict:
            raise ValueError("weights_dict is empty")
        if self.weight_updater is not None and self.default_model_id in weights_dict:
            raise ValueError(
                f"the weights of '{self.default_model_id}' go by way of weight_updater, one model at a time: "
                "leave that out to update several at once"
            )
        schemes = {self._scheme(model_id): weights for model_id, weights in weights_dict.items()}
        self._deliver(wsync.synchronize, schemes, worker_ids)

    def _scheme(self, model_id: str | None) -> wsync.WeightSyncScheme:
        schemes = self.weight_sync_schemes
        scheme = schemes.get(model_id or "policy")
        if scheme is None and model_id is None:
            scheme = schemes.get(self.default_model_id)
        if scheme is None:
            known = ", ".join(schemes) or "none at all"
            raise KeyError(f"no weight sync scheme for model '{model_id or self.default_model_id}'; there are: {known}")
        return scheme

    @property
    def default_model_id(self) -> str:
        """The model that calls without ``model_id`` refer to: ``"policy"``, or the model of the only scheme."""
        if "policy" in self.weight_sync_schemes or len(self.weight_sync_schemes) != 1:
            return "policy"
        return next(iter(self.weight_sync_schemes))

    def get_model(self, model_id: str) -> nn.Module:
        """Return the trainer's model ``model_id``: ``"policy"``, or a path inside the policy.

        Raises:
            LookupError: the trainer has no such model.
        """
        if self.policy is None:
            raise LookupError(f"no '{model_id}' here: this collector was given no policy")
        return find_in({"the trainer": TrainedModels(self.policy), "its policy": self.policy}, model_id, wsync.find_model)

    def cascade_weights(self, model_id: str) -> None:
        """Deliver to the workers an update of this collector's own model, which a scheme above has installed."""
        self.update_policy_weights_(model_id=model_id)

    # --- end ---

    def shutdown(self) -> None:
        """End workers, schemes and environments. Idempotent."""
        if not self.closed:
            self.closed = True
            self._close()

    @abstractmethod
    def _close(self) -> None:
        """End everything. Called once, by ``shutdown``."""

    def __enter__(self) -> Self:
        """Return the collector."""
        return self

    def __exit__(self, *_: object) -> None:
        """Shut down."""
        self.shutdown()


def _check_frames(frames_per_batch: Any, total_frames: Any) -> None:
    for name, number in (("frames_per_batch", frames_per_batch), ("total_frames", total_frames)):
        if not isinstance(number, Integral):
            raise TypeError(f"{name} is a whole number, not {number!r}")
    if frames_per_batch < 1:
        raise ValueError(f"frames_per_batch is at least 1, not {frames_per_batch}")
    if total_frames != -1 and total_frames < 1:
        raise ValueError(f"total_frames is at least 1, or -1 for no end, not {total_frames}")


def _check_schemes(schemes: Any) -> None:
    if not isinstance(schemes, Mapping | None):
        what = type(schemes).__name__
        raise TypeError(f"weight_sync_schemes is {{model_id: scheme}}, {{'policy': …}} for instance, not a {what}")
    for model_id, scheme in (schemes or {}).items():
        if not isinstance(scheme, wsync.WeightSyncScheme):
            what = scheme if isinstance(scheme, type | str) else type(scheme)
            raise TypeError(f"the scheme for '{model_id}' is a WeightSyncScheme, not {what!r}")


def _has_weights(policy: nn.Module) -> bool:
    """Whether the policy has parameters or buffers; ``TensorDictModule(function, …)`` has none."""
    return next(chain(policy.parameters(), policy.buffers()), None) is not None


def _shut_down() -> wsync.NotConnected:
    return wsync.NotConnected("this collector has been shut down: it has no workers to update")


def _the_one(forms: Mapping[str, Any]) -> Any:
    """Return the only value that is not None.

    Raises:
        ValueError: there are several; names them.
    """
    given = {name: source for name, source in forms.items() if source is not None}
    if len(given) > 1:
        raise ValueError(f"weights were given more than once: {' and '.join(given)}")
    return next(iter(given.values()))
