"""What is sent: a model that says which versions its weights are of; and a note of the newest that has arrived."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

import wsync

LAYERS = 8


class Revealing(nn.Module):
    """A model whose output says which versions its weights are of.

    Args:
        mib: MiB of all weights together, in ``LAYERS`` layers.
    """

    def __init__(self, mib: float) -> None:
        super().__init__()
        numel = max(16, int(mib * 2**20 / 4 / LAYERS))
        self.layers = nn.ParameterList(nn.Parameter(torch.ones(numel)) for _ in range(LAYERS))
        self.register_buffer("mark", torch.ones(1))

    def forward(self) -> Tensor:
        """``float32[2 * LAYERS + 1]``: the extremes of each layer, and the buffer. All alike, or it was torn."""
        extremes = [extreme for layer in self.layers for extreme in layer.detach().aminmax()]
        return torch.stack([*extremes, self.mark[0]])  # pyright: ignore[reportIndexIssue]

    @torch.no_grad()
    def become(self, version: int) -> None:
        """Fill every weight with ``version``."""
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.fill_(version)


class RevealingPolicy(Revealing):
    """The same, acting in ``FloorEnv``."""

    def forward(self, observation: TensorDictBase) -> TensorDictBase:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Write "action", "reveal" and "process"."""
        observation.set("reveal", super().forward())
        observation.set("process", torch.tensor(os.getpid()))
        return observation.set("action", torch.tensor(0))


class FloorEnv(gymnasium.Env):
    """Its observation is the newest version whose ``send`` has returned, as the trainer notes it in a file."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, floor: Path) -> None:
        self._floor = np.memmap(floor, np.int64, "r")

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begin."""
        super().reset(seed=seed)
        return np.array(self._floor, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Look at the note, before the next forward begins."""
        return np.array(self._floor, np.float32), 0.0, False, False, {}


@contextmanager
def floor() -> Iterator[tuple[Path, np.ndarray]]:
    """A number in a file, that all processes map: the newest version whose ``send`` has returned."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "floor"
        path.write_bytes(bytes(8))
        yield path, np.memmap(path, np.int64, "r+")


def send(model: Revealing, scheme: wsync.WeightSyncScheme, note: np.ndarray, weights: Any = None) -> int:
    """Send the next version, and note it; 1, as it is one update."""
    version = scheme.version + 1
    model.become(version)
    scheme.send(weights)
    note[0] = version
    return 1
