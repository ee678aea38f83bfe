"""The older API's weight updaters: hooks that choose which weights each worker gets; the collector's schemes send."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import nn

import wsync
from collectors.exploration import level_of_caller

if TYPE_CHECKING:
    from collectors.base import BaseCollector

_TENSORDICT = wsync.WeightStrategy("tensordict")


class WeightUpdaterBase:
    """Deprecated. Chooses which weights go to which worker when a collector's policy is updated.

    Override any of the methods marked as hooks; ``super()._sync_weights_with_worker(…)`` delivers. What one push
    delivers is one update: one version, one wait, and one error that names all workers without it.
    """

    backends: ClassVar[Sequence[str]] = ()  # names of the schemes that it is for; empty: all that carry weights
    post_hooks: list[Callable[[], object]]
    _collector: weakref.ref[Any] | None
    _outboxes: dict[int, dict[int, Any]]  # by thread with a push in progress: the weights of each worker
    _num_workers: int | None = None
    _source: Callable[[], Any] | None = None  # of a push without weights

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Warn; here, because a subclass need not call ``super().__init__()``."""
        warnings.warn(
            f"{cls.__name__} is of the older API: leave weight_updater out, and let the collector's "
            "weight_sync_schemes={'policy': scheme} carry the weights",
            DeprecationWarning,
            stacklevel=level_of_caller(),
        )
        self = super().__new__(cls)
        self._collector, self._outboxes, self.post_hooks = None, {}, []
        return self

    @classmethod
    def from_policy(cls, policy: Any) -> WeightUpdaterBase | None:
        """Return an updater for ``policy``; None: it is made by the constructor. Called for a class as argument."""
        return None

    def register_collector(self, collector: BaseCollector) -> None:
        """Become the updater of ``collector``. Called once, by the collector, before its workers start.

        Raises:
            RuntimeError: the updater belongs to another collector.
            ValueError: it is for other schemes, or another number of workers, than the collector has.
        """
        name, model_id = type(self).__name__, collector.default_model_id
        if self.collector not in (None, collector):
            raise RuntimeError(f"this {name} is another collector's already: make one for each")
        scheme = collector.weight_sync_schemes.get(model_id)
        if self.backends and (scheme is None or scheme.name not in self.backends):
            there = "none at all" if scheme is None else f"a {type(scheme).__name__}"
            raise ValueError(
                f"weight_updater and weight_sync_schemes contradict each other: {name} updates workers by "
                f"{' or '.join(self.backends)}, and the scheme of '{model_id}' is {there}; "
                "leave weight_updater out, and that scheme does it"
            )
        if isinstance(scheme, wsync.NoWeightSyncScheme):
            raise ValueError(
                f"{name} and the NoWeightSyncScheme of '{model_id}' contradict each other: that scheme carries "
                "nothing; leave one of weight_updater and weight_sync_schemes out"
            )
        if self._num_workers not in (None, collector.num_workers):
            raise ValueError(f"{name} is for {self._num_workers} worker(s); the collector has {collector.num_workers}")
        self._collector = weakref.ref(collector)

    def register_post_hook(self, hook: Callable[[], object]) -> None:
        """Call ``hook`` after every push, in the order of registration."""
        self.post_hooks.append(hook)

    @property
    def collector(self) -> Any:
        """The collector, if there is one."""
        return None if self._collector is None else self._collector()

    def __call__(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Call ``push_weights``."""
        self.push_weights(policy_or_weights, worker_ids)

    def update_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Call ``push_weights``: the oldest name of it, which the collector calls."""
        self.push_weights(policy_or_weights, worker_ids)

    def push_weights(self, policy_or_weights: Any = None, worker_ids: int | Sequence[int] | None = None) -> None:
        """Update workers, then call the post-hooks.

        Args:
            policy_or_weights: a module, a TensorDict or a state dict; None: the result of ``_get_server_weights``.
            worker_ids: one, several, or (None) those of ``all_worker_ids``.

        Raises:
            RuntimeError: there is no collector; or one of the updater's hooks has called this.
            ValueError: there are no weights, or a worker is unknown.
            wsync.WeightSyncError: as ``WeightSyncScheme.send``.
        """
        thread = threading.get_ident()
        if thread in self._outboxes:
            which = f"a hook of {type(self).__name__} has started another update"
            raise RuntimeError(f"{which}: deliver by super()._sync_weights_with_worker(worker_id=…, server_weights=…)")
        source = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        if source is None:
            raise ValueError(f"{type(self).__name__} has no weights to push, and was given none")
        weights = self._maybe_map_weights(_TENSORDICT.extract_weights(source))
        workers = wsync.worker_list(self.all_worker_ids() if worker_ids is None else worker_ids)
        if worker_ids is not None and not workers:
            raise ValueError("worker_ids is empty: name at least one worker, or None for all")
        outbox = self._outboxes[thread] = {}
        try:
            for worker in workers:
                if not self._skip_update(worker):
                    self._sync_weights_with_worker(worker_id=worker, server_weights=weights)
        finally:
            del self._outboxes[thread]
        if outbox:
            self._deliver(outbox)
        for hook in self.post_hooks:
            hook()

    def _get_server_weights(self) -> Any:
        """Hook: return the weights of a push without any; by default the current ones of the collector's policy."""
        if self._source is not None:
            return self._source()
        collector = self._registered()
        return _TENSORDICT.extract_weights(collector.get_model(collector.default_model_id))

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        """Hook: return the weights to send instead of ``server_weights``, a TensorDict; by default the same."""
        return server_weights

    def all_worker_ids(self) -> Sequence[int] | None:
        """Hook: return the workers of a push without ``worker_ids``. None, the default: all, as one."""
        return range(self._registered().num_workers) if self.backends else None

    def _skip_update(self, worker_id: int | None) -> bool:
        """Hook: return whether this push leaves out a worker (None: all, as one); by default False."""
        return False

    def _sync_weights_with_worker(self, *, worker_id: int | None = None, server_weights: Any) -> None:
        """Hook: update one worker (None: all); by default ``server_weights`` are delivered at the end of this push."""
        everyone = range(self._registered().num_workers)
        weights = dict.fromkeys(everyone if worker_id is None else [worker_id], server_weights)
        outbox = self._outboxes.get(threading.get_ident())
        if outbox is None:  # called outside a push
            self._deliver(weights)
        else:
            outbox.update(weights)

    def _deliver(self, outbox: Mapping[int, Any], *, wait: bool = True) -> None:
        collector = self._registered()
        workers = wsync.worker_list(outbox, collector.num_workers)
        first = next(iter(outbox.values()))
        alike = all(weights is first for weights in outbox.values())
        weights = first if alike else dict(zip(workers, outbox.values(), strict=True))
        collector.send_weights(weights, workers, wait=wait)

    def _registered(self) -> BaseCollector:
        collector = self.collector
        if collector is None:
            raise RuntimeError(f"this {type(self).__name__} has no collector: give it to one, as weight_updater")
        return collector


def make_updater(weight_updater: Any, collector: BaseCollector, policy: Any) -> WeightUpdaterBase:
    """Return the updater that a collector was given, or that the given factory makes, registered with the collector.

    Raises:
        TypeError: it is no updater.
        RuntimeError, ValueError: as ``register_collector``.
    """
    updater = weight_updater
    if isinstance(weight_updater, type) and issubclass(weight_updater, WeightUpdaterBase):
        updater = weight_updater.from_policy(policy) or weight_updater()
    elif not isinstance(weight_updater, WeightUpdaterBase) and callable(weight_updater):
        updater = weight_updater()
    if not isinstance(updater, WeightUpdaterBase):
        raise TypeError(f"weight_updater is a WeightUpdaterBase or makes one, and this is a {type(updater).__name__}")
    updater.register_collector(collector)
    return updater


def _constant(weights: Any) -> Callable[[], Any] | None:
    return None if weights is None else lambda: weights


class VanillaWeightUpdater(WeightUpdaterBase):
    """Deprecated. Updates the policy that acts in a collector, by any scheme that carries weights.

    Args:
        weight_getter: returns the weights of a push without any; None: those of the collector's policy.
        policy_weights: a TensorDict that is updated in place with what a push has delivered.
    """

    backends = ("distributed", "multiprocess", "ray", "rpc", "shared_mem")

    def __init__(self, *, weight_getter: Callable[[], Any] | None = None, policy_weights: Any = None) -> None:
        self._source, self.policy_weights = weight_getter, policy_weights

    @classmethod
    def from_policy(cls, policy: Any) -> WeightUpdaterBase | None:
        """Return an updater that pushes the weights of ``policy``; None if it has none."""
        return cls(weight_getter=lambda: policy) if isinstance(policy, nn.Module) else None

    def _deliver(self, outbox: Mapping[int, Any], *, wait: bool = True) -> None:
        super()._deliver(outbox, wait=wait)
        if self.policy_weights is not None:
            _TENSORDICT.apply_weights(self.policy_weights, next(iter(outbox.values())))


class MultiProcessedWeightUpdater(WeightUpdaterBase):
    """Deprecated. Updates the workers of a collector with processes on this machine.

    Args:
        get_server_weights: returns the weights of a push without any; None: those of the collector's policy.
        policy_weights: ``{device or worker: weights}``, updated in place with what a push has delivered (to that
            worker).
    """

    backends = ("multiprocess", "shared_mem")

    def __init__(
        self, *, get_server_weights: Callable[[], Any] | None = None, policy_weights: Mapping[Any, Any] | None = None
    ) -> None:
        self._source, self.policy_weights = get_server_weights, dict(policy_weights or {})

    def _deliver(self, outbox: Mapping[int, Any], *, wait: bool = True) -> None:
        super()._deliver(outbox, wait=wait)
        for key, weights in self.policy_weights.items():
            if key in outbox or not isinstance(key, Integral):
                _TENSORDICT.apply_weights(weights, outbox.get(key, next(iter(outbox.values()))))


class RPCWeightUpdater(WeightUpdaterBase):
    """Deprecated. Updates the workers of an ``RPCCollector``.

    ``policy_weights`` are those of a push without any (None: those of the collector's policy); ``num_workers``, or the
    length of ``collector_infos`` or ``collector_rrefs``, has to be the collector's number of workers.
    """

    backends = ("distributed", "rpc")

    def __init__(
        self,
        collector_infos: Sized | None = None,
        collector_class: Any = None,
        collector_rrefs: Sized | None = None,
        policy_weights: Any = None,
        num_workers: int | None = None,
    ) -> None:
        self._source, self._num_workers = _constant(policy_weights), num_workers
        for given in (collector_infos, collector_rrefs):
            self._num_workers = self._num_workers if given is None else len(given)


class DistributedWeightUpdater(WeightUpdaterBase):
    """Deprecated. Updates the workers of a ``DistributedCollector``.

    ``store`` is not used: the scheme has its own rendezvous. ``policy_weights`` are those of a push without any (None:
    those of the collector's policy), and ``sync`` says whether a push waits for the workers' acknowledgements.
    """

    backends = ("distributed",)

    def __init__(
        self, store: Any = None, policy_weights: Any = None, num_workers: int | None = None, sync: bool = True
    ) -> None:
        self._source, self._num_workers, self.sync = _constant(policy_weights), num_workers, sync

    def _deliver(self, outbox: Mapping[int, Any], *, wait: bool = True) -> None:
        super()._deliver(outbox, wait=wait and self.sync)


class RayWeightUpdater(WeightUpdaterBase):
    """Deprecated. Updates the workers of a ``RayCollector``, each time or only after some pushes.

    ``policy_weights`` are those of a push without any (None: those of the collector's policy); of
    ``remote_collectors`` only the number is used. ``max_interval``: pushes that leave a worker out between two updates.
    """

    backends = ("distributed", "ray")

    def __init__(
        self, policy_weights: Any = None, remote_collectors: Sized | None = None, max_interval: int = 0
    ) -> None:
        if max_interval < 0:
            raise ValueError(f"max_interval is at least 0, not {max_interval}")
        self._source, self.max_interval = _constant(policy_weights), max_interval
        self._num_workers = None if remote_collectors is None else len(remote_collectors)
        self._skipped: Counter[int | None] = Counter()

    def _skip_update(self, worker_id: int | None) -> bool:
        skip = self._skipped[worker_id] < self.max_interval
        self._skipped[worker_id] = self._skipped[worker_id] + 1 if skip else 0
        return skip
