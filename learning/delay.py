"""Injected staleness: weights that reach the workers a fixed number of updates late."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import nn


class WeightDelay:
    """Holds each version of a policy's weights back until the learner has done `updates` further updates.

    This is a weight sync with a long latency and enough bandwidth: every version arrives, in order, and late. Until the
    first one is due, workers act with the weights that they were started with. Versions count what is sent, so the
    staleness of a frame is the newest version sent, plus the number held back (``len``), less the frame's version.
    """

    def __init__(self, updates: int = 0) -> None:
        self.updates = updates
        self._held_back: deque[dict[str, Any]] = deque()
        self._acting: nn.Module | None = None

    def __len__(self) -> int:
        """Return the number of versions held back."""
        return len(self._held_back)

    def acting_policy(self, policy: nn.Module) -> nn.Module:
        """Return a module with the weights that workers have, or are to be started with.

        Before the first update it equals `policy`, and is `policy` if nothing is delayed; after a resume it may be
        older.
        """
        if self.updates == 0:
            return policy
        if self._acting is None:
            self._acting = copy.deepcopy(policy)
        return self._acting

    def exchange(self, policy: nn.Module) -> nn.Module | None:
        """Take the weights of `policy` after an update; return a module with the weights to send now, or None.

        The returned module is valid until the next call.
        """
        if self.updates == 0:
            return policy
        acting, due = self.acting_policy(policy), None
        self._held_back.append(copy.deepcopy(policy.state_dict()))
        while len(self) > self.updates:  # more than one, if a resumed run has a shorter delay
            due = self._held_back.popleft()
        if due is None:
            return None
        acting.load_state_dict(due)
        return acting

    def state_dict(self) -> dict[str, Any]:
        """Return the weights that are held back, and those that workers have."""
        acting = None if self._acting is None else self._acting.state_dict()
        return {"held_back": list(self._held_back), "acting": acting}

    def load_state_dict(self, state: Mapping[str, Any], policy: nn.Module) -> None:
        """Continue from where `state_dict` was taken; `policy` is the learner's."""
        if self.updates and state["acting"] is not None:
            self.acting_policy(policy).load_state_dict(state["acting"])
            self._held_back.extend(state["held_back"])
