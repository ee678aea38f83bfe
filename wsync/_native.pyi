"""The classes of ``csrc/``."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

REVISION: int
BLOCK_SIZE: int
"""Bytes of a connection's block of words."""
RECORDS_SIZE: int
"""Bytes of the records of all slots."""
MAX_SLOTS: int

def configure(
    table: object,
    tensor: type,
    parameter: type,
    increment_version: Callable[[Any], None],
    clear_autocast_cache: Callable[[], None],
    /,
) -> None:
    """Set what the classes use of PyTorch. Called once, before any other use."""

class PackPlan:
    """Copies lists of tensors into the views of one buffer, as bytes.

    Args:
        views: the views of one buffer; tied tensors are views of the same memory.
        shared: whether other processes read the buffer; large copies then bypass this core's caches.
    """

    in_place: bool
    """Whether the views lie where they lay; PyTorch moves a storage that it shares with another process."""

    def __init__(self, views: Sequence[Tensor], shared: bool, /) -> None: ...
    def fill(self, tensors: list[Tensor] | TensorTree, /) -> bool | None:
        """Copy tensors into the views, one each: a list of them, or those of a tree, which are known the next time.

        Returns:
            None, if the tree's module has changed. False, with nothing copied, if they are not as many as the views; if
            one is not plain bytes in main memory with its view's dtype, shape and strides; if tied views get tensors in
            different memory; or if the views are not plain bytes themselves.
        """

class TensorTree:
    """Finds the tensors of a module, as long as nothing but tensors was replaced in it.

    Args:
        places: ``(dictionary, key)`` of each tensor to be found, in the order in which they are returned.
        links: ``(dictionary, key, child)`` of each child module.
        vacant: places that hold None, and must.
        tables: every dictionary of the tree, to which nothing may be added and from which nothing may be removed.
    """

    def __init__(
        self,
        places: tuple[tuple[dict[str, Any], str], ...],
        links: tuple[tuple[dict[str, Any], str, Any], ...],
        vacant: tuple[tuple[dict[str, Any], str], ...],
        tables: tuple[Mapping[str, Any], ...],
        /,
    ) -> None: ...
    def tensors(self) -> list[Tensor] | None:
        """Return the tensors at the places, as they are now; None if the tree has changed."""

class Installer:
    """Installs usual updates in one model, for ``WorkerWords``: if the model is unchanged, and all copies are of bytes.

    Args:
        tree: finds the model's tensors.
        tensors: those that it found when the installer was made.
        bound: ``(parameter, index of its view)`` of the parameters that are bound.
        copied: the same, of the tensors that are copied.
    """

    def __init__(
        self,
        tree: TensorTree,
        tensors: tuple[Tensor, ...],
        bound: tuple[tuple[Tensor, int], ...],
        copied: tuple[tuple[Tensor, int], ...],
        /,
    ) -> None: ...

class SenderWords:
    """A trainer's words of an arena; it owns ``signal``. One thread at a time reserves, publishes or waits.

    The other methods are for any thread. ``blocks`` are tuples of indices; a closed block is passed over, but ends a
    wait.
    """

    def __init__(self, memory: Any, capacity: int, signal: int, /) -> None: ...
    def open(self, wake: int, process: int, /) -> int:
        """Reset a free block and return its index. ``wake`` is an eventfd, ``process`` a pidfd; both are duplicated."""

    def close(self, block: int, /) -> None:
        """Free a block: its process is gone."""

    def shut(self) -> None:
        """Close all descriptors. Idempotent."""

    def claim(self, slot: int, /) -> bool:
        """Reset the record of a slot, if no open block names, uses or holds it; return whether it was free."""

    def publish(
        self, blocks: tuple[int, ...], version: int, slot: int, acknowledge: bool, pending: bool = False, /
    ) -> bool:
        """Point blocks to a slot and wake their workers; with ``pending``, only store that this is about to come.

        False: the process of an open block has ended. That is looked at only without ``acknowledge``.
        """

    def wait(self, blocks: tuple[int, ...], version: int, timeout: float | None, /) -> bool:
        """Wait until all blocks have installed a version; without blocks, until a worker signals anything.

        False at the deadline, or if a block that has not installed it was closed or needs ``attention``. Raises what
        a signal handler raises.
        """

    def want_freed(self, wanted: bool, /) -> None:
        """Set whether workers signal when they cease to use a slot."""

    def attention(self, block: int, /) -> None:
        """End a wait for this block, once."""

class WorkerWords:
    """A worker's words of an arena, and the hook that the gate calls for its receiver. Used inside the gate.

    ``answer``, ``set_wakeups``, ``usual(None)`` and ``close`` are for any thread.

    Attributes:
        version: what is installed.
        failed_version: the newest version that could not be installed.
        bound_slot: the slot that the model is bound to; -1 if it has memory of its own.
        hold: whether that slot is needed between forwards as well.
        fulfilled: the serial number of the requirements that are known to be met.
        announced_at: when the control thread saw the next version, on ``time.perf_counter``; 0.0 if it did not.
        used, used_at: the version that forwards have used last, and when first, on ``time.perf_counter``.
        receiver: its ``poll_update`` and ``leaving_gate`` do what this object does not.
    """

    version: int
    failed_version: int
    bound_slot: int
    hold: bool
    fulfilled: int
    announced_at: float
    used: int
    used_at: float
    receiver: Any
    def __init__(
        self, memory: Any, capacity: int, block: int, signal: int, binds: bool, plans: list[PackPlan], /
    ) -> None: ...
    def usual(self, installer: Installer | None, /) -> None:
        """Let this object install usual updates by ``installer``; None: the receiver is called for everything."""

    def take(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Mark as used the slot of the published version, or else that of the model; and that of a pending version.

        Returns:
            ``(version, slot, acknowledge)`` of the published and of the pending version; 0, if it is not new here.
        """

    def release(self) -> None:
        """Use no slot any more. Idempotent."""

    def answer(self, version: int, acknowledge: bool, wait: float, apply: float, /) -> None:
        """Tell the trainer that a version is installed; signal it if it waits for that."""

    def set_wakeups(self, wanted: bool, /) -> None:
        """Set whether the trainer wakes this worker for an update that need not be acknowledged."""

    def close(self) -> None:
        """Drop all references: the hook does nothing from then on. Idempotent."""

    def poll_update(self) -> bool:
        """Called by the gate before a forward."""

    def leaving_gate(self, forward: bool, /) -> None:
        """Called by the gate when a thread leaves it."""
