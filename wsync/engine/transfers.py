"""How the bytes of a version travel to one engine: in HTTP bodies, or by a transfer that the user gives."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from wsync.control.settings import dump_tensor_layout
from wsync.engine import protocol
from wsync.engine.client import EngineClient, EngineError
from wsync.engine.differences import Base, Differences, range_of
from wsync.weights.layout import Layout
from wsync.weights.tensor_file import dump_tensors


class EngineTransfer(Protocol):
    """Takes versions to one engine. vLLM's ``TrainerWeightTransferEngine`` has this method."""

    def send_weights(self) -> None:
        """Send what its source has now: phases start, update and finish.

        Called once per update, by the engine's own thread. Whatever it raises, the trainer raises as ``WorkerFailed``.
        """
        ...


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
        checksum: the checksum of the packed bytes.
        base: the version that the engine has, as far as the trainer can tell; None if it is not known.
        differences: to older versions; None: the full version is sent.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.device: torch.device | str | None = None
        self.views: Sequence[Tensor] = ()
        self.checksum = 0
        self.base: Base | None = None
        self.differences: Differences | None = None

    def metadata(self) -> list[ParamMeta]:
        """Return name, dtype and shape of every tensor, in the order of iteration."""
        entries = zip(self.layout.names, self.layout.dtypes, self.layout.shapes, strict=True)
        return [ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in entries]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the ``(name, tensor)`` pairs of the version. Called by the engine's thread, within ``send_weights``."""
        for name, view in zip(self.layout.names, self.views, strict=True):
            yield name, view if self.device is None else view.to(self.device)

    def held_names(self) -> None:
        """Return None. vLLM calls it for the tensors that this process holds; None means all."""


MakeTransfer = Callable[[EngineClient, VersionSource], EngineTransfer]
"""Makes the transfer to one engine. Called by the engine's thread before its first version, as phase 1 (init)."""


class BodyTransfer:
    """Sends each version as HTTP bodies: see ``protocol``.

    Args:
        client: the client of the engine.
        source: has the weights.
        chunk_bytes: the most bytes of tensors in one body; a tensor that is larger has a body of its own.
        delta: whether versions may be sent as differences.

    Raises:
        EngineError: the engine has refused the layout.
        LayoutMismatch: there is extra state, or a dtype that safetensors files cannot have.
    """

    def __init__(self, client: EngineClient, source: VersionSource, chunk_bytes: int, *, delta: bool) -> None:
        self._client = client
        self._source = source
        self._session = secrets.token_hex(8)
        layout = dump_tensor_layout(source.layout, "sent over HTTP")
        self._groups = list(protocol.groups_of(source.layout, chunk_bytes))
        client.init_weight_transfer_engine(
            {
                "transfer": protocol.TRANSFER,
                "session": self._session,
                "layout": layout,
                "chunk_bytes": chunk_bytes,
                "delta": delta,
            }
        )

    def send_weights(self) -> None:
        """See ``EngineTransfer``.

        Raises:
            EngineError: a request failed.
        """
        client, source = self._client, self._source
        version = str(client.version)
        base, carried = self._start(version), 0
        for group in self._groups:
            body, size = self._body(group, version, base)
            client.send_body(body)
            carried += size
        client.finish_weight_update(version, session=self._session, checksum=f"{source.checksum:016x}")
        if source.differences is not None:
            source.differences.note_carried(carried)

    def _start(self, version: str) -> Base | None:
        """Begin a version; return the one that the engine has, to which differences may be sent."""
        base, fields = self._source.base, {"session": self._session, "weight_version": version}
        if base is not None:
            try:
                self._client.start_weight_update({**fields, "base": str(base.version)})
            except EngineError as error:
                if error.reason != protocol.NO_BASE:
                    raise
            else:
                return base
        self._client.start_weight_update(fields)
        return None

    def _body(self, group: Sequence[int], version: str, base: Base | None) -> tuple[list[bytes | memoryview], int]:
        """Return a body, and how many bytes of weights, or of a difference, are in it."""
        source, (begin, end) = self._source, range_of(self._source.layout, group)
        difference = None
        if base is not None and source.differences is not None and begin < end:
            difference = source.differences.difference(base, begin, end)
        metadata = {"session": self._session, "weight_version": version}
        if difference is None:
            return dump_tensors(source.layout, source.views, group, metadata), end - begin
        assert base is not None, "there is a difference to it"
        metadata |= {"base": str(base.version), "begin": str(begin), "end": str(end)}
        return protocol.make_difference_body(difference, metadata), len(difference)
