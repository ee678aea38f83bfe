"""Every way of updating the weights that workers act with, once for all collectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensordict import TensorDictBase
from torch import nn

import wsync
from collectors.updaters import UpdatedCollector, WeightUpdaterBase

Send = Callable[[Any, Any], object]
"""``(weights, worker_ids)``: weights of one model, or ``{scheme: weights}`` of several; the rest as for ``send``."""

Deliver = Callable[[Send, Any, int | Sequence[int] | None], None]
"""``(send, weights, worker_ids)``: calls ``send``, as often as it takes."""

UpdaterOrFactory = WeightUpdaterBase | Callable[[], WeightUpdaterBase]


class Updating(ABC):
    """What can be updated: models, each with a scheme; and, in the older API, an updater for the first of them.

    Attributes:
        weight_sync_schemes: ``{model_id: scheme}``.
        weight_updater: of the older API; decides who gets which of the policy's weights, if there is one.
        closed: whether it was shut down.
    """

    weight_sync_schemes: dict[str, wsync.WeightSyncScheme]
    weight_updater: WeightUpdaterBase | None
    closed: bool
    _deliver_in_spite: Deliver | None = None  # of failures, where they are borne

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
            TypeError: weights, or a ``weights_dict``, that are none.
            KeyError: a model without a scheme; names those that have one.
            wsync.NotConnected: the collector has been shut down.
            wsync.WeightSyncError: as ``WeightSyncScheme.send``.
        """
        if self.closed:
            raise _shut_down()
        source = policy_or_weights
        if policy is not None or weights is not None:
            source = _the_one({"the positional argument": policy_or_weights, "policy": policy, "weights": weights})
        if weights_dict is not None:
            if source is not None or model_id is not None:
                raise ValueError("weights_dict says it all: give no policy, weights or model_id with it")
            self._update_together(weights_dict, worker_ids)
        elif self.weight_updater is not None and model_id in (None, self.default_model_id):
            self.weight_updater.update_weights(source, worker_ids)
        else:
            scheme = self.weight_sync_schemes.get(model_id or "policy") or self._scheme(model_id)
            try:  # as ``_deliver``: one call less is a tenth of an update between batches
                if self._deliver_in_spite is None:
                    scheme.send(source, worker_ids)
                else:
                    self._deliver_in_spite(scheme.send, source, worker_ids)
            except wsync.WeightSyncError as error:
                self._look_into(error)
                raise

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
            wsync.NotConnected: the collector has been shut down.
            wsync.WeightSyncError: as ``WeightSyncScheme.send``.
        """
        if self.closed:
            raise _shut_down()
        scheme = self._scheme(model_id)
        self._deliver(scheme.send if wait else scheme.send_async, weights, worker_ids)

    def _deliver(self, send: Send, weights: Any, worker_ids: int | Sequence[int] | None) -> None:
        """Call ``send(weights, worker_ids)``; again, for those who are left, where a worker may fail."""
        try:
            if self._deliver_in_spite is None:
                send(weights, worker_ids)
            else:
                self._deliver_in_spite(send, weights, worker_ids)
        except wsync.WeightSyncError as error:
            self._look_into(error)
            raise

    @abstractmethod
    def _look_into(self, error: wsync.WeightSyncError) -> None:
        """An update has failed, with ``error``; who has caught it raises it next: from here it would make a circle.

        Raises:
            WeightSyncError: what was its cause, if that says more.
        """

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
        scheme = self.weight_sync_schemes.get(model_id or "policy")
        if scheme is None and model_id is None and len(self.weight_sync_schemes) == 1:
            scheme = next(iter(self.weight_sync_schemes.values()))
        if scheme is None:
            known = ", ".join(self.weight_sync_schemes) or "none at all"
            raise KeyError(f"no weight sync scheme for model '{model_id or self.default_model_id}'; there are: {known}")
        return scheme

    @property
    def default_model_id(self) -> str:
        """Whose weights are meant where nobody says."""
        if "policy" in self.weight_sync_schemes or len(self.weight_sync_schemes) != 1:
            return "policy"
        return next(iter(self.weight_sync_schemes))


def appoint(given: UpdaterOrFactory, collector: UpdatedCollector, policy: Any) -> WeightUpdaterBase:
    """Register the updater that a collector was ``given``, or that the given factory makes.

    Raises:
        TypeError: it is none.
        RuntimeError, ValueError: as ``WeightUpdaterBase.register_collector``.
    """
    updater: Any = given
    if isinstance(given, type) and issubclass(given, WeightUpdaterBase):
        updater = given.from_policy(policy) or given()
    elif not isinstance(given, WeightUpdaterBase) and callable(given):
        updater = given()
    if not isinstance(updater, WeightUpdaterBase):
        raise TypeError(f"weight_updater is a WeightUpdaterBase or makes one, and this is a {type(updater).__name__}")
    updater.register_collector(collector)
    return updater


def _shut_down() -> wsync.NotConnected:
    return wsync.NotConnected("this collector has been shut down: there is nobody to update")


def _the_one(forms: Mapping[str, Any]) -> Any:
    """The only one that was given.

    Raises:
        ValueError: there are several; names them.
    """
    given = {name: source for name, source in forms.items() if source is not None}
    if len(given) > 1:
        raise ValueError(f"weights were given more than once: {' and '.join(given)}")
    return next(iter(given.values()))
