"""The older API's ready-made weight updaters: each is a way to call one kind of scheme."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from numbers import Integral
from typing import Any, ClassVar

from torch import nn

import wsync
from collectors.updaters import UpdatedCollector, WeightUpdaterBase

_TENSORDICT = wsync.WeightStrategy("tensordict")


class ReadyMade(WeightUpdaterBase):
    """An updater for one kind of collector: a way to call its scheme.

    Args:
        source: says which weights are pushed when none are given; None: the collector's policy's.
        num_workers: how many there have to be; None: as many as the collector has.
    """

    carriers: ClassVar[frozenset[str]]  # the names of schemes

    def __init__(self, source: Callable[[], Any] | None = None, num_workers: int | None = None) -> None:
        self._source, self._num_workers = source, num_workers

    def register_collector(self, collector: UpdatedCollector) -> None:
        """See WeightUpdaterBase.

        Raises:
            RuntimeError: it is another's already.
            ValueError: the collector's scheme is of another kind, or it has another number of workers.
        """
        name, model_id = type(self).__name__, collector.default_model_id
        scheme = collector.weight_sync_schemes.get(model_id)
        if scheme is None or scheme.name not in self.carriers:
            there = "none at all" if scheme is None else f"a {type(scheme).__name__}"
            raise ValueError(
                f"weight_updater and weight_sync_schemes contradict each other: {name} updates workers by "
                f"{' or '.join(sorted(self.carriers))}, and the scheme of '{model_id}' is {there}; "
                "leave weight_updater out, and that scheme does it"
            )
        if self._num_workers not in (None, collector.num_workers):
            raise ValueError(f"{name} is for {self._num_workers} worker(s); the collector has {collector.num_workers}")
        super().register_collector(collector)

    def all_worker_ids(self) -> Sequence[int] | None:
        """Every worker's index."""
        return range(self._registered().num_workers)

    def _get_server_weights(self) -> Any:
        return super()._get_server_weights() if self._source is None else self._source()


class VanillaWeightUpdater(ReadyMade):
    """Deprecated. Updates the policy that acts in a collector; with any scheme that carries something.

    Args:
        weight_getter: says which weights are pushed when none are given; None: the collector's policy's.
        policy_weights: further weights (a TensorDict), updated in place with what was delivered.
    """

    carriers = frozenset({"shared_mem", "multiprocess", "distributed", "rpc", "ray"})

    def __init__(self, *, weight_getter: Callable[[], Any] | None = None, policy_weights: Any = None) -> None:
        super().__init__(weight_getter)
        self.policy_weights = policy_weights

    @classmethod
    def from_policy(cls, policy: Any) -> WeightUpdaterBase | None:
        """One that pushes the weights of ``policy``; None if it has none."""
        return cls(weight_getter=lambda: policy) if isinstance(policy, nn.Module) else None

    def _deliver(self, outbox: Mapping[int, Any], *, wait: bool = True) -> None:
        super()._deliver(outbox, wait=wait)
        if self.policy_weights is not None:
            _TENSORDICT.apply_weights(self.policy_weights, next(iter(outbox.values())))


class MultiProcessedWeightUpdater(ReadyMade):
    """Deprecated. Updates the workers of a collector with processes on this machine.

    Args:
        get_server_weights: says which weights are pushed when none are given; None: the collector's policy's.
        policy_weights: ``{device or worker: weights}``, updated in place with what was delivered (to that worker).
    """

    carriers = frozenset({"shared_mem", "multiprocess"})

    def __init__(
        self, *, get_server_weights: Callable[[], Any] | None = None, policy_weights: Mapping[Any, Any] | None = None
    ) -> None:
        super().__init__(get_server_weights)
        self.policy_weights = dict(policy_weights or {})

    def _deliver(self, outbox: Mapping[int, Any], *, wait: bool = True) -> None:
        super()._deliver(outbox, wait=wait)
        for key, weights in self.policy_weights.items():
            if key in outbox or not isinstance(key, Integral):
                _TENSORDICT.apply_weights(weights, outbox.get(key, next(iter(outbox.values()))))


class RayWeightUpdater(ReadyMade):
    """Deprecated. Updates the workers of a ``RayCollector``; not each time, if that is wanted.

    Args:
        policy_weights: pushed when none are given, as they are then; None: the collector's policy's.
        remote_collectors: one for each worker; only their number is looked at.
        max_interval: so many pushes leave a worker out between two that update it.
    """

    carriers = frozenset({"ray", "distributed"})

    def __init__(
        self, policy_weights: Any = None, remote_collectors: Sized | None = None, max_interval: int = 0
    ) -> None:
        if max_interval < 0:
            raise ValueError(f"max_interval is at least 0, not {max_interval}")
        super().__init__(given(policy_weights), None if remote_collectors is None else len(remote_collectors))
        self.max_interval = max_interval
        self._left_out: Counter[int | None] = Counter()

    def _skip_update(self, worker_id: int | None) -> bool:
        skip = self._left_out[worker_id] < self.max_interval
        self._left_out[worker_id] = self._left_out[worker_id] + 1 if skip else 0
        return skip


def given(weights: Any) -> Callable[[], Any] | None:
    """A source of ``weights``, if there are any."""
    return None if weights is None else lambda: weights
