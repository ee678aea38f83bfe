"""Views of a batch for writing it step by step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from collectors.environments.stepper import RESULTS, Stepper
from collectors.environments.trees import ArrayTree

Key = str | tuple[str, ...]


class Columns:
    """Numpy views ``[T, E, *]`` of a batch's tensors: a step writes one row of each."""

    def __init__(self, batch: TensorDictBase, policy_keys: Iterable[Key], batched: bool) -> None:
        """Bind to ``batch`` (``[T]``, or ``[E, T]`` where ``batched``), which must be on the CPU."""

        def rows(*key: str) -> np.ndarray:
            return _rows(batch.get(key), batched)

        self.steps = batch.batch_size[-1]
        self.observation, self.version = _tree(batch.get("observation"), batched), rows("policy_version")
        self.mask = rows("mask") if "mask" in batch.keys() else None  # noqa: SIM118  (a TensorDict is not a dict)
        self.action = rows("action")
        self.others = {key: rows(*((key,) if isinstance(key, str) else key)) for key in policy_keys if key != "action"}
        self.successor = _tree(batch.get(("next", "observation")), batched)
        self.results = {name: rows("next", name)[..., 0] for name in RESULTS}

    def write_result(self, t: int, stepper: Stepper) -> None:
        """Write the results of a step into row ``t``."""
        self.successor[t] = stepper.observation
        for name, column in self.results.items():
            column[t] = getattr(stepper, name)
        if self.mask is not None and stepper.reset_step is not None:
            self.mask[t] = ~stepper.reset_step


def _rows(tensor: torch.Tensor, batched: bool) -> np.ndarray:
    """Return a view of ``tensor``, ``[T, *]`` or ``[E, T, *]``, as ``[T, E, *]``."""
    return tensor.numpy().swapaxes(0, 1) if batched else tensor.numpy()[:, None]


def _tree(value: Any, batched: bool) -> Any:
    """Return ``_rows`` of a tensor, or of each tensor of a TensorDict."""
    if isinstance(value, TensorDictBase):
        return ArrayTree({name: _tree(part, batched) for name, part in value.items()})
    return _rows(value, batched)
