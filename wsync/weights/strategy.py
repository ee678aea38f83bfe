"""What weights are, and how they are taken from and put into a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from wsync.errors import LayoutMismatch
from wsync.weights.layout import Layout
from wsync.weights.snapshot import Snapshot, is_extra, is_module, plain_name, snapshot
from wsync.weights.targets import Binding, Tensors

Format = Literal["tensordict", "state_dict"]


def bytes_of(weights: Any) -> np.ndarray:
    """Return the memory of the weights that a ``TransportBackend`` is given, without a copy: ``uint8[nbytes]``.

    All their tensors are views of one storage, which has the same size at both ends. So a transport may send these
    bytes, which it must not write, and in ``receive_weights`` write what has arrived into those of its ``weights``.
    ValueError: the tensors do not share one storage, or are not on the CPU.
    """
    tensors = [tensor for tensor in snapshot(weights).tensors.values() if tensor.numel()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    if len(storages) > 1 or not all(tensor.is_cpu for tensor in tensors):
        raise ValueError("these weights are not views of one storage on the CPU: a transport is given such weights")
    flat = torch.empty(0, dtype=torch.uint8)
    return flat.set_(next(iter(storages.values()), flat.untyped_storage())).numpy()


class WeightStrategy(str):
    """Takes weights out of a source and puts them into a destination, in one of two formats.

    Parameters, buffers, tied parameters and ``extra_state`` all travel, in both formats; either format can be applied
    to any model. A strategy is the name of its format, too: ``scheme.strategy == "tensordict"``.

    ``extract_as``: ``"tensordict"`` (nested by module) or ``"state_dict"`` (flat, dotted names).
    """

    def __new__(cls, extract_as: Format = "tensordict") -> Self:
        """Return the strategy; ValueError: there is no such format."""
        if not isinstance(extract_as, str) or extract_as not in ("tensordict", "state_dict"):
            raise ValueError(f"strategy is 'tensordict' or 'state_dict', not {extract_as!r}")
        return super().__new__(cls, extract_as)

    @property
    def extract_as(self) -> Format:
        """The name of the format."""
        return "state_dict" if self == "state_dict" else "tensordict"

    def __repr__(self) -> str:
        return f"WeightStrategy({self.extract_as!r})"

    def extract_weights(self, source: object) -> TensorDict | dict[str, Any]:
        """The weights of ``source`` (module, TensorDict or state dict) in this strategy's format.

        Tensors are detached but not copied: they change when the source does. TypeError: ``source`` is none of these.
        LayoutMismatch: a lazy module without shapes; or a TensorDict cannot have both of two names.
        """
        weights = snapshot(source)
        flat: dict[str, Any] = {name: tensor.detach() for name, tensor in weights.tensors.items()}
        flat.update(weights.extra or {})
        if self == "state_dict":
            return flat
        result = TensorDict({})
        for name, value in flat.items():
            path = tuple(name.split("."))
            if any(".".join(path[:depth]) in flat for depth in range(1, len(path))):
                raise LayoutMismatch(f"no TensorDict has '{name}' beside its prefix: use strategy='state_dict'")
            put = result.set if isinstance(value, Tensor) else result.set_non_tensor
            put(path, value)
        return result

    def apply_weights(self, destination: Any, weights: object, inplace: bool = True) -> None:
        """Put ``weights`` (any format) into ``destination`` (module, TensorDict or state dict).

        With ``inplace`` they are copied into the destination's memory; otherwise its tensors are replaced by these.
        Extra state that both have is replaced, except in a locked TensorDict. LayoutMismatch: names what does not fit,
        or cannot be copied into; nothing was applied. TypeError: either is not of a known kind.
        """
        given = snapshot(weights)
        if is_module(destination):
            layout = Layout.of(given)
            Binding(destination, layout, bind=not inplace).install(layout.order(given), given.extra)
            return
        own = snapshot(destination)
        given = given.with_optional(own.tensors.keys())
        layout, kept = Layout.of(given), own.extra or {}
        tensors = layout.order(given)
        replaced = {name: value for name, value in (given.extra or {}).items() if name in kept}
        if inplace:
            Tensors(destination, layout, "the destination").install(tensors)
        else:
            layout.order(Snapshot(own.tensors), "the destination")
            replaced |= dict(zip(layout.names, tensors, strict=True))
        _replace(destination, replaced)


def _replace(destination: Any, values: Mapping[str, Any], prefix: str = "") -> None:
    """Put ``values`` in the places of a TensorDict or a mapping that have their names."""
    in_tensordict = isinstance(destination, TensorDictBase)
    for key, old in list(destination.items()):
        name = plain_name(f"{prefix}{key}")
        if name not in values:
            if isinstance(old, TensorDictBase | Mapping):
                _replace(old, values, f"{prefix}{key}.")
        elif not in_tensordict:
            destination[key] = values[name]
        elif not (destination.is_locked and is_extra(name)):
            put = destination.set if isinstance(values[name], Tensor) else destination.set_non_tensor
            put(key, values[name])
