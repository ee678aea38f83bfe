"""Trainer and workers on one GPU: weights stay in its memory, which the processes share (CUDA IPC)."""

from __future__ import annotations

from typing import ClassVar, Unpack

import torch

from wsync.control.rendezvous import Rendezvous
from wsync.errors import NotConnected
from wsync.media.cuda import CudaMedium, with_index
from wsync.registry import SchemeOptions
from wsync.scheme import WeightSyncScheme
from wsync.weights.strategy import Format


class CudaWeightSyncScheme(WeightSyncScheme):
    """Weight synchronization between processes with models on one GPU.

    An update is copied twice, on the GPU: by the trainer into a buffer, and by each worker from there into its own.
    Nothing goes through main memory. A worker that is killed keeps the memory of the trainer's buffers allocated until
    the trainer ends, as PyTorch's shared CUDA tensors do.

    Args:
        device: the GPU, as PyTorch names it in the trainer and in each worker.
        strategy, sync, options: as in ``WeightSyncScheme``; ``bind`` has no effect.
    """

    name = "cuda"
    collectors: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        strategy: Format = "tensordict",
        sync: bool = True,
        *,
        device: str = "cuda:0",
        **options: Unpack[SchemeOptions],
    ) -> None:
        super().__init__(strategy, sync, **options)
        self.bind = False
        self._device = device
        if torch.device(device).type != "cuda":
            raise ValueError(f"device is a GPU ('cuda:0'), not '{device}'")

    @property
    def device(self) -> torch.device:
        return with_index(self._device)

    def make_medium(self, worker_idx: int) -> CudaMedium:
        return CudaMedium()

    def create_rendezvous(self) -> Rendezvous:
        if not torch.cuda.is_available():
            raise NotConnected("there is no GPU that this process can use: use MultiProcessWeightSyncScheme instead")
        return super().create_rendezvous()
