"""Faults that tests plant in vLLM's workers (``--worker-extension-cls``), by its route ``/collective_rpc``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class Faults:
    """Methods of each worker."""

    model_runner: Any

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
