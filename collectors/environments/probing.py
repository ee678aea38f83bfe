"""Calling a function for the shape of its result, without side effects."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn


@contextmanager
def without_side_effects(function: object, device: torch.device | str = "cpu") -> Iterator[None]:
    """Restore the random number generators at the end; a module ``function`` is in evaluation mode inside."""
    drawing = torch.device(device)
    training = [part for part in function.modules() if part.training] if isinstance(function, nn.Module) else []
    numpys, pythons = np.random.get_state(), random.getstate()
    with torch.random.fork_rng([drawing] if drawing.type == "cuda" else []):
        try:
            for part in training:
                part.training = False
            yield
        finally:
            for part in training:
                part.training = True
            np.random.set_state(numpys)
            random.setstate(pythons)
