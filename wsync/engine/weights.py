"""An engine's weights, as a trainer updates them: collected and checked first, then loaded inside the gate."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from typing import Any

import torch

from wsync.control.session import checksum_of
from wsync.engine import protocol
from wsync.errors import LayoutMismatch, WeightSyncError
from wsync.gate import entered_for_forward_of, process_gate
from wsync.weights.binding import Target
from wsync.weights.layout import Layout
from wsync.weights.targets import Destination, mixed_weights


class Refused(Exception):
    """A request is refused; no weights have changed. After a refused *init* the engine is not initialised."""

    def __init__(self, status: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class _Session:
    """What one trainer has initialised, under a random name.

    Attributes:
        flat: the version that is being received.
        receiving: the name of that version; None outside *start* and *finish*.
        arrived: how many of its bytes are here.
    """

    def __init__(self, name: str, layout: Layout, target: Target) -> None:
        self.name, self.target = name, target
        self.flat = torch.zeros(layout.nbytes, dtype=torch.uint8)
        self.views = layout.views(self.flat)
        self.receiving: str | None = None
        self.arrived = 0


class EngineWeights:
    """The weights of one engine. One request at a time calls the methods of the phases; ``poll_update`` is the gate's.

    Attributes:
        version: the name of those that it has; "0" before the first update. Changes inside the gate.
        mixed: why they may be of two versions; empty if they are not.
    """

    def __init__(self, destination: Destination, max_bytes: int) -> None:
        self.version = "0"
        self.mixed = ""
        self._destination = destination
        self._max_bytes = max_bytes
        self._session: _Session | None = None

    def initialise(self, fields: Mapping[str, Any]) -> None:
        """Phase 1: make room for a version; Refused: weights of this layout do not fit, or are too large."""
        info = fields.get("init_info")
        if not isinstance(info, dict) or info.get("transfer") != protocol.TRANSFER:
            raise Refused(400, f"init_info.transfer is '{protocol.TRANSFER}' here, not {str(info)[:99]}")
        name = _text(info, "session")
        try:
            layout = Layout.decode(base64.b64decode(_text(info, "layout").encode(), validate=True))
        except Exception as error:  # whatever decoding raises
            raise Refused(400, f"init_info.layout is malformed: {error}") from error
        if layout.nbytes > self._max_bytes:
            raise Refused(413, f"a version has {layout.nbytes} bytes, and max_bytes is {self._max_bytes}")
        if layout.extra:
            raise Refused(422, "extra state (pickles) is not accepted over HTTP")
        self._session = None
        try:
            target = process_gate().call_without_forward(self._destination.target, layout, bind=False)
        except LayoutMismatch as error:
            raise Refused(422, f"LayoutMismatch: {error}") from error
        self._session = _Session(name, layout, target)

    def start(self, fields: Mapping[str, Any]) -> None:
        """Phase 2: forget what has been received of another version."""
        session = self._current(fields)
        session.receiving, session.arrived = _text(fields, "weight_version"), 0

    def place(self, fields: Mapping[str, Any]) -> memoryview:
        """Phase 3: return where the next bytes of the version go; Refused: they are others."""
        session = self._begun(fields)
        begin, end = (int(text) if (text := _text(fields, name)).isdecimal() else -1 for name in ("begin", "end"))
        if begin != session.arrived or not begin < end <= len(session.flat):
            raise Refused(409, f"bytes {begin} to {end} are not the next ones: {session.arrived} have arrived")
        return session.flat.numpy().data[begin:end]

    def arrived(self, fields: Mapping[str, Any]) -> None:
        """The bytes are in their place."""
        self._begun(fields).arrived = int(fields["end"])

    def finish(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Phase 4: check that the version is whole, then load it inside the gate; return the fields of the answer.

        Raises:
            Refused: it is not whole, or damaged; nothing was loaded.
            Exception: whatever the loading function raised.
        """
        session, version = self._begun(fields), _text(fields, "weight_version")
        if session.arrived < len(session.flat):
            lacking = f"{session.arrived} of {len(session.flat)} bytes have arrived"
            raise Refused(409, f"the version is not whole: {lacking}; nothing was applied")
        expected, found = _text(fields, "checksum"), f"{checksum_of(session.flat.numpy().data, b''):016x}"
        if expected != found:
            raise Refused(409, f"the version is corrupt: checksum {found}, not {expected}; nothing was applied")
        session.receiving = None
        return process_gate().call_without_forward(self._install, session, version, time.perf_counter())

    def _install(self, session: _Session, version: str, asked: float) -> dict[str, Any]:
        began = time.perf_counter()
        try:
            session.target.install(session.views)
            self._set_mixed("")
        finally:
            if session.target.mixed:
                self._set_mixed(mixed_weights("this engine", f"version {version}"))
        self.version = version
        seconds = {"wait_seconds": began - asked, "apply_seconds": time.perf_counter() - began}
        return {"weight_version": version, **seconds}

    # --- weights of two versions ---

    def _set_mixed(self, why: str) -> None:
        if bool(why) != bool(self.mixed):
            (process_gate().attach if why else process_gate().detach)(self)
        self.mixed = why

    def poll_update(self) -> bool:
        """Refuse forwards while weights are mixed (a ``GateHook``, attached meanwhile)."""
        if self.mixed and entered_for_forward_of(self._destination.model):
            raise WeightSyncError(self.mixed)
        return False

    def leaving_gate(self) -> None:
        """Nothing is in use."""

    def require_whole(self) -> None:
        """Raise ``Refused`` if the weights may be of two versions, because a load has failed half-way."""
        if self.mixed:
            raise Refused(503, self.mixed)

    # --- sessions ---

    def _current(self, fields: Mapping[str, Any]) -> _Session:
        name = _text(fields, "session")
        if self._session is None:
            raise Refused(409, f"POST {protocol.INIT} comes first", protocol.NOT_INITIALISED)
        if self._session.name != name:
            raise Refused(409, "another trainer has initialised this engine since: each engine has one trainer")
        return self._session

    def _begun(self, fields: Mapping[str, Any]) -> _Session:
        session, version = self._current(fields), _text(fields, "weight_version")
        if session.receiving != version:
            raise Refused(409, f"version {version} has not been started, or another one has been started since")
        return session


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise Refused(400, f"the field '{name}' is missing, or no text")
    return value
