"""The two implementations of the inner loops, to run tests on either."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from wsync import loops
from wsync.shm.arena import Arena
from wsync.weights.layout import Layout

_MODULES = {
    "ArenaWriter": "arena_writer",
    "GateLock": "gate_lock",
    "Installer": "installer",
    "PackPlan": "pack_plan",
    "PeerWatch": "peer_watch",
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


def new_arena(layout: Layout, workers: int, fds: tuple[int, int] | None = None) -> Arena:
    """An arena for weights of ``layout``; with ``fds``, the other end's view of one."""
    arena = Arena(workers, fds)
    arena.set_layout(layout)
    return arena
