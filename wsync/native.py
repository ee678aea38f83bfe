"""The compiled fast path (``csrc/``), where it could be built.

An installation without a C compiler takes the slow path, in Python, with every update: the same promises, and several
times the latency for small models. ``WSYNC_NATIVE=0`` in the environment says the same, to measure what it brings.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wsync.types import PHASES, SyncReport

if TYPE_CHECKING:
    from wsync._native import Board, Installer, Room, Seat, Spot, Tree, Turnstile, Watch

_REVISION = 9  # of csrc/module.c
_PLAIN_TYPES = (nn.Parameter, Tensor)  # a subclass may keep its numbers elsewhere


def _load() -> Any:
    """The compiled module; None where it is not there, not wanted, or of no use."""
    if os.environ.get("WSYNC_NATIVE") == "0":
        return None
    try:
        from wsync import _native
    except ImportError:  # it was not built here
        return None
    table: object | None = Tensor.__dict__.get("__dlpack_c_exchange_api__")
    if table is None or _native.REVISION != _REVISION:
        stale = "it was built from other sources: `pip install -e .` builds it anew"
        why = stale if table is not None else f"PyTorch {torch.__version__} has no table of DLPack's functions"
        warnings.warn(f"updates are slower, for wsync's compiled code cannot be used: {why}", stacklevel=2)
        return None
    _native.use(table, _PLAIN_TYPES, SyncReport, PHASES, torch.get_num_threads)
    return _native


_native = _load()
available = _native is not None
"""Whether this process takes the fast path."""


def room(views: Sequence[Tensor], *, shared: bool) -> Room | None:
    """What fills ``views`` with bytes; None where PyTorch has to: on a GPU, or of complex numbers.

    Args:
        views: of one buffer.
        shared: whether other processes will read it.
    """
    if _native is None or any(not view.is_cpu or view.is_complex() for view in views):
        return None
    return _native.Room(views, shared)


def tree(places: Sequence[Spot], links: Sequence[tuple[Spot, Any]], vacant: Sequence[Spot], tables: Any) -> Tree | None:
    """What finds a module's tensors again.

    Args:
        places: ``(dictionary, key)`` of each tensor.
        links: of each child, and the child.
        vacant: where there is None, and must be.
        tables: the dictionaries to which nothing must be added.
    """
    if _native is None:
        return None
    children = tuple((where, key, child) for (where, key), child in links)
    return _native.Tree(tuple(places), children, tuple(vacant), tuple(tables))


def installer(
    tree: Tree,
    tensors: Sequence[Tensor],
    bound: Sequence[tuple[Tensor, int]],
    copied: Sequence[tuple[Tensor, int]],
    bump: Callable[[], object],
) -> Installer | None:
    """How a model takes an update, as long as it does not change; None if there is no fast path.

    Args:
        tree: finds its tensors.
        tensors: what it has to find.
        bound: ``(parameter, index of its view)`` of those that are bound.
        copied: the same, of those that are copied.
        bump: tells autograd that these were written.
    """
    if _native is None:
        return None
    return _native.Installer(tree, tuple(tensors), tuple(bound), tuple(copied), bump)


def seat() -> Seat | None:
    """A worker's place in an arena, which takes usual updates by itself; None if there is no fast path."""
    return None if _native is None else _native.Seat()


def turnstile(lock: Any) -> Turnstile | None:
    """What a gate consists of, around a re-entrant lock; None if there is no fast path."""
    return None if _native is None else _native.Turnstile(lock)


def watch(descriptors: bytes) -> Watch | None:
    """What tells whether anything has happened to any of many descriptors (an ``array("i")``, as bytes)."""
    return None if _native is None else _native.Watch(descriptors)


def board(words: memoryview, workers: int, block: int, extra: int, nbytes: int) -> Board | None:
    """What publishes in an arena: see ``arena.py`` for the words, ``switch.py`` for a worker's block of them."""
    return None if _native is None else _native.Board(words, workers, block, extra, nbytes)
