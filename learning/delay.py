"""Injected staleness: weights that reach the workers a fixed number of updates late."""

from __future__ import annotations

import copy
from collections import deque
from typing import Any

from torch import nn


class WeightDelay:
    """Holds each version of a policy's weights back until the learner has done `updates` further updates.

    This is a weight sync with a long latency and enough bandwidth: every version arrives, in order, and late. Until the
    first one is due, workers act with the weights that they were started with. Versions count what is sent, so the
    staleness of a frame is the newest version sent, plus the number held back (``len``), less the frame's version.
    Versions held back are not saved: a resumed run starts with the newest weights, and the delay grows anew.

    Args:
        updates: number of updates; 0: nothing is held back.

    Raises:
        ValueError: a negative number.
    """

    def __init__(self, updates: int = 0) -> None:
        if updates < 0:
            raise ValueError(f"weights cannot be sent {-updates} updates before they exist")
        self.updates = updates
        self._held_back: deque[dict[str, Any]] = deque()
        self._due: nn.Module | None = None

    def __len__(self) -> int:
        """Return the number of versions held back."""
        return len(self._held_back)

    def exchange(self, policy: nn.Module) -> nn.Module | None:
        """Take the weights of `policy` after an update; return a module with the weights to send now, or None.

        The returned module is valid until the next call.
        """
        if self.updates == 0:
            return policy
        if self._due is None:
            self._due = copy.deepcopy(policy)
        self._held_back.append(copy.deepcopy(policy.state_dict()))
        if len(self) <= self.updates:
            return None
        self._due.load_state_dict(self._held_back.popleft())
        return self._due
