"""Passing an installed update on: a worker whose context has workers of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn

from wsync.gate import process_gate
from wsync.types import CascadingContext, UpdatableContext
from wsync.weights.strategy import WeightStrategy

Call = tuple[tuple[object, ...], dict[str, object]]


def cascade_of(
    context: object, model_id: str, model: nn.Module, strategy: WeightStrategy
) -> Callable[[], object] | None:
    """Return what passes an update of ``model`` on to the workers of ``context``; None if it has no such method.

    ``cascade_weights`` is preferred. ``update_policy_weights_`` is called with a copy of the weights, of one version,
    in the strategy's format, and ``model_id=``; or with as many of these as it takes.

    Raises:
        TypeError: ``update_policy_weights_`` takes neither these arguments nor none.
    """
    if isinstance(context, CascadingContext):
        return lambda: context.cascade_weights(model_id)
    if not isinstance(context, UpdatableContext):
        return None
    update: Callable[..., object] = context.update_policy_weights_
    signature = inspect.signature(update)
    forms: list[Callable[[object], Call]] = [
        lambda weights: ((weights,), {"model_id": model_id}),
        lambda weights: ((), {"weights": weights, "model_id": model_id}),
        lambda weights: ((weights,), {}),
        lambda _: ((), {}),
    ]
    form = next((form for form in forms if _binds(signature, form(None))), None)
    if form is None:
        raise TypeError(
            f"an update of '{model_id}' cannot be passed on to {type(context).__name__}: "
            f"update_policy_weights_{signature} takes neither (weights, model_id=…) nor (weights) nor nothing"
        )

    def cascade() -> None:
        arguments, keywords = form(process_gate().call(_copied, strategy.extract_weights, model))
        update(*arguments, **keywords)

    return cascade


def _binds(signature: inspect.Signature, call: Call) -> bool:
    arguments, keywords = call
    try:
        signature.bind(*arguments, **keywords)
    except TypeError:
        return False
    return True


def _copied(extract: Callable[[nn.Module], Any], model: nn.Module) -> Any:
    weights = extract(model)
    if isinstance(weights, TensorDictBase):
        return weights.clone()
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in weights.items()}
