"""The medium of two processes on one GPU: the worker maps each of the trainer's buffers once (CUDA IPC).

trainer   Offer, the buffer's index, the first time also how to map it ─→ worker: copies it, on the GPU
trainer   ←────────────────────────────────────────────── copied ── worker
"""

from __future__ import annotations

import asyncio
import pickle
from multiprocessing.reduction import ForkingPickler

import torch
from msgspec.structs import replace
from torch import Tensor

from wsync.control.loop import run_blocking
from wsync.control.session import Medium
from wsync.control.wire import Link, Offer, Side
from wsync.weights.layout import Buffer


def with_index(device: str) -> torch.device:
    """Return a device; a GPU without an index as the one of this thread: other threads may have another."""
    found = torch.device(device)  # CUDA is not initialised here: before that, each thread has the first GPU
    if found.type != "cuda" or found.index is not None:
        return found
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


class CudaMedium(Medium):
    """One end of a connection between two processes on one GPU."""

    def __init__(self) -> None:
        self._exported: dict[int, int] = {}  # address of a buffer -> its index; on the sender
        self._mapped: dict[int, Tensor] = {}  # index -> the sender's buffer; in the worker
        self._said = asyncio.Queue[Side | None]()  # by the other end; None: the connection has ended

    async def send(self, link: Link, offer: Offer, payload: Buffer | bytes) -> None:
        if isinstance(payload, bytes):
            await super().send(link, offer, payload)
            return
        flat = payload.flat
        known = flat.data_ptr() in self._exported
        index = self._exported.setdefault(flat.data_ptr(), len(self._exported))
        await run_blocking("transfer", torch.cuda.synchronize, flat.device)  # the weights have been packed
        handle = b"" if known else bytes(ForkingPickler.dumps(flat))
        await link.send(replace(offer, medium=True))
        await link.send(Side(index, data=handle))
        await self._next()

    async def receive(self, link: Link, offer: Offer, into: Buffer) -> None:
        await run_blocking("transfer", self._copy, await self._next(), into.flat)
        await link.send(Side())

    def _copy(self, said: Side, into: Tensor) -> None:
        if said.data:
            self._mapped[said.number] = pickle.loads(said.data)
        into.copy_(self._mapped[said.number])
        torch.cuda.current_stream(into.device).synchronize()

    async def _next(self) -> Side:
        said = await self._said.get()
        if said is None:
            self.close()  # ends the other waits
            raise ConnectionError("the connection has ended")
        return said

    def on_side(self, said: Side) -> None:
        self._said.put_nowait(said)

    def close(self) -> None:
        self._said.put_nowait(None)
        self._mapped.clear()
