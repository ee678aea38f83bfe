"""Updates of the weights that act: what a collector does with them, whatever its workers are."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from tensordict import TensorDict
from torch import nn

import wsync
from collectors import arguments
from collectors.rollouts.acting import find_in, policy_scheme
from collectors.updaters import WeightUpdaterBase

T = TypeVar("T")


class _Versions(NamedTuple):
    """The newest version that was sent, and the newest number that was used, also by an update that failed."""

    sent: int = 0
    used: int = 0


class WeightUpdates:
    """The part of a collector that delivers weights to its workers; ``BaseCollector`` documents the attributes."""

    num_workers: int = 1
    policy: Any
    closed: bool
    weight_sync_schemes: dict[str, wsync.WeightSyncScheme]
    weight_updater: WeightUpdaterBase | None
    _worker_schemes: dict[str, wsync.WeightSyncScheme]  # of models in workers; not of hosted ones
    _last_versions = _Versions()  # ``_versions`` before the shutdown
    _process: int  # that has made the collector

    @property
    def policy_version(self) -> int:
        """The newest version of the policy that was sent to the workers; 0 if it has no scheme that carries weights.

        Without a scheme for ``"policy"``, it is the version of the first scheme that sends weights to the workers.
        """
        return self._versions.sent

    @property
    def _versions(self) -> _Versions:
        scheme = policy_scheme(self._worker_schemes)
        return self._last_versions if self.closed or scheme is None else _Versions(scheme.sent_version, scheme.version)

    def _require_open(self) -> None:
        """Check that this process may use the workers.

        Raises:
            NotConnected: the collector was shut down; or this is a forked child of the process that has made it.
        """
        if os.getpid() != self._process:
            raise wsync.NotConnected(
                "this process is a forked child, and its parent has made this collector: make one of its own here"
            )
        if self.closed:
            raise wsync.NotConnected("this collector has been shut down")

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
            What the update cost; with ``weights_dict``, ``{model_id: report}``. None if nothing was carried
            (``NoWeightSyncScheme``) or waited for (``sync=False``), if a ``weight_updater`` has delivered it, or if a
            worker failed meanwhile and the others have the update (``on_worker_failure``).

        Raises:
            ValueError: arguments contradict each other, or a worker is unknown.
            TypeError: the weights, or ``weights_dict``, have no known form.
            KeyError: the model has no scheme; names the models that have one.
            wsync.NotConnected: the collector was shut down; or this is a forked child of the process that has made it.
            wsync.WeightSyncError: as ``WeightSyncScheme.send``.
        """
        source = policy_or_weights
        if policy is not None or weights is not None:
            forms = {"the positional argument": policy_or_weights, "policy": policy, "weights": weights}
            given = [name for name, form in forms.items() if form is not None]
            if len(given) > 1:
                raise ValueError(f"weights were given more than once: {' and '.join(given)}")
            source = forms[given[0]]
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
        self,
        weights: Any = None,
        worker_ids: int | Sequence[int] | None = None,
        *,
        model_id: str | None = None,
        wait: bool = True,
    ) -> wsync.SyncReport | None:
        """Deliver weights as ``update_policy_weights_`` does, without the ``weight_updater``, which calls this method.

        Args:
            weights: as for ``WeightSyncScheme.send``.
            worker_ids: one, several, or (None) all workers.
            model_id: the model; by default ``"policy"``, or the model of the only scheme.
            wait: whether to wait for the acknowledgements.

        Returns:
            As ``update_policy_weights_``; None without ``wait``.

        Raises:
            KeyError: the model has no scheme; names the models that have one.
            wsync.NotConnected: as ``update_policy_weights_``.
            wsync.WeightSyncError: as ``WeightSyncScheme.send``.
        """
        if self.closed:  # called only to raise: its ``getpid`` costs 1 µs, and in a forked child ``send`` raises
            self._require_open()
        scheme = self.weight_sync_schemes.get(model_id or "policy") or self._scheme(model_id)
        send = scheme.send if wait else scheme.send_async
        if scheme.sender_driven:
            return send(weights, worker_ids)
        if worker_ids is not None or (weights is not None and wsync.per_worker(weights) is not None):
            worker_ids = arguments.addressed_workers([weights], worker_ids, self.num_workers)
        return self._deliver(send, weights, worker_ids)

    def _deliver(self, send: Callable[[Any, Any], T], weights: Any, worker_ids: int | Sequence[int] | None) -> T | None:
        """Return ``send(weights, worker_ids)``; overridden where a worker may fail."""
        return send(weights, worker_ids)

    def _update_together(
        self, weights_dict: Mapping[str, Any], worker_ids: int | Sequence[int] | None
    ) -> dict[str, wsync.SyncReport] | None:
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
            return wsync.synchronize(schemes, worker_ids) if all(hosted) else self._update_mixed(schemes, worker_ids)
        workers = arguments.addressed_workers(weights_dict.values(), worker_ids, self.num_workers)
        return self._deliver(wsync.synchronize, schemes, workers)

    def _update_mixed(
        self, schemes: Mapping[wsync.WeightSyncScheme, Any], worker_ids: object
    ) -> dict[str, wsync.SyncReport]:
        """Update models of workers and of actors outside them together.

        Raises:
            ValueError: with ``worker_ids``: an index would mean a worker and an actor.
        """
        if worker_ids is not None:
            raise ValueError("worker_ids would mean workers of one model, and actors of another: leave it out")
        return wsync.synchronize(schemes)

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
        return find_in(
            {"the trainer": SimpleNamespace(policy=self.policy), "its policy": self.policy}, model_id, wsync.find_model
        )

    def cascade_weights(self, model_id: str) -> None:
        """Deliver to all workers an update of this collector's own model, which another scheme has installed.

        This collector's process is a worker of that scheme's trainer.
        Not by way of a ``weight_updater``, which may leave workers out. A copy is sent: a thread that acts may install
        the next update meanwhile.
        """
        with wsync.gate():
            weights = wsync.WeightStrategy().extract_weights(self.get_model(model_id))
            weights = weights.clone() if isinstance(weights, TensorDict) else weights
        self.send_weights(weights, model_id=model_id)

    def _connect_hosted(self) -> None:
        """Initialise and connect the schemes of hosted models: modules in Ray actors that all environments call.

        Of ``{"env.transform[0].module": scheme}``, ``env.transform[0]`` is the path of a ``RayModuleTransform`` in the
        environments, and ``module`` that of the model in its actors.

        Raises:
            ValueError: a model id has no part before its last dot.
            LookupError, TypeError: there is no ``RayModuleTransform`` there.
        """
        for model_id, scheme in self.weight_sync_schemes.items():
            if not scheme.sender_driven:
                continue
            path, _, name = model_id.rpartition(".")
            if not path:
                kind = type(scheme).__name__
                raise ValueError(
                    f"'{model_id}' names no transform: a {kind} is for a path like \"env.transform[0].module\""
                )
            actors: list[Any] = []
            for user in self._find_all(path):
                if not hasattr(user, "actors"):
                    raise TypeError(
                        f"'{path}' is a {type(user).__name__}, with its model in the same process: this scheme is "
                        "for a RayModuleTransform; SharedMemWeightSyncScheme and the like are for models in workers"
                    )
                actors.extend(actor for actor in user.actors if actor not in actors)
            scheme.init_on_sender(name, context=SimpleNamespace(actors=actors))
            scheme.connect()

    def _find_all(self, path: str) -> list[Any]:
        """Return the objects at a path in all environments."""
        raise LookupError(path)
