"""What all collectors have in common: iteration, the count of frames, and every way of updating weights, once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self

import gymnasium
import torch
from tensordict import TensorDictBase
from torch import nn

import wsync
from collectors.envs import GymEnv
from collectors.recovery import Failures
from collectors.updaters import UpdaterOrFactory, WeightUpdaterBase, appoint

EnvMaker = Callable[[], Any]


class BaseCollector(ABC):
    """Gathers experience in batches, with copies of a policy that are updated on demand.

    Iterate over it; update it with ``update_policy_weights_``; use it as a context manager, or ``shutdown`` it.

    Attributes:
        frames: so many were delivered: counted when a batch reaches the caller.
        failures: of workers, and what was done about them.
        num_workers: how many act.
        weight_updater: of the older API; decides who gets which of the policy's weights, if there is one.
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
        if frames_per_batch < 1:
            raise ValueError(f"frames_per_batch is at least 1, not {frames_per_batch}")
        if total_frames != -1 and total_frames < 1:
            raise ValueError(f"total_frames is at least 1, or -1 for no end, not {total_frames}")
        for model_id, scheme in (weight_sync_schemes or {}).items():
            if not isinstance(scheme, wsync.WeightSyncScheme):
                what = scheme if isinstance(scheme, type | str) else type(scheme)
                raise TypeError(f"the scheme for '{model_id}' is a WeightSyncScheme, not {what!r}")
        if weight_sync_schemes is None and isinstance(policy, nn.Module):
            weight_sync_schemes = {"policy": self._default_scheme()}
        self.policy = policy
        self.frames_per_batch = frames_per_batch
        self.total_frames = total_frames
        self.storing_device = storing_device
        self.weight_sync_schemes = dict(weight_sync_schemes or {})
        self.track_policy_version = track_policy_version
        self.frames = 0
        self.closed = False
        self.failures = Failures()
        self.weight_updater: WeightUpdaterBase | None = None
        if weight_updater is not None:
            self.weight_updater = appoint(weight_updater, self, policy)

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
        """Deliver weights to the workers; every frame acted from then on is acted with them.

        Args:
            policy_or_weights: a module, a TensorDict or a state dict; nothing reads the registered policy.
            policy: a module.
            weights: a TensorDict or a state dict.
            model_id: whose weights; ``"policy"``, or the only scheme's model.
            worker_ids: one, several, or (None) all workers.
            weights_dict: ``{model_id: weights}`` of several models, all or nothing on every worker.

        Raises:
            ValueError: arguments that contradict one another, or an unknown worker.
            KeyError: a model without a scheme; names those that have one.
            wsync.WeightSyncError: as ``WeightSyncScheme.send``.
        """
        given = [source for source in (policy_or_weights, policy, weights) if source is not None]
        if weights_dict is not None:
            if given or model_id is not None:
                raise ValueError("weights_dict says it all: give no policy, weights or model_id with it")
            self._update_together(weights_dict, worker_ids)
            return
        if len(given) > 1:
            forms = {"the positional argument": policy_or_weights, "policy": policy, "weights": weights}
            names = " and ".join(name for name, value in forms.items() if value is not None)
            raise ValueError(f"weights were given more than once: {names}")
        source = given[0] if given else None
        if self.weight_updater is not None and model_id in (None, self.default_model_id):
            self.weight_updater.update_weights(source, worker_ids)
        else:
            self.send_weights(source, worker_ids, model_id=model_id)

    def send_weights(
        self,
        weights: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        *,
        model_id: str | None = None,
        wait: bool = True,
    ) -> None:
        """As ``update_policy_weights_``, but never by way of a ``weight_updater``: this is what an updater calls.

        Args:
            weights: as for ``WeightSyncScheme.send``.
            worker_ids: one, several, or (None) all workers.
            model_id: whose weights; ``"policy"``, or the only scheme's model.
            wait: whether to wait until the promise of ``send`` holds.

        Raises:
            KeyError: a model without a scheme; names those that have one.
            wsync.WeightSyncError: as ``WeightSyncScheme.send``.
        """
        scheme = self._scheme(self.default_model_id if model_id is None else model_id)
        send = scheme.send if wait else scheme.send_async
        self._deliver(lambda workers: send(_share(weights, workers, worker_ids), workers), worker_ids)

    def _deliver(self, send: Callable[[Any], object], worker_ids: int | Sequence[int] | None) -> None:
        """Send to all of ``worker_ids`` that there are."""
        send(worker_ids)

    @abstractmethod
    def interrupt(self) -> None:
        """Do not wait much longer for the batch under way; harmless in a signal handler."""

    def _update_together(self, weights_dict: Mapping[str, Any], worker_ids: int | Sequence[int] | None) -> None:
        if not weights_dict:
            raise ValueError("weights_dict is empty")
        if self.weight_updater is not None and self.default_model_id in weights_dict:
            raise ValueError(
                f"the weights of '{self.default_model_id}' go by way of weight_updater, one model at a time: "
                "leave that out to update several at once"
            )
        schemes = {self._scheme(model_id): weights for model_id, weights in weights_dict.items()}
        carried = {s: w for s, w in schemes.items() if not isinstance(s, wsync.NoWeightSyncScheme)}
        self._deliver(
            lambda workers: wsync.synchronize({s: _share(w, workers, worker_ids) for s, w in carried.items()}, workers),
            worker_ids,
        )

    def _scheme(self, model_id: str) -> wsync.WeightSyncScheme:
        if model_id not in self.weight_sync_schemes:
            known = ", ".join(self.weight_sync_schemes) or "none at all"
            raise KeyError(f"no weight sync scheme for model '{model_id}'; there are: {known}")
        return self.weight_sync_schemes[model_id]

    @property
    def default_model_id(self) -> str:
        """Whose weights are meant where nobody says."""
        if "policy" in self.weight_sync_schemes or len(self.weight_sync_schemes) != 1:
            return "policy"
        return next(iter(self.weight_sync_schemes))

    def get_model(self, model_id: str) -> nn.Module:
        """The trainer's model called ``model_id``: ``"policy"``, or a path below the policy.

        Raises:
            LookupError: only the workers have it (or nobody).
        """
        if self.policy is None:
            raise LookupError(f"no '{model_id}' here: this collector was given no policy")
        return find_in(SimpleNamespace(policy=self.policy), self.policy, model_id)

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


def _share(source: Any, workers: Any, asked: Any) -> Any:
    """Of weights per worker, those of the ``workers`` that there are, where others were ``asked`` for."""
    per_worker = isinstance(source, dict) and source and all(isinstance(key, int) for key in source)
    if workers is asked or not per_worker:
        return source
    return {worker: source[worker] for worker in workers if worker in source}


def find_in(context: object, policy: object, model_id: str) -> nn.Module:
    """The model that ``model_id`` names in a context, or else inside the policy (``"actor"``).

    Raises:
        LookupError: in neither.
    """
    try:
        return wsync.find_model(context, model_id)
    except LookupError as error:
        if not isinstance(policy, nn.Module):
            raise
        try:
            return wsync.find_model(policy, model_id)
        except LookupError:
            raise error from None  # it says how far the path leads in an environment


def make_env(create_env_fn: EnvMaker | GymEnv) -> Any:
    """The environment that ``create_env_fn`` makes (a Gymnasium one is wrapped).

    Raises:
        TypeError: it is not an environment.
    """
    env = create_env_fn if isinstance(create_env_fn, GymEnv) else create_env_fn()
    if isinstance(env, gymnasium.Env | gymnasium.vector.VectorEnv):
        return GymEnv(env)
    if not isinstance(env, GymEnv):
        raise TypeError(f"create_env_fn made a {type(env).__name__}, not a GymEnv or a Gymnasium environment")
    return env
