"""The inner loops of an update: compiled (``csrc/``, the module ``wsync._loops``) if that was built, else in Python.

Both have the same classes, with the same constructors and methods, and the same unit tests run on both. The choice is
made here, once, at import; no caller depends on it. Only the compiled classes have a fast path (``fast_path.py``) for
updates in the arena: ``ArenaWriter.fast_update`` and ``WorkerSlot.install_fast_path``. In Python all of these updates
take the general path, and a small one takes several times as long.
``WSYNC_NATIVE=0`` in the environment chooses Python.
"""

from __future__ import annotations

import os
import platform
import warnings
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from wsync.errors import NotConnected, SyncTimeout
from wsync.loops.tensors import PLAIN_TYPES, copy_into_model
from wsync.types import PHASES, SyncReport

_REVISION = 18  # of csrc/module.c


def _load() -> ModuleType | None:
    """Return the compiled module; None if it was not built, is disabled, or was built from other sources."""
    if os.environ.get("WSYNC_NATIVE") == "0":
        return None
    try:
        from wsync import _loops
    except ImportError:
        return None
    table: object | None = Tensor.__dict__.get("__dlpack_c_exchange_api__")
    if table is None or _loops.REVISION != _REVISION:
        stale = "it was built from other sources: `pip install -e .` builds it again"
        why = stale if table is not None else f"PyTorch {torch.__version__} has no table of DLPack's functions"
        warnings.warn(f"updates are slower, because wsync's compiled code cannot be used: {why}", stacklevel=2)
        return None
    _loops.configure(
        table,
        PLAIN_TYPES,
        SyncReport,
        PHASES,
        torch.get_num_threads,
        increment_version,
        torch.clear_autocast_cache,
        copy_into_model,
        NotConnected,
        SyncTimeout,
    )
    return _loops


_compiled = _load()
COMPILED = _compiled is not None
"""Whether the compiled classes were chosen; for information."""

if not COMPILED and platform.machine() not in ("x86_64", "AMD64"):
    warnings.warn(
        f"wsync's compiled code is not used: on {platform.machine()} a forward may then see weights of two versions in "
        "shared memory, because the processor reorders what Python stores (see wsync/loops/words.py)",
        stacklevel=2,
    )

if TYPE_CHECKING or _compiled is None:
    from wsync.loops.arena_writer import ArenaWriter
    from wsync.loops.gate_state import GateState
    from wsync.loops.installer import Installer
    from wsync.loops.pack_plan import PackPlan
    from wsync.loops.tensor_tree import TensorTree
    from wsync.loops.worker_slot import WorkerSlot
else:
    ArenaWriter = _compiled.ArenaWriter
    GateState = _compiled.GateState
    Installer = _compiled.Installer
    PackPlan = _compiled.PackPlan
    TensorTree = _compiled.TensorTree
    WorkerSlot = _compiled.WorkerSlot

CLASSES = ("ArenaWriter", "GateState", "Installer", "PackPlan", "TensorTree", "WorkerSlot")
__all__ = ["CLASSES", "COMPILED", *CLASSES]  # pyright: ignore[reportUnsupportedDunderAll]
