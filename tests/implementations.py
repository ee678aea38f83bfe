"""The two implementations of the inner loops, to run tests on either."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from wsync import loops
from wsync.shm.arena import SenderArena, WorkerArena
from wsync.weights.layout import Layout

_MODULES = {
    "ArenaWriter": "arena_writer",
    "GateState": "gate_state",
    "Installer": "installer",
    "PackPlan": "pack_plan",
    "TensorTree": "tensor_tree",
    "WorkerSlot": "worker_slot",
}
PYTHON: Any = SimpleNamespace(
    **{name: getattr(importlib.import_module(f"wsync.loops.{module}"), name) for name, module in _MODULES.items()}
)
CHOSEN: Any = SimpleNamespace(**{name: getattr(loops, name) for name in loops.CLASSES})
KINDS = ("compiled", "Python")


def implementation(kind: str) -> Any:
    """The classes of one kind; the test is skipped where there are none."""
    if kind == "compiled" and not loops.COMPILED:
        pytest.skip("the compiled classes were not built here, or are switched off")
    return CHOSEN if kind == "compiled" else PYTHON


def choose(classes: Any, assign: Callable[[Any, str, Any], object] = setattr) -> None:
    """Use these classes in this process from now on, in every module of wsync that has imported them by name.

    The process's gate stays as it is.
    """
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "wsync"]
    for name in loops.CLASSES:
        known = (getattr(PYTHON, name), getattr(CHOSEN, name))
        for module in modules:
            if vars(module).get(name) in known and not module.__name__.startswith("wsync.loops."):
                assign(module, name, getattr(classes, name))


def new_arena(layout: Layout, workers: int) -> SenderArena:
    """An arena for weights of ``layout``; each worker has its first connection."""
    arena = SenderArena(workers)
    arena.set_layout(layout)
    for worker in range(workers):
        arena.writer.accept(worker, 1)
    return arena


def worker_arena(arena: SenderArena) -> WorkerArena:
    """A worker's view of an arena."""
    opened = WorkerArena(arena.num_workers, (os.dup(arena.fds[0]), os.dup(arena.fds[1])))
    opened.set_layout(arena.layout)
    return opened
