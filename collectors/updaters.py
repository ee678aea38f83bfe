"""The older API's weight updaters: hooks that choose which weights each worker gets; the collector's schemes send."""

from __future__ import annotations

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import wsync
from collectors.errors import level_of_caller

if TYPE_CHECKING:
    from collectors.base import BaseCollector

_TENSORDICT = wsync.WeightStrategy("tensordict")


class WeightUpdaterBase:
    """Deprecated. Chooses which weights go to which worker when a collector's policy is updated.

    Override any of the methods marked as hooks; ``super()._sync_weights_with_worker(…)`` delivers. What one push
    delivers is one update: one version, one wait, and one error that names all workers without it. There is one push
    at a time.
    """

    post_hooks: list[Callable[[], object]]
    _collector: Callable[[], Any]
    _outbox: dict[int, Any] | None  # the weights of each worker, in a push
    _wait = True

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Warn; here, because a subclass need not call ``super().__init__()``."""
        warnings.warn(
            f"{cls.__name__} is of the older API: leave weight_updater out, and let the collector's "
            "weight_sync_schemes={'policy': scheme} carry the weights",
            DeprecationWarning,
            stacklevel=level_of_caller(),
        )
        self = super().__new__(cls)
        self._collector, self._outbox, self.post_hooks = lambda: None, None, []
        return self

    def register_collector(self, collector: BaseCollector) -> None:
        """Become the updater of ``collector``. Called once, by the collector, before its workers start.

        Raises:
            RuntimeError: the updater belongs to another collector.
            ValueError: the collector has no scheme that carries weights.
        """
        name, model_id = type(self).__name__, collector.default_model_id
        if self.collector not in (None, collector):
            raise RuntimeError(f"this {name} is another collector's already: make one for each")
        scheme = collector.weight_sync_schemes.get(model_id)
        if scheme is None or not scheme.sends_weights:
            there = "no scheme" if scheme is None else f"a {type(scheme).__name__}, which carries nothing"
            raise ValueError(
                f"weight_updater and weight_sync_schemes contradict each other: '{model_id}' has {there}; "
                "leave one of the two out"
            )
        self._collector = weakref.ref(collector)

    def register_post_hook(self, hook: Callable[[], object]) -> None:
        """Call ``hook`` after every push, in the order of registration."""
        self.post_hooks.append(hook)

    @property
    def collector(self) -> Any:
        """The collector, if there is one."""
        return self._collector()

    def push_weights(self, policy_or_weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Update workers, then call the post-hooks.

        Args:
            policy_or_weights: a module, a TensorDict or a state dict; None: the result of ``_get_server_weights``.
            worker_ids: one, several, or (None) those of ``all_worker_ids``.

        Raises:
            RuntimeError: there is no collector; or another push, of which this may be a hook, has not ended.
            ValueError: there are no weights, or a worker is unknown.
            wsync.WeightSyncError: as ``WeightSyncScheme.send``.
        """
        name = type(self).__name__
        if self.collector is None:
            raise RuntimeError(f"this {name} has no collector: give it to one, as weight_updater")
        if self._outbox is not None:
            how = "a hook delivers by super()._sync_weights_with_worker(worker_id=…, server_weights=…)"
            raise RuntimeError(f"another update of this {name} has not ended: {how}")
        source = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        if source is None:
            raise ValueError(f"{name} has no weights to push, and was given none")
        weights = self._maybe_map_weights(_TENSORDICT.extract_weights(source))
        workers = wsync.worker_list(self.all_worker_ids() if worker_ids is None else worker_ids)
        if not workers:
            raise ValueError("worker_ids is empty: name at least one worker, or None for all")
        self._outbox = outbox = {}
        try:
            for worker in workers:
                if not self._skip_update(worker):
                    self._sync_weights_with_worker(worker_id=worker, server_weights=weights)
        finally:
            self._outbox = None
        if outbox:
            self._deliver(outbox)
        for hook in self.post_hooks:
            hook()

    __call__ = update_weights = push_weights

    def _get_server_weights(self) -> Any:
        """Hook: return the weights of a push without any; by default the current ones of the collector's policy."""
        return self.collector.get_model(self.collector.default_model_id)

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        """Hook: return the weights to send instead of ``server_weights``, a TensorDict; by default the same."""
        return server_weights

    def all_worker_ids(self) -> Sequence[int]:
        """Hook: return the workers of a push without ``worker_ids``; by default all."""
        return range(self.collector.num_workers)

    def _skip_update(self, worker_id: int) -> bool:
        """Hook: return whether this push leaves out a worker; by default False."""
        return False

    def _sync_weights_with_worker(self, *, worker_id: int | None = None, server_weights: Any) -> None:
        """Hook: update one worker (None: all); by default ``server_weights`` are delivered at the end of this push."""
        everyone = range(self.collector.num_workers)
        weights = dict.fromkeys(everyone if worker_id is None else [worker_id], server_weights)
        if self._outbox is None:  # called outside a push
            self._deliver(weights)
        else:
            self._outbox.update(weights)

    def _deliver(self, outbox: dict[int, Any]) -> None:
        first = next(iter(outbox.values()))
        alike = all(weights is first for weights in outbox.values())
        self.collector.send_weights(first if alike else outbox, list(outbox), wait=self._wait)


def make_updater(weight_updater: Any, collector: BaseCollector) -> WeightUpdaterBase:
    """Return the updater that a collector was given, or that the given class or function makes; register it.

    Raises:
        TypeError: it is no updater.
        RuntimeError, ValueError: as ``register_collector``.
    """
    is_maker = callable(weight_updater) and not isinstance(weight_updater, WeightUpdaterBase)
    updater = weight_updater() if is_maker else weight_updater
    if not isinstance(updater, WeightUpdaterBase):
        raise TypeError(f"weight_updater is a WeightUpdaterBase or makes one, and this is a {type(updater).__name__}")
    updater.register_collector(collector)
    return updater


class VanillaWeightUpdater(WeightUpdaterBase):
    """Deprecated. Pushes what ``weight_getter`` returns, by default the weights of the collector's policy.

    ``policy_weights`` are not used: the collector's scheme knows where the workers' weights are.
    """

    def __init__(self, *, weight_getter: Callable[[], Any] | None = None, policy_weights: Any = None) -> None:
        self._source = weight_getter

    def _get_server_weights(self) -> Any:
        return super()._get_server_weights() if self._source is None else self._source()


class MultiProcessedWeightUpdater(VanillaWeightUpdater):
    """Deprecated. A ``VanillaWeightUpdater`` with another name of its argument."""

    def __init__(self, *, get_server_weights: Callable[[], Any] | None = None, policy_weights: Any = None) -> None:
        super().__init__(weight_getter=get_server_weights)


class _RemoteWeightUpdater(VanillaWeightUpdater):
    def __init__(self, policy_weights: Any) -> None:
        super().__init__(weight_getter=None if policy_weights is None else lambda: policy_weights)


class RPCWeightUpdater(_RemoteWeightUpdater):
    """Deprecated. Pushes ``policy_weights``, by default those of the collector's policy; the rest is not used."""

    def __init__(
        self,
        collector_infos: Any = None,
        collector_class: Any = None,
        collector_rrefs: Any = None,
        policy_weights: Any = None,
        num_workers: int | None = None,
    ) -> None:
        super().__init__(policy_weights)


class DistributedWeightUpdater(_RemoteWeightUpdater):
    """Deprecated. Pushes ``policy_weights``, by default those of the collector's policy.

    ``sync`` says whether a push waits for the workers' acknowledgements; the rest is not used.
    """

    def __init__(
        self, store: Any = None, policy_weights: Any = None, num_workers: int | None = None, sync: bool = True
    ) -> None:
        super().__init__(policy_weights)
        self._wait = sync


class RayWeightUpdater(_RemoteWeightUpdater):
    """Deprecated. Pushes ``policy_weights``, by default those of the collector's policy.

    ``max_interval``: pushes that leave a worker out between two updates. ``remote_collectors`` are not used.
    """

    def __init__(self, policy_weights: Any = None, remote_collectors: Any = None, max_interval: int = 0) -> None:
        super().__init__(policy_weights)
        if max_interval < 0:
            raise ValueError(f"max_interval is at least 0, not {max_interval}")
        self.max_interval = max_interval
        self._skipped: Counter[int] = Counter()

    def _skip_update(self, worker_id: int) -> bool:
        skip = self._skipped[worker_id] < self.max_interval
        self._skipped[worker_id] = self._skipped[worker_id] + 1 if skip else 0
        return skip
