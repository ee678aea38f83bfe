"""Shared memory: weights are written once for all workers; the workers' models bind to them without a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Unpack

from tensordict import TensorDictBase

from wsync.paths import CollectorContext
from wsync.registry import SchemeOptions
from wsync.scheme import WeightSyncScheme
from wsync.transport import SchemeTransport
from wsync.weights.source import DeviceMap, Source, repointing
from wsync.weights.strategy import Format


class SharedMemWeightSyncScheme(WeightSyncScheme):
    """Weight synchronization through shared memory, for workers on the trainer's machine.

    Args:
        policy_weights: ``{model_id: TensorDict}``, registered as by ``register_shared_weights``. A string here is the
            ``strategy``, and ``sync`` follows: the order of the other schemes.
        auto_register: whether the first weights that are sent define the shared buffers. Otherwise weights have to be
            registered before ``init_on_sender``: without them, ``connect`` and ``send`` raise ``NotConnected``.
        per_worker_weights: whether each worker has slots of its own; for workers that are given different weights.
        acknowledge: when a ``send`` is finished: ``"installed"``, when every worker's model has the weights;
            ``"published"``, when every forward that starts from then on will use them: a worker installs them on its
            way into a forward, or in ``receive``. Not for workers that pass updates on. None: published for
            the workers of a collector (a ``context`` that has any), else installed.
        strategy, sync, options: as in ``WeightSyncScheme``.
    """

    name = "shared_mem"
    arena = True
    binds = True

    def __init__(
        self,
        policy_weights: Mapping[str, TensorDictBase] | str | None = None,
        strategy: Format = "tensordict",
        auto_register: bool = True,
        sync: bool = True,
        per_worker_weights: bool = False,
        *,
        acknowledge: Literal["installed", "published"] | None = None,
        **options: Unpack[SchemeOptions],
    ) -> None:
        if acknowledge not in (None, "installed", "published"):
            raise ValueError(f"acknowledge is 'installed' or 'published', not {acknowledge!r}")
        if isinstance(policy_weights, str):  # the newest documents' order: strategy, sync
            sync, strategy, policy_weights = strategy if isinstance(strategy, bool) else sync, policy_weights, None  # type: ignore
        super().__init__(strategy, sync, **options)
        self.auto_register = auto_register
        self.per_worker_weights = per_worker_weights
        self.acknowledge, self._published = acknowledge, acknowledge == "published"
        for model_id, weights in (policy_weights or {}).items():
            self.register_shared_weights(model_id, weights)

    def register_shared_weights(self, model_id: str, weights: TensorDictBase) -> None:
        """Make ``weights`` what ``send()`` sends of ``model_id``, if the sender has no model of its own.

        After each ``send`` their tensors lie in the memory that the workers were given, and what refers to their former
        memory does not.

        Raises:
            RuntimeError: the model has buffers already, or the scheme is initialised already.
            TypeError: ``weights`` are not a TensorDict.
            ValueError: ``initiator="receiver"``: a worker would see them change before it pulls.
        """
        if self.initiator == "receiver":
            raise ValueError(f"with initiator='receiver' workers pull: they cannot share the weights of '{model_id}'")
        if not isinstance(weights, TensorDictBase):
            raise TypeError(f"shared weights are a TensorDict, not a {type(weights).__name__}")
        if model_id in self._registered:
            raise RuntimeError(f"'{model_id}' has its buffers already: register them once")
        if self.model_id is not None:
            raise RuntimeError(f"this scheme is initialised already: register '{model_id}' before init_on_sender()")
        self._registered[model_id] = weights

    def init_on_sender(
        self,
        model_id: str = "policy",
        context: Any = None,
        *,
        cached_weights: TensorDictBase | None = None,
        **given: Any,
    ) -> None:
        """``cached_weights``, also of the context, is the older API's way to ``register_shared_weights``."""
        cached_weights = getattr(context, "cached_weights", None) if cached_weights is None else cached_weights
        if cached_weights is not None and self._registered.get(model_id) is not cached_weights:
            self.register_shared_weights(model_id, cached_weights)
        if self.acknowledge is None:
            self._published = isinstance(context, CollectorContext) and bool(context.remote_workers)
        super().init_on_sender(model_id, context, **given)
        registered = self._registered.get(model_id)
        if registered is not None and not self.per_worker_weights:
            self.sender.on_published = repointing(registered)

    def make_source(self, model_id: str, weights: object, device_map_fn: DeviceMap | None, **options: Any) -> Source:
        registered = self._registered.get(model_id)
        if not self.auto_register and registered is None:
            options["undefined"] = (
                f"'{model_id}' has no shared buffers, and auto_register is off: call "
                f"register_shared_weights('{model_id}', weights) before init_on_sender()"
            )
        weights = registered if weights is None else weights
        return super().make_source(model_id, weights, device_map_fn, own_buffers=self.per_worker_weights, **options)

    @property
    def weights(self) -> Any:
        """This end's weights, live; on a sender that was given none, those that it has published for all workers."""
        own = super().weights
        published = SchemeTransport(self).unique_weights if own is None and self.is_sender else []
        return self.strategy.extract_weights(published[0]) if len(published) == 1 else own

    @property
    def acknowledges(self) -> bool:
        return not self._published and super().acknowledges
