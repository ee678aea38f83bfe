"""An engine's weights, as a trainer updates them: collected and checked first, then loaded inside the gate."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wsync.checksum import checksum_of
from wsync.control.settings import layout_in
from wsync.engine import protocol
from wsync.engine.differences import entries_in
from wsync.errors import LayoutMismatch
from wsync.gate import MixedWeightsGuard, process_gate
from wsync.transforms.delta import apply_difference, require_zstandard
from wsync.weights.layout import Layout
from wsync.weights.targets import Destination, Target, mixed_weights
from wsync.weights.tensor_file import Entry, check_dtypes, find_misfit


class Refused(Exception):
    """A request is refused; no weights have changed. After a refused *init* the engine is not initialised.

    Attributes:
        status: the status of the answer.
        reason: a word for programs.
    """

    def __init__(self, status: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class _Session:
    """What one trainer has initialised.

    Args:
        name: the trainer's random name for it.
        layout: the layout of the weights.
        chunk_bytes: the most bytes of tensors in a body.
        target: takes the weights.
    """

    def __init__(self, name: str, layout: Layout, chunk_bytes: int, target: Target) -> None:
        self.name = name
        self.target = target
        self.layout = layout
        self.body = bytearray(protocol.body_limit(layout, chunk_bytes))  # each body is read into it
        self.flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self.views = layout.views(self.flat)
        self.indices = {layout.names[index]: index for index in layout.leaders}
        self.receiving: str | None = None  # that is being received
        self.missing: set[str] = set()
        self.held: str | None = None  # the version that ``flat`` holds whole; None while it mixes two
        # the version that this update's differences are relative to; None: only full tensors are accepted
        self.announced_base: str | None = None

    def keep(self, content: Tensor, entries: Mapping[str, Entry]) -> None:
        """Copy the tensors of a checked body from its bytes, ``content``."""
        self.held = None
        for name, entry in entries.items():
            index = self.indices[name]
            view, (offset, size) = self.views[index], self.layout.byte_ranges[index]
            received = content[entry.begin : entry.end]
            if view.is_contiguous():
                self.flat[offset : offset + size].copy_(received)
            else:  # strides of its own; in the body it is row-major
                view.copy_(received.clone().view(view.dtype).reshape(view.shape))
            self.missing.discard(name)

    def apply(self, difference: memoryview, begin: int, end: int) -> None:
        """Turn the bytes from ``begin`` to ``end``, which are those of the base, into those of the new version.

        Raises:
            ValueError: the difference is malformed, or the range has a part of a tensor, or one that has arrived.
        """
        entries = entries_in(self.layout, begin, end)
        names = {self.layout.names[index] for index in entries}
        if not {self.layout.names[index] for index in entries if self.layout.byte_ranges[index][1]} <= self.missing:
            raise ValueError(f"tensors in the bytes {begin} to {end} have arrived already")
        part = self.flat[begin:end]
        apply_difference(difference, part, part)
        self.held = None
        self.missing -= names


class EngineWeights:
    """The weights of one engine. Any thread calls; one call runs at a time.

    Args:
        destination: takes them.
        version: the name of those that it has.
        max_bytes: the largest size of a version.

    Attributes:
        version: the name of those that it has. Changes inside the gate.
    """

    def __init__(self, destination: Destination, version: str, max_bytes: int) -> None:
        self.version = version
        self._guard = MixedWeightsGuard(destination.model)
        self._destination = destination
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._session: _Session | None = None

    def body_buffer(self) -> bytearray:
        """Return the memory into which a body with weights is read; its length is the largest size of one.

        Raises:
            Refused: no trainer has initialised this engine.
        """
        return self._require_session().body

    def initialise(self, fields: Mapping[str, Any]) -> None:
        """Phase 1: check that weights of a layout would fit, and make room for a version.

        Raises:
            Refused: a field is wrong, or the weights do not fit, or are too large.
        """
        info = fields.get("init_info")
        if not isinstance(info, dict):
            raise Refused(400, "init_info is missing")
        if info.get("transfer") != protocol.TRANSFER:
            raise Refused(400, f"init_info.transfer is '{protocol.TRANSFER}' here, not {info.get('transfer')!r}")
        name, chunk_bytes = _text(info, "session"), info.get("chunk_bytes")
        if type(chunk_bytes) is not int or not 0 < chunk_bytes <= self._max_bytes:
            raise Refused(413, f"init_info.chunk_bytes is a number from 1 to {self._max_bytes}, not {chunk_bytes!r}")
        try:
            layout = layout_in(_text(info, "layout").encode())
        except ValueError as error:
            raise Refused(400, f"init_info.layout is malformed: {error}") from error
        if layout.nbytes > self._max_bytes:
            raise Refused(
                413, f"a version has {layout.nbytes} bytes, and this engine takes {self._max_bytes} (max_bytes)"
            )
        if layout.extra:
            raise Refused(422, "extra state (pickles) is not accepted over HTTP")
        if info.get("delta") is True:
            try:
                require_zstandard()
            except ImportError as error:
                raise Refused(422, f"ImportError: {error}") from error
        with self._lock:
            self._session = None
            try:
                check_dtypes(layout)
                target = process_gate().call_without_forward(self._destination.target, layout, bind=False)
            except LayoutMismatch as error:
                raise Refused(422, f"LayoutMismatch: {error}") from error
            self._session = _Session(name, layout, chunk_bytes, target)

    def start(self, fields: Mapping[str, Any]) -> None:
        """Phase 2: forget what has been received of another version.

        Raises:
            Refused: another trainer has initialised this engine, or none has; or the base is not here.
        """
        with self._lock:
            session = self._current(_text(fields, "session"))
            version, base = _text(fields, "weight_version"), _text(fields, "base") if "base" in fields else None
            if base is not None and base != session.held:
                raise Refused(409, f"version {base}, to which differences would be, is not here", protocol.NO_BASE)
            session.receiving, session.announced_base = version, base
            session.missing = set(session.indices)

    def add(self, body: memoryview) -> None:
        """Phase 3: keep some tensors of the version.

        Raises:
            Refused: the body is malformed, or its tensors are not in the layout, or are of another version.
        """
        with self._lock:
            try:
                entries, metadata, content = protocol.parse_body(body)
            except ValueError as error:
                raise Refused(400, str(error)) from error
            session = self._begun(metadata)
            if "base" in metadata:
                _apply_difference(session, entries, metadata, content)
                return
            misfit = find_misfit(entries, session.layout, session.indices)
            if misfit:
                raise Refused(422, f"LayoutMismatch: {misfit}")
            session.keep(protocol.as_tensor(content), entries)

    def finish(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Phase 4: check that the version is whole, then load it inside the gate.

        Returns:
            ``weight_version``, ``wait_seconds`` for the gate, and ``apply_seconds``.

        Raises:
            Refused: it is not whole, or damaged; nothing was loaded.
            Exception: whatever the loading function raised.
        """
        with self._lock:
            session = self._begun(fields)
            if session.missing:
                some = ", ".join(f"'{name}'" for name in sorted(session.missing)[:8])
                raise Refused(409, f"{len(session.missing)} tensor(s) have not arrived: {some}; nothing was applied")
            expected, found = _text(fields, "checksum"), f"{checksum_of(session.flat, b''):016x}"
            if expected != found:
                raise Refused(409, f"the version is corrupt: checksum {found}, not {expected}; nothing was applied")
            version, session.receiving = session.receiving, None
            assert version is not None, "_begun() has checked it"
            session.held = version
            asked = time.perf_counter()
            return process_gate().call_without_forward(self._install, session, version, asked)

    def _install(self, session: _Session, version: str, asked: float) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            session.target.install(session.views)
        except BaseException:
            if session.target.mixed:
                self._guard.set(mixed_weights("this engine", f"version {version}"))
            raise
        self._guard.set("")
        self.version = version
        seconds = {"wait_seconds": began - asked, "apply_seconds": time.perf_counter() - began}
        return {"weight_version": version, **seconds}

    def require_whole(self) -> None:
        """Check that no load has failed half-way since the last one that has succeeded.

        Raises:
            Refused: the weights may be of two versions.
        """
        if self._guard.why:
            raise Refused(503, self._guard.why)

    def _require_session(self) -> _Session:
        session = self._session
        if session is None:
            raise Refused(409, f"POST {protocol.INIT} comes first", protocol.NOT_INITIALISED)
        return session

    def _current(self, name: str) -> _Session:
        session = self._require_session()
        if session.name != name:
            raise Refused(409, "another trainer has initialised this engine since: each engine has one trainer")
        return session

    def _begun(self, fields: Mapping[str, Any]) -> _Session:
        session, version = self._current(_text(fields, "session")), _text(fields, "weight_version")
        if session.receiving != version:
            raise Refused(409, f"version {version} has not been started, or another one has been started since")
        return session


def _apply_difference(
    session: _Session, entries: Mapping[str, Entry], metadata: Mapping[str, Any], content: memoryview
) -> None:
    base, range_ = _text(metadata, "base"), [_text(metadata, name) for name in ("begin", "end")]
    if session.announced_base is None or base != session.announced_base:
        raise Refused(409, f"the difference is to version {base}, which {protocol.START} has not named")
    if entries.keys() != {protocol.DIFFERENCE} or not all(one.isdecimal() and len(one) < 20 for one in range_):
        raise Refused(400, f"a body with a base has one tensor, '{protocol.DIFFERENCE}', and a range of bytes")
    try:
        session.apply(content, *map(int, range_))
    except ValueError as error:
        raise Refused(422, str(error)) from error


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise Refused(400, f"the field '{name}' is missing, or no text")
    return value
