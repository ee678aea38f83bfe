"""Bare modules as policies: a module that maps observations to actions acts by a TensorDictModule around it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tensordict import NestedKey, TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import Tensor, nn

IN_KEYS: list[NestedKey] = ["observation"]
OUT_KEYS: list[NestedKey] = ["action"]
Call = Callable[[TensorDictBase], Any]


class UnusablePolicy(TypeError):
    """A policy cannot be called with an observation, or returns no action."""


def first_output(policy: Call, example: TensorDict, gate: Callable[[Call], Call]) -> tuple[Call, Any]:
    """Call ``policy`` with a copy of ``example``, its input; return what to call from now on, and the output.

    A module of tensors is wrapped: ``TensorDictModule(policy, ["observation"], ["action"])``. What a module takes is
    known if it is of ``tensordict.nn``, has ``in_keys`` and ``out_keys``, or declares its argument as a TensorDict (by
    a type, or the name "tensordict" or "td"). Else both are tried, the tensor first.

    Raises:
        UnusablePolicy: the module takes neither a tensor nor a TensorDict; carries both errors.
        Exception: whatever any other policy raises.
    """
    if not isinstance(policy, nn.Module) or _takes_tensordict(policy):
        return policy, gate(policy)(example.clone())
    wrapped = TensorDictModule(policy, in_keys=IN_KEYS, out_keys=OUT_KEYS)
    errors: list[str] = []
    for function, what in ((wrapped, f"with the tensor of {IN_KEYS}"), (policy, "with a TensorDict")):
        try:
            output = gate(function)(example.clone())
        except Exception as error:  # noqa: BLE001  it is raised again below, if the other call fails as well
            errors.append(f"{what}: {type(error).__name__}: {error}")
            continue
        if isinstance(output, TensorDictBase | Mapping) and isinstance(output.get("action"), Tensor):
            return function, output
        errors.append(f'{what}: no "action" came of it')
    kind = type(policy).__name__
    raise UnusablePolicy(f"{kind} is not usable as a policy\n" + "\n".join(f"  called {error}" for error in errors))


def _takes_tensordict(policy: nn.Module) -> bool:
    if isinstance(policy, TensorDictModuleBase) or {"in_keys", "out_keys"} <= set(dir(policy)):
        return True
    try:
        parameters = list(inspect.signature(policy.forward).parameters.values())
    except (TypeError, ValueError):  # it has no signature that Python can read
        return False
    first = parameters[0] if parameters else None
    return first is not None and (first.name in ("tensordict", "td") or "TensorDict" in str(first.annotation))
