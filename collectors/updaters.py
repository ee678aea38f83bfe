"""The older API's weight updaters: hooks that decide which weights go to whom; the collector's schemes carry them."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

from torch import nn

import wsync

_TENSORDICT = wsync.WeightStrategy("tensordict")


class UpdatedCollector(Protocol):
    """What an updater asks of the collector that it is registered with."""

    num_workers: int
    weight_sync_schemes: dict[str, wsync.WeightSyncScheme]

    @property
    def default_model_id(self) -> str:
        """The model that the updater is for."""
        ...

    def get_model(self, model_id: str) -> nn.Module:
        """The trainer's model."""
        ...

    def send_weights(
        self, weights: Any = None, worker_ids: Any = None, *, model_id: str | None = None, wait: bool = True
    ) -> None:
        """Deliver, without asking the updater."""
        ...


class WeightUpdaterBase:
    """Deprecated. Decides which weights go to which worker when a collector's policy is updated.

    Override any of ``_get_server_weights``, ``_maybe_map_weights``, ``all_worker_ids``, ``_skip_update`` and
    ``_sync_weights_with_worker``, and call the last one's ``super()`` to deliver. What one push delivers travels as one
    update: one version, one wait, and one error that names whoever lacks it.
    """

    _collector: weakref.ref[Any] | None
    _outbox: dict[int, Any] | None  # what the push under way has for each worker
    post_hooks: list[Callable[[], object]]

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Warn; here, because a subclass need not call ``super().__init__()``."""
        warnings.warn(
            f"{cls.__name__} is of the older API: leave weight_updater out, and let the collector's "
            "weight_sync_schemes={'policy': scheme} carry the weights",
            DeprecationWarning,
            stacklevel=_level_of_caller(),
        )
        self = super().__new__(cls)
        self._collector, self._outbox, self.post_hooks = None, None, []
        return self

    @classmethod
    def from_policy(cls, policy: Any) -> WeightUpdaterBase | None:
        """An updater made for ``policy``, where a collector is given the class; None: its constructor makes it."""
        return None

    def register_collector(self, collector: UpdatedCollector) -> None:
        """Be the updater of ``collector``, which calls this itself, before its workers begin.

        Raises:
            RuntimeError: it is another's already.
            ValueError: the collector's scheme contradicts having an updater.
        """
        if self._collector is not None and self._collector() not in (None, collector):
            raise RuntimeError(f"this {type(self).__name__} is another collector's already: make one for each")
        model_id = collector.default_model_id
        if isinstance(collector.weight_sync_schemes.get(model_id), wsync.NoWeightSyncScheme):
            raise ValueError(
                f"{type(self).__name__} and the NoWeightSyncScheme of '{model_id}' contradict each other: that scheme "
                "carries nothing; leave one of weight_updater and weight_sync_schemes out"
            )
        self._collector = weakref.ref(collector)

    def register_post_hook(self, hook: Callable[[], object]) -> None:
        """Have ``hook`` called after every push, in the order of registration."""
        self.post_hooks.append(hook)

    @property
    def collector(self) -> Any:
        """The collector; None if there is none (any more)."""
        return None if self._collector is None else self._collector()

    def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """As ``push_weights``."""
        self.push_weights(policy_or_weights, worker_ids)

    def update_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """The oldest name of ``push_weights``, and what the collector calls."""
        self.push_weights(policy_or_weights, worker_ids)

    def push_weights(self, policy_or_weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Update workers, then call the post-hooks.

        Args:
            policy_or_weights: a module, a TensorDict or a state dict; None: what ``_get_server_weights`` says.
            worker_ids: one, several, or (None) those of ``all_worker_ids``.

        Raises:
            RuntimeError: no collector; or called by one of its own hooks.
            ValueError: there are no weights, or an unknown worker.
            wsync.WeightSyncError: as ``WeightSyncScheme.send``.
        """
        self._push_weights(policy_or_weights=policy_or_weights, worker_ids=worker_ids)
        for hook in self.post_hooks:
            hook()

    def _push_weights(self, *, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        if self._outbox is not None:
            which = f"a hook of {type(self).__name__} has started another update"
            raise RuntimeError(f"{which}: deliver by super()._sync_weights_with_worker(worker_id=…, server_weights=…)")
        source = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        if source is None:
            raise ValueError(f"{type(self).__name__} has no weights to push, and was given none")
        weights = self._maybe_map_weights(_TENSORDICT.extract_weights(source))
        workers = wsync.worker_list(self.all_worker_ids() if worker_ids is None else worker_ids)
        if worker_ids is not None and not workers:
            raise ValueError("worker_ids is empty: name at least one worker, or None for all")
        self._outbox = {}
        try:
            for worker in workers:
                if not self._skip_update(worker):
                    self._sync_weights_with_worker(worker_id=worker, server_weights=weights)
            outbox = self._outbox
        finally:
            self._outbox = None
        if outbox:
            self._deliver(outbox)

    def _get_server_weights(self) -> Any:
        """Hook: the weights, where a push brings none. By default the collector's own policy's, as they are now."""
        collector = self._registered()
        return _TENSORDICT.extract_weights(collector.get_model(collector.default_model_id))

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        """Hook: what is to be sent instead of ``server_weights``, a TensorDict. By default just that."""
        return server_weights

    def all_worker_ids(self) -> Sequence[int] | None:
        """Hook: the workers that are updated when nobody says which. None, the default: all, as one."""
        return None

    def _skip_update(self, worker_id: int | None) -> bool:
        """Hook: whether this push leaves a worker (None: all, as one) out. By default it does not."""
        return False

    def _sync_weights_with_worker(self, *, worker_id: int | None = None, server_weights: Any) -> None:
        """Hook: update one worker (None: all). By default ``server_weights`` are delivered to it, as this push ends."""
        collector = self._registered()
        outbox = {} if self._outbox is None else self._outbox
        outbox.update(dict.fromkeys(range(collector.num_workers) if worker_id is None else [worker_id], server_weights))
        if self._outbox is None:  # called by itself
            self._deliver(outbox)

    def _deliver(self, outbox: Mapping[int, Any], *, wait: bool = True) -> None:
        collector = self._registered()
        workers = wsync.worker_list(outbox, collector.num_workers)
        everyone = len(workers) == collector.num_workers  # whoever is away is to have it, too
        first = next(iter(outbox.values()))
        alike = all(weights is first for weights in outbox.values())
        weights = first if alike else dict(zip(workers, outbox.values(), strict=True))
        collector.send_weights(weights, None if everyone else workers, wait=wait)

    def _registered(self) -> UpdatedCollector:
        collector = self.collector
        if collector is None:
            raise RuntimeError(f"this {type(self).__name__} has no collector: give it to one, as weight_updater")
        return collector


def _level_of_caller() -> int:
    """The stack level, for a warning of this function's caller, of the first frame outside this package."""
    package = __name__.partition(".")[0]
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    return level
