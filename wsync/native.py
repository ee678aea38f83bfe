"""The compiled inner loops of an update (``csrc/``, the module ``wsync._native``), if they were built.

Without them there is no shared memory: the same schemes send the weights over the workers' sockets.
``WSYNC_NATIVE=0`` in the environment chooses that.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

_REVISION = 105  # of csrc/module.c


def _load() -> tuple[ModuleType | None, str]:
    if os.environ.get("WSYNC_NATIVE") == "0":
        return None, "WSYNC_NATIVE=0 is set"
    try:
        _native: Any = importlib.import_module("wsync._native")
    except ImportError as error:
        return None, f"the C extension was not built: `pip install -e .` builds it, with a C compiler ({error})"
    if _native.REVISION != _REVISION:
        return None, "the C extension was built from other sources: `pip install -e .` builds it again"
    table: object | None = Tensor.__dict__.get("__dlpack_c_exchange_api__")
    if table is None:
        return None, f"PyTorch {torch.__version__} has no table of DLPack's functions"
    _native.configure(table, Tensor, nn.Parameter, increment_version, torch.clear_autocast_cache)
    return _native, ""


native: Any
"""The module ``wsync._native``; None if it cannot be used."""
native, why_not = _load()
