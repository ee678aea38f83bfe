"""How the bytes of a version travel to one engine: in HTTP bodies, or by a transfer that the user gives."""

from __future__ import annotations

import asyncio
import base64
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

import torch
from torch import Tensor

from wsync.control.loop import run_blocking
from wsync.engine import protocol
from wsync.engine.client import EngineClient, EngineError
from wsync.transforms.delta import Delta
from wsync.update import Update
from wsync.weights.layout import ALIGNMENT, Layout


class ParamMeta(NamedTuple):
    """A tensor's name, dtype and shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class VersionSource:
    """The weights that are sent to one engine, of one version: what vLLM calls a ``WeightSource``.

    Args:
        layout: the layout of the weights.

    Attributes:
        layout: as given.
        device: where the tensors are copied to when they are read; None: they stay where they were packed (the CPU).
        views: the packed tensors of the version, in the layout's order. Valid during ``send_weights``.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.device: torch.device | str | None = None
        self.views: Sequence[Tensor] = ()

    def metadata(self) -> list[ParamMeta]:
        """Return name, dtype and shape of every tensor, in the order of iteration."""
        entries = zip(self.layout.names, self.layout.dtypes, self.layout.shapes, strict=True)
        return [ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in entries]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the ``(name, tensor)`` pairs of the version. Called within ``send_weights``."""
        for name, view in zip(self.layout.names, self.views, strict=True):
            yield name, view if self.device is None else view.to(self.device)

    def held_names(self) -> None:
        """Return None. vLLM calls it for the tensors that this process holds; None means all."""


MakeTransfer = Callable[[EngineClient, VersionSource], Any]
"""Makes the transfer to one engine, as phase 1 (init). Its ``send_weights()`` sends what the source has now, by the
phases start, update and finish, as vLLM's ``TrainerWeightTransferEngine`` does. Both are called in threads of their
own. Exceptions that they raise, the trainer raises as ``WorkerFailed``."""


class Differences:
    """The differences of one version to others, each made once for all engines that need it."""

    def __init__(self, delta: Delta, update: Update) -> None:
        self._delta = delta
        self._update = update
        self._made: dict[tuple[Update, int, int], asyncio.Future[bytes | None]] = {}

    async def to(self, base: Update, begin: int, end: int) -> bytes | None:
        """Return the difference of the bytes from ``begin`` to ``end``; None if they themselves are hardly larger."""
        key, new = (base, begin, end), self._update.buffer
        if key not in self._made:
            old = base.buffer.memory[begin:end]
            making = run_blocking("delta", self._delta.difference, old, new.memory[begin:end], new.layout.width)
            self._made[key] = asyncio.ensure_future(making)
        return await asyncio.shield(self._made[key])  # another engine may wait for it, too


class BodyTransfer:
    """Sends versions as HTTP bodies of at most ``chunk_bytes``: see ``protocol``. Used by the control thread."""

    def __init__(self, client: EngineClient, layout: Layout, chunk_bytes: int) -> None:
        self._client = client
        self._layout = layout
        self._chunk_bytes = -(-chunk_bytes // ALIGNMENT) * ALIGNMENT
        self._session = secrets.token_hex(8)

    async def initialise(self, *, delta: bool) -> None:
        """Phase init; ``delta``: whether versions may be sent as differences. EngineError: the engine has refused."""
        info = {
            "transfer": protocol.TRANSFER,
            "session": self._session,
            "layout": base64.b64encode(self._layout.encode()).decode(),
            "chunk_bytes": self._chunk_bytes,
            "delta": delta,
        }
        await self._client.request("init", protocol.INIT, {"init_info": info})

    async def send(self, update: Update, base: Update | None, differences: Differences | None) -> int:
        """Phases start, update and finish; return how many bytes the bodies had.

        ``base`` is the version that the engine has, as far as the trainer can tell. Without ``differences`` the whole
        tensors are sent.
        """
        named: dict[str, str | int] = {"session": self._session, "weight_version": str(update.version)}
        base = base if differences is not None else None
        try:
            fields = named if base is None else named | {"base": str(base.version)}
            await self._client.request("start", protocol.START, fields)
        except EngineError as error:
            if error.reason != protocol.NO_BASE:
                raise
            base = None
            await self._client.request("start", protocol.START, named)
        carried = 0
        for begin in range(0, self._layout.nbytes, self._chunk_bytes):
            end, query, body = min(begin + self._chunk_bytes, self._layout.nbytes), named, None
            if base is not None and differences is not None:
                body = await differences.to(base, begin, end)
                query = named if body is None else named | {"base": str(base.version)}
            if body is None:
                body = bytes(update.buffer.memory[begin:end])
            carried += len(body)
            route = f"{protocol.UPDATE}?{urlencode(query | {'begin': begin, 'end': end})}"
            await self._client.request("update", route, body=body)
        checksum = {"session": self._session, "checksum": f"{update.checksum:016x}"}
        await self._client.finish(str(update.version), checksum, named=True)
        return carried
