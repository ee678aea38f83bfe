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
    the action afterwards, such as one that adds noise; in the ``same_process``, a request for random ones counts, too.
    """
    asked = interaction_type()
    if not isinstance(policy, nn.Module) or (
        asked is not None and (same_process or asked is not InteractionType.RANDOM)
    ):
        return
    writers = [
        module
        for module in policy.modules()
        if isinstance(module, TensorDictModuleBase)
        and "action" in module.out_keys
        and not any(isinstance(inner, TensorDictModuleBase) for inner in module.modules() if inner is not module)
    ]
    last = writers[-1] if writers else None
    if not isinstance(last, ProbabilisticTensorDictModule) or last.default_interaction_type is InteractionType.RANDOM:
        return
    distribution: Any = last.distribution_class
    name = getattr(distribution, "__name__", type(distribution).__name__)  # a class, or a function that makes one
    if "Delta" in name:
        return  # it has one possible value, as ``Delta`` and TorchRL's ``TanhDelta`` have
    how = last.default_interaction_type.name
    warnings.warn(
        f"the policy is probabilistic ({name}) and acts greedily: its {type(last).__name__} has "
        f"default_interaction_type={how}. To explore, make it with default_interaction_type=InteractionType.RANDOM "
        "(set_interaction_type does not reach worker processes). To collect greedy actions on purpose, make the "
        "collector inside `with set_interaction_type(InteractionType.DETERMINISTIC):`",
        UserWarning,
        stacklevel=level_of_caller(),
    )


def level_of_caller() -> int:
    """Return the ``stacklevel`` of the first frame outside this package, for a warning by this function's caller."""
    package = __name__.partition(".")[0]
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        level, frame = level + 1, frame.f_back
    return level
