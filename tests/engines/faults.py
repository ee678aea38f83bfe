"""Faults that tests plant in vLLM's workers (``--worker-extension-cls``), by its route ``/collective_rpc``."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch


class Faults:
    """Methods of each worker."""

    model_runner: Any

    def spoil(self, what: str) -> None:
        """``"flip"`` a bit of what is installed, or have the next load ``"swap"`` or ``"drop"`` tensors."""
        model = self.model_runner.get_model()
        usual, ends = model.load_weights, ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
        query, key, down = (f"model.layers.1.{end}.weight" for end in ends)
        if what == "flip":
            model.model.norm.weight.data.view(torch.int32)[7] ^= 1
            return

        def load(pairs: Iterable[Any]) -> Any:
            model.load_weights, given = usual, {name: tensor.clone() for name, tensor in pairs}
            if what == "drop":
                del given[down]
            else:  # the heads of the keys, and as many of the queries
                size = len(given[key])
                first, rest = given[query][:size], given[query][size:]
                given[query], given[key] = torch.cat([given[key], rest]), first
            return usual(given.items())

        model.load_weights = load

    def fail_half_way(self) -> None:
        """Have a load raise, once, when half of the weights have been taken."""
        model = self.model_runner.get_model()
        usual = model.load_weights

        def load(pairs: Iterable[Any]) -> Any:
            def half() -> Iterator[Any]:
                for number, pair in enumerate(pairs):
                    if number == 15:
                        model.load_weights = usual
                        raise ArithmeticError("planted")
                    yield pair

            return usual(half())

        model.load_weights = load
