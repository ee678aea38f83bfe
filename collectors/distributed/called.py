"""A worker's side of calls: does what it is told, and gives each call its answer."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from collectors.distributed.calls import Answer
from collectors.workers.worker import Core, WorkerOptions

_NOTHING = Answer()


class CalledCore:
    """Takes ``build``, and then what a ``Core`` obeys; after a command that failed, none is done any more.

    Args:
        settle: what the options say about this process, done before anything is built.
    """

    def __init__(self, settle: Callable[[WorkerOptions], object]) -> None:
        self._settle = settle
        self._core: Core | None = None
        self._buffers: list[torch.Tensor] = []
        self._failed = False

    def obey(self, command: str, argument: Any) -> Answer:
        """Do a command; a failure is an answer, too."""
        if self._failed:
            return _NOTHING
        try:
            with ExitStack() as failing:
                failing.callback(self.close)  # at once: a worker that is dropped is not told to end
                answer = self._build(*argument) if self._core is None else self._work(self._core, command, argument)
                failing.pop_all()
            return answer
        except Exception:  # noqa: BLE001  whatever it is, the trainer raises it again with this traceback
            self._failed = True
            return Answer("error", traceback.format_exc())

    def _build(self, parts: bytes, options: WorkerOptions) -> Answer:
        self._settle(options)
        self._core = core = Core(parts, options)
        self._buffers = core.plan.allocate(options.buffers)
        core.fill(self._buffers)
        return Answer("ready", (core.plan, options.buffers, core.num_envs))

    def _work(self, core: Core, command: str, argument: Any) -> Answer:
        answer = core.obey(command, argument)
        if answer is None:
            return _NOTHING
        kind, value = answer
        return Answer(kind, value, self._buffers[value] if kind == "batch" else None)

    def close(self) -> None:
        """Let schemes and environments go. Harmless when repeated."""
        core, self._core = self._core, None
        if core is not None:
            core.close()
