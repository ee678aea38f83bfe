"""Memory that a GPU copies from and to directly (*pinned*): several times as fast as a copy of other memory."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

_log = logging.getLogger(__name__)


class PinnedMapping(mmap.mmap):
    """A mapping of memory; pinned while it exists, once ``pin`` was called in a process that uses a GPU.

    The arguments are those of ``mmap.mmap``.
    """

    _pinned_by = -1  # id of the process
    _address = 0
    _gpu = -1

    def pin(self) -> None:
        """Pin the memory, if this process uses a GPU. Called once.

        Memory that CUDA does not pin remains usable; copies are slower.
        """
        gpu = _gpu_in_use()
        if gpu < 0:
            return
        self._address, self._gpu = ctypes.addressof(ctypes.c_char.from_buffer(self)), gpu
        with torch.cuda.device(gpu):
            runtime: Any = torch.cuda.cudart()
            result = int(runtime.cudaHostRegister(self._address, len(self), 0))
            if not result:
                self._pinned_by = os.getpid()
                return
            _log.debug("%d bytes were not pinned: CUDA error %d", len(self), result)
            with suppress(RuntimeError):  # CUDA keeps the error, and the next kernel of PyTorch would raise it
                torch.zeros(1, device="cuda")

    def __del__(self) -> None:
        # Before it is unmapped: CUDA does not pin an address range that is registered as pinned. A forked child cannot
        # use CUDA, and at interpreter exit there is no need.
        if self._pinned_by == os.getpid() and not sys.is_finalizing():
            with torch.cuda.device(self._gpu):
                runtime: Any = torch.cuda.cudart()
                runtime.cudaHostUnregister(self._address)


def _gpu_in_use() -> int:
    """Return a GPU that this process uses; -1 if it uses none.

    CUDA takes some hundred megabytes on a GPU that a process begins to use. The current GPU may be an unused one: in
    each new thread it is number 0.
    """
    if torch.cuda.is_initialized():
        for gpu in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(gpu):  # pyright: ignore[reportAttributeAccessIssue]
                return gpu
    return -1


def zeros(nbytes: int) -> Tensor:
    """Return ``uint8[nbytes]`` in main memory, zero; pinned if this process uses a GPU."""
    if not nbytes or _gpu_in_use() < 0:
        return torch.zeros(nbytes, dtype=torch.uint8)
    memory = PinnedMapping(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.pin()
    return torch.frombuffer(memory, dtype=torch.uint8)
