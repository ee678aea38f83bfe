"""The interface of all collectors: iteration over batches, updates of the weights that act, counters, and the end."""

from __future__ import annotations

import copy
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter, Signature, signature
from types import SimpleNamespace
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

import wsync
from collectors import arguments
from collectors.batches import Staleness, check_count, frames_of
from collectors.rollouts.rollout import find_in, policy_scheme
from collectors.rollouts.sampled import check_policy
from collectors.updaters import WeightUpdaterBase, make_updater
from collectors.workers.records import Failures

T = TypeVar("T")
UpdaterOrFactory = WeightUpdaterBase | Callable[[], WeightUpdaterBase]
WorkerIds = int | Sequence[int] | None


class BaseCollector(ABC):
    """Collects batches of experience with copies of a policy: iterate over it, update it, and shut it down.

    Attributes:
        frames: environment steps in the batches that were returned so far; where a batch has a "mask", elements at
            which it is false are not counted (an environment was reset there).
        failures: how often workers have failed, and what was done.
        staleness: how old a batch may be, and what was dropped because it was older.
        num_workers: number of workers.
        weight_sync_schemes: ``{model_id: scheme}``.
        weight_updater: the older API's weight updater; it maps workers to the weights that they are sent.
        closed: whether the collector was shut down.
    """

    num_workers: int = 1
    __signature__: ClassVar[Signature]
    _last_versions = (0, 0)  # ``_versions`` before the shutdown

    def __init_subclass__(cls, **given: Any) -> None:
        """Show in ``help`` the arguments that ``**options`` of a collector of this package stands for."""
        super().__init_subclass__(**given)
        own = list(signature(cls.__init__).parameters.values())[1:]
        kinds = {one.kind for one in own}
        if Parameter.VAR_KEYWORD in kinds and Parameter.VAR_POSITIONAL not in kinds:
            own = [one for one in own if one.kind is not Parameter.VAR_KEYWORD]
            hidden = {"start", "sync", "staleness", *(one.name for one in own)}
            own += [one for name, one in signature(cls.__base__ or cls).parameters.items() if name not in hidden]
        cls.__signature__ = Signature(own)

    def __init__(
        self,
        policy: Any,
        *,
        policy_factory: Any = None,
        frames_per_batch: int,
        total_frames: int = -1,
        storing_device: torch.device | str | None = None,
        weight_sync_schemes: Mapping[str, wsync.WeightSyncScheme] | None = None,
        track_policy_version: bool = True,
        replay_buffer: Any = None,
        weight_updater: UpdaterOrFactory | None = None,
        staleness: Staleness,
    ) -> None:
        check_count("frames_per_batch", frames_per_batch, least=1)
        if total_frames != -1:
            check_count("total_frames", total_frames, least=1, otherwise=", or -1 for no end")
        arguments.check_schemes(weight_sync_schemes)
        check_policy(policy)
        if weight_sync_schemes is None and (arguments.has_weights(policy) or policy_factory is not None):
            weight_sync_schemes = {"policy": self._default_scheme()}
        self.policy = policy
        self.frames_per_batch, self.total_frames = frames_per_batch, total_frames
        self.storing_device = storing_device
        torch.empty(0, device=storing_device)  # raises now if there is no such device
        self.weight_sync_schemes = dict(weight_sync_schemes or {})
        # Those of models in workers; not of hosted ones.
        self._worker_schemes = {key: one for key, one in self.weight_sync_schemes.items() if not one.sender_driven}
        self.track_policy_version, self.replay_buffer = track_policy_version, replay_buffer
        self.frames = self._batches = 0
        self._seconds = 0.0  # spent in waiting for batches
        self.closed, self._process = False, os.getpid()
        self.failures, self.staleness = Failures(), staleness
        self.weight_updater = None if weight_updater is None else make_updater(weight_updater, self)

    def _default_scheme(self) -> wsync.WeightSyncScheme:
        """Return the policy's scheme for a collector that was given no schemes."""
        return wsync.SharedMemWeightSyncScheme()

    def _require_open(self) -> None:
        if os.getpid() != self._process:
            raise wsync.NotConnected(
                "this process is a forked child, and its parent has made this collector: make one of its own here"
            )
        if self.closed:
            raise wsync.NotConnected("this collector has been shut down")

    # --- batches ---

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._require_open()
        if self.total_frames != -1 and self.frames >= self.total_frames:
            raise StopIteration
        started = time.perf_counter()
        batch = self._gather()
        self._seconds += time.perf_counter() - started
        self.frames += frames_of(batch)
        self._batches += 1
        if (scheme := policy_scheme(self._worker_schemes)) is not None:
            scheme.metrics.observe(batch.get("policy_version"))
        if self.track_policy_version:
            batch.set(("next", "policy_version"), batch.get("policy_version").clone())
        else:
            batch = batch.exclude("policy_version")
        batch.names = [*[None] * (batch.ndim - 1), "time"]
        batch = batch if self.storing_device is None else batch.to(self.storing_device)
        if self.replay_buffer is None:
            return batch
        mask = batch.get("mask", None)
        self.replay_buffer.extend(batch.reshape(-1) if mask is None else batch[mask])
        return None

    def next(self) -> TensorDictBase | None:
        """Return the next batch; None when ``total_frames`` were collected."""
        return next(self, None)

    def stats(self) -> dict[str, Any]:
        """Return plain values for a log; ``seconds`` were spent in waiting for batches."""
        return {
            "frames": self.frames,
            "batches": self._batches,
            "seconds": self._seconds,
            "num_workers": self.num_workers,
            "policy_version": self.policy_version,
            "failures": self.failures.as_dict(),
            "staleness": self.staleness.as_dict(),
            "weight_sync": {name: scheme.metrics.summary() for name, scheme in self.weight_sync_schemes.items()},
        }

    @abstractmethod
    def _gather(self) -> TensorDictBase:
        """Return one batch, in memory that is not written to again; each worker's part is one that ``_admits``."""

    def _admits(self, batch: TensorDictBase, worker_idx: int) -> bool:
        """Return whether a worker's batch may be delivered now; count it as dropped if not."""
        return self.staleness.admits(batch, self.policy_version, worker_idx)

    @abstractmethod
    def interrupt(self) -> None:
        """Limit the wait for the batch in progress, or else for the next one. May be called from a signal handler."""

    def set_seed(self, seed: int) -> int:
        """Seed the environments, the random actions and the workers' global generators; return another seed to use.

        Environment ``i`` of all gets ``first + i``, where ``first`` is made of ``seed`` so that runs with neighbouring
        seeds share no random numbers. A restarted worker gets the next free numbers.

        Raises:
            TypeError, ValueError: the seed is not a whole number from 0 on.
        """
        check_count("seed", seed)
        self._require_open()
        first = int(np.random.SeedSequence(int(seed)).generate_state(1)[0] >> 1)
        return seed + self._seed_from(first) - first

    @abstractmethod
    def _seed_from(self, first: int) -> int:
        """Seed environment ``i`` of all with ``first + i``; return the next free number."""

    # --- updates ---

    @property
    def policy_version(self) -> int:
        """The newest version that was sent of the policy, or else of the first model with a scheme; 0 if none was."""
        return self._versions[0]

    @property
    def _versions(self) -> tuple[int, int]:
        """The newest version that was sent, and the newest number that was used, also by an update that failed."""
        scheme = policy_scheme(self._worker_schemes)
        return self._last_versions if self.closed or scheme is None else (scheme.sent_version, scheme.version)

    def update_policy_weights_(
        self,
        policy_or_weights: Any = None,
        /,
        *,
        policy: nn.Module | None = None,
        weights: Any = None,
        model_id: str | None = None,
        worker_ids: WorkerIds = None,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> Any:
        """Deliver weights to the workers; every frame that is begun afterwards is acted with them.

        Args:
            policy_or_weights: a module, a TensorDict or a state dict, or ``{worker: any of these}``; with no weights at
                all, the registered policy's.
            policy: a module.
            weights: a TensorDict or a state dict.
            model_id: the model; by default ``"policy"``, or the model of the only scheme.
            worker_ids: one, several, or (None) all workers, or those that ``{worker: weights}`` names. An update of
                some workers waits for those of them that are being restarted (``on_worker_failure``). Of a model in
                actors outside the workers (``RayModuleTransform``): the actors.
            weights_dict: ``{model_id: weights}`` of several models: all or nothing, on every worker.

        Returns:
            What the update cost, a ``SyncReport``; with ``weights_dict``, ``{model_id: report}``. None if nothing was
            carried (``NoWeightSyncScheme``) or waited for (``sync=False``), if a ``weight_updater`` has delivered it,
            or if a worker failed meanwhile and the others have the update (``on_worker_failure``).

        Raises:
            ValueError: arguments contradict each other, or a worker is unknown.
            TypeError: the weights, or ``weights_dict``, have no known form.
            KeyError: the model has no scheme; names the models that have one.
            wsync.NotConnected: the collector was shut down; or this is a forked child of the process that has made it.
            wsync.WeightSyncError: as ``WeightSyncScheme.send``.
        """
        forms = {"the positional argument": policy_or_weights, "policy": policy, "weights": weights}
        given = [name for name, form in forms.items() if form is not None]
        if len(given) > 1:
            raise ValueError(f"weights were given more than once: {' and '.join(given)}")
        source = forms[given[0]] if given else None
        if weights_dict is not None:
            if source is not None or model_id is not None:
                raise ValueError("weights_dict cannot be combined with policy, weights or model_id")
            return self._update_together(weights_dict, worker_ids)
        if self.weight_updater is not None and model_id in (None, self.default_model_id):
            self._require_open()
            self.weight_updater.update_weights(source, worker_ids)
            return None
        return self.send_weights(source, worker_ids, model_id=model_id)

    def send_weights(
        self, weights: Any = None, worker_ids: WorkerIds = None, *, model_id: str | None = None, wait: bool = True
    ) -> wsync.SyncReport | None:
        """Deliver weights as ``update_policy_weights_`` does, without the ``weight_updater``, which calls this method.

        Without ``wait``, nothing waits for the acknowledgements, and None is returned.
        """
        if self.closed:  # called only to raise: its ``getpid`` costs 1 µs, and in a forked child ``send`` raises
            self._require_open()
        scheme = self._scheme(model_id)
        send = scheme.send if wait else scheme.send_async
        if scheme.sender_driven:
            return send(weights, worker_ids)
        if worker_ids is not None or (weights is not None and wsync.per_worker(weights) is not None):
            worker_ids = arguments.addressed_workers([weights], worker_ids, self.num_workers)
        return self._deliver(send, weights, worker_ids)

    def _deliver(self, send: Callable[[Any, Any], T], weights: Any, worker_ids: WorkerIds) -> T | None:
        return send(weights, worker_ids)

    def _update_together(self, weights_dict: Mapping[str, Any], worker_ids: WorkerIds) -> Any:
        self._require_open()
        arguments.check_weights_dict(weights_dict)
        if self.weight_updater is not None and self.default_model_id in weights_dict:
            raise ValueError(
                f"the weights of '{self.default_model_id}' go by way of weight_updater, one model at a time: "
                "leave that out to update several at once"
            )
        schemes = {self._scheme(model_id): weights for model_id, weights in weights_dict.items()}
        hosted = [scheme.sender_driven for scheme in schemes]
        if any(hosted):
            if worker_ids is not None and not all(hosted):
                raise ValueError("worker_ids would mean workers of one model, and actors of another: leave it out")
            return wsync.synchronize(schemes, worker_ids)
        workers = arguments.addressed_workers(weights_dict.values(), worker_ids, self.num_workers)
        return self._deliver(wsync.synchronize, schemes, workers)

    def _scheme(self, model_id: str | None) -> wsync.WeightSyncScheme:
        name = model_id or self.default_model_id
        scheme = self.weight_sync_schemes.get(name)
        if scheme is None:
            known = ", ".join(self.weight_sync_schemes) or "none at all"
            raise KeyError(f"no weight sync scheme for model '{name}'; there are: {known}")
        return scheme

    @property
    def default_model_id(self) -> str:
        """The model that calls without ``model_id`` refer to: ``"policy"``, or the model of the only scheme."""
        if "policy" in self.weight_sync_schemes or len(self.weight_sync_schemes) != 1:
            return "policy"
        return next(iter(self.weight_sync_schemes))

    def get_model(self, model_id: str) -> nn.Module:
        """Return the trainer's model: ``"policy"``, or a path inside the policy; raise LookupError if there is none."""
        if self.policy is None:
            raise LookupError(f"no '{model_id}' here: this collector was given no policy")
        roots = {"the trainer": SimpleNamespace(policy=self.policy), "its policy": self.policy}
        return find_in(roots, model_id, wsync.find_model)

    def cascade_weights(self, model_id: str) -> None:
        """Deliver to all workers an update of this collector's own model, which another scheme has installed here."""
        with wsync.gate():  # a copy is sent: a thread that acts may install the next update meanwhile
            weights = wsync.WeightStrategy().extract_weights(self.get_model(model_id))
            weights = weights.clone() if isinstance(weights, TensorDict) else weights
        self.send_weights(weights, model_id=model_id)

    def _connect_hosted(self) -> None:
        """Initialise and connect the schemes of hosted models: ``{"env.transform[0].module": scheme}``.

        ``env.transform[0]`` is a ``RayModuleTransform`` of the environments, and ``module`` the model in its actors.
        """
        for model_id, scheme in self.weight_sync_schemes.items():
            if not scheme.sender_driven:
                continue
            path, _, name = model_id.rpartition(".")
            if not path:
                kind, example = type(scheme).__name__, '"env.transform[0].module"'
                raise ValueError(f"'{model_id}' names no transform: a {kind} is for a path like {example}")
            actors: list[Any] = []
            for user in self._find_all(path):
                if not hasattr(user, "actors"):  # its class needs Ray, which is optional
                    raise TypeError(
                        f"'{path}' is a {type(user).__name__}, with its model in the same process: this scheme is "
                        "for a RayModuleTransform; SharedMemWeightSyncScheme and the like are for models in workers"
                    )
                actors.extend(actor for actor in user.actors if actor not in actors)
            scheme.init_on_sender(name, context=SimpleNamespace(actors=actors))
            scheme.connect()

    @abstractmethod
    def _find_all(self, path: str) -> list[Any]:
        """Return the objects at a path in all environments; raise LookupError if there is none."""

    # --- state ---

    def state_dict(self) -> dict[str, Any]:
        """Return ``frames``, ``policy_version`` (the newest number that was used), and ``policy_state_dict``.

        The last one is a copy of the weights now, if the scheme for ``"policy"`` carries them and this process has the
        policy. The state of environments is not saved.
        """
        state: dict[str, Any] = {"frames": self.frames, "policy_version": self._versions[1]}
        policy = self._policy_with_scheme()
        if policy is not None:
            with wsync.gate():  # of one version, if it is the one that acts
                state["policy_state_dict"] = copy.deepcopy(policy.state_dict())
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue where ``state_dict`` was taken: its frames count, and its random frames are not repeated.

        The weights are loaded into the policy and sent to all workers, not by way of a ``weight_updater``. They get the
        saved version number, or the next free one if that was used; later updates count on from there. A state without
        weights has the current policy sent again if the saved number is larger than the newest number used. Only
        ``frames`` is required.

        Raises:
            KeyError, TypeError, ValueError: not a state, or there is no scheme to send its weights by; nothing changed.
            wsync.LayoutMismatch: the weights do not fit the policy; nothing changed, unless only workers have the
                policy: then the frames count, and only that update is missing.
            wsync.WeightSyncError: as ``update_policy_weights_``; only that update is then missing.
        """
        self._require_open()
        frames, version = int(state_dict["frames"]), int(state_dict.get("policy_version", 0))
        if frames < 0 or version < 0:
            raise ValueError(f"frames and policy_version are at least 0, not {frames} and {version}")
        weights, policy = state_dict.get("policy_state_dict"), self._policy_with_scheme()
        scheme, as_state_dict = policy_scheme(self._worker_schemes), wsync.WeightStrategy("state_dict")
        own = self._worker_schemes.get("policy")
        if weights is not None and (own is None or not own.sends_weights):
            raise ValueError("the state has weights of the policy, and there is no scheme to send them by")
        if weights is not None and policy is not None:  # refused before anything is changed, if they do not fit
            as_state_dict.apply_weights(copy.deepcopy(policy.state_dict()), weights)
        newer = scheme is not None and self.policy is not None and policy is not None and version > scheme.version
        resend = scheme is not None and (weights is not None or newer)
        if scheme is not None:
            scheme.continue_from(max(0, version - 1) if resend else version)
        if weights is not None and self.policy is not None:
            as_state_dict.apply_weights(self.policy, weights)
        self.frames = frames
        self._resume()
        if resend:
            self.send_weights(weights if self.policy is None else None, model_id="policy")

    def _policy_with_scheme(self) -> nn.Module | None:
        """Return the policy in this process, if the scheme for ``"policy"`` carries its weights; else None."""
        scheme = self._worker_schemes.get("policy")
        if scheme is None or not scheme.sends_weights:
            return None
        try:
            return self.get_model("policy")
        except LookupError:
            return None

    @abstractmethod
    def _resume(self) -> None:
        """Continue to count at ``frames`` in the workers as well. Called by ``load_state_dict``."""

    # --- end ---

    def shutdown(self) -> None:
        """End workers, schemes and environments (in a forked child nothing). Idempotent, also after an error."""
        if not self.closed:
            self._last_versions = max(self._last_versions, self._versions)
            self.closed = True
            try:
                if os.getpid() == self._process:
                    self._close()
            except BaseException:  # also Ctrl-C: another call has to end what is left
                self.closed = False
                raise

    @abstractmethod
    def _close(self) -> None:
        """End everything. Called by ``shutdown``; again, if it has raised."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
