"""Passing an installed update on, where the context of a worker has workers of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor

from wsync.gate import process_gate
from wsync.weights.strategy import WeightStrategy

Call = tuple[tuple[object, ...], dict[str, object]]


def pass_on_of(context: object, model_id: str, model: object, strategy: WeightStrategy) -> Callable[[], object] | None:
    """Return what passes an update of ``model`` on to the workers of ``context``; None if that has no such method.

    ``cascade_weights(model_id)`` is preferred. Otherwise ``update_policy_weights_`` is called in the first of these
    forms that it accepts: ``(weights, model_id=model_id)``, ``(weights=weights, model_id=model_id)``, ``(weights)``,
    or without arguments. The weights are a copy, of one version, in the strategy's format.

    Args:
        context: the context of the worker.
        model_id: the model's name.
        model: a module or a mapping of tensors, from which the copy is made; None with ``load=`` alone.
        strategy: the format.

    Raises:
        TypeError: ``update_policy_weights_`` accepts none of the forms.
        ValueError: it needs weights, and there is no model to copy them from.
    """
    cascade: Callable[[str], object] | None = getattr(context, "cascade_weights", None)
    if cascade is not None:
        return lambda: cascade(model_id)
    update: Callable[..., object] | None = getattr(context, "update_policy_weights_", None)
    if update is None:
        return None
    signature = inspect.signature(update)
    forms: list[Callable[[object], Call]] = [
        lambda weights: ((weights,), {"model_id": model_id}),
        lambda weights: ((), {"weights": weights, "model_id": model_id}),
        lambda weights: ((weights,), {}),
        lambda _: ((), {}),
    ]
    form = next((form for form in forms if _accepts(signature, form(None))), None)
    if form is None:
        raise TypeError(
            f"an update of '{model_id}' cannot be passed on to {type(context).__name__}: "
            f"update_policy_weights_{signature} must accept (weights, model_id=…), (weights) or no argument"
        )
    if model is None and form is not forms[-1]:
        raise ValueError(
            f"{type(context).__name__}.update_policy_weights_{signature} needs the weights of '{model_id}', and with "
            "load= alone there is no model to copy them from: give model= too, or a context with cascade_weights()"
        )

    def pass_on() -> None:
        arguments, keywords = form(process_gate().call_model(model, _copy_of, (strategy.extract_weights, model), {}))
        update(*arguments, **keywords)

    return pass_on


def _accepts(signature: inspect.Signature, call: Call) -> bool:
    arguments, keywords = call
    try:
        signature.bind(*arguments, **keywords)
    except TypeError:
        return False
    return True


def _copy_of(extract: Callable[[Any], Any], model: object) -> Any:
    weights = extract(model)
    if isinstance(weights, TensorDictBase):
        return weights.clone()
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in weights.items()}
