"""A warning for probabilistic policies that are about to collect without exploration."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from tensordict.nn import InteractionType, ProbabilisticTensorDictModule, TensorDictModuleBase
from tensordict.nn.probabilistic import interaction_type
from torch import nn


def warn_if_greedy(policy: Any, *, same_process: bool) -> None:
    """Warn if a probabilistic policy of ``tensordict.nn`` will take its most likely action in each step.

    Such a module is greedy by default. There is no warning where the caller has asked for greedy
    actions (``with set_interaction_type(InteractionType.DETERMINISTIC):`` around this call), or another module writes
    the action afterwards, such as one that adds noise.

    Args:
        policy: the policy that acts, or a copy of which acts.
        same_process: whether it acts in this process, where ``set_interaction_type(InteractionType.RANDOM)`` counts.
    """
    asked = interaction_type()
    if asked is not None and (same_process or asked is not InteractionType.RANDOM):
        return
    chooser = _chooser(policy)
    if (
        chooser is None
        or chooser.default_interaction_type is InteractionType.RANDOM
        or _is_certain(chooser.distribution_class)
    ):
        return
    how = chooser.default_interaction_type.name
    warnings.warn(
        f"the policy is probabilistic ({_name(chooser.distribution_class)}) and acts greedily: its "
        f"{type(chooser).__name__} has default_interaction_type={how}. To explore, make it with "
        "default_interaction_type=InteractionType.RANDOM (set_interaction_type does not reach worker processes). To "
        "collect greedy actions on purpose, make the collector inside `with set_interaction_type("
        "InteractionType.DETERMINISTIC):`",
        UserWarning,
        stacklevel=level_of_caller(),
    )


def _chooser(policy: Any) -> ProbabilisticTensorDictModule | None:
    """Return the module that draws the action, if that is the last one to write it; else None."""
    if not isinstance(policy, nn.Module):
        return None
    writers = [
        module
        for module in policy.modules()
        if isinstance(module, TensorDictModuleBase)
        and "action" in module.out_keys
        and not any(isinstance(inner, TensorDictModuleBase) for inner in module.modules() if inner is not module)
    ]
    last = writers[-1] if writers else None
    return last if isinstance(last, ProbabilisticTensorDictModule) else None


def _is_certain(distribution: Any) -> bool:
    """Return whether a distribution has one possible value, as ``Delta`` and TorchRL's ``TanhDelta`` have."""
    return "Delta" in _name(distribution)


def _name(distribution: Any) -> str:
    return getattr(distribution, "__name__", type(distribution).__name__)  # a class, or a function that makes one


def level_of_caller() -> int:
    """Return the ``stacklevel`` of the first frame outside this package, for a warning by this function's caller."""
    package = __name__.partition(".")[0]
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    return level
