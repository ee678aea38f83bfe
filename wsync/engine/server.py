"""The engine's half of the protocol: weights are collected and checked first, then loaded inside the gate."""

from __future__ import annotations

import asyncio
import base64
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from wsync.control.session import checksum_of
from wsync.engine import protocol
from wsync.errors import LayoutMismatch, WeightSyncError, as_text
from wsync.gate import entered_for_forward_of, process_gate
from wsync.weights.layout import Buffer, Layout
from wsync.weights.snapshot import require_digests
from wsync.weights.targets import Destination

Fields = Mapping[str, Any]
_FIELDS_BYTES = {protocol.INIT: 64 << 20, protocol.VERIFY: 64 << 20}  # of JSON, at most
_TAKEN = "another trainer has initialised this engine since: each engine has one trainer"
_STALLED = 60.0  # longest time without a byte of a body, in seconds


class EngineApp:
    """An ASGI application by which a trainer updates an engine: ``engine_app`` documents the arguments.

    A phase raises ``HTTPException`` if it is refused: no weights have changed. After a refused *init* the engine is not
    initialised.

    Attributes:
        version: the name of the weights that the engine has; "0" before the first update. Inside ``wsync.gate()`` it
            does not change.
    """

    def __init__(self, destination: Destination, max_bytes: int, token: str | None) -> None:
        self.version = "0"
        self._destination, self._max_bytes = destination, max_bytes
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._session = ""  # the random name under which a trainer has initialised what follows
        self._buffer: Any = None  # memory for a version
        self._target: Any = None  # what takes it
        self._complete = False  # the buffer has a version that was verified
        self._mixed = ""  # why weights may be of two versions
        self._updating = asyncio.Lock()  # one phase at a time
        self._receiving: asyncio.Timeout | None = None  # ends the body that is being received
        self._loading = ThreadPoolExecutor(1, "wsync-load")
        routes = [
            self._phase(protocol.INIT, self._init),
            self._phase(protocol.START, self._require_session),  # nothing else: the checksum tells versions apart
            _route(protocol.UPDATE, self._update),
            self._phase(protocol.FINISH, self._finish),
            self._phase(protocol.VERIFY, self._verify),
            _route(protocol.WORLD_SIZE, self._world_size, "GET"),
        ]
        refused = {HTTPException: lambda request, error: _error(error.status_code, error.detail)}
        self._app = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=refused)

    def close(self) -> None:
        """End the thread that loads weights. The server's end calls it."""
        self._loading.shutdown(wait=False)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request (an ASGI application); without the token nothing of it is looked at."""
        if scope["type"] == "http" and self._authorization is not None:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._authorization):
                return await _error(401, "the token is missing or wrong")(scope, receive, send)
        await self._app(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.close()

    def _phase(self, path: str, function: Callable[[Fields], Fields | None]) -> Route:
        """Return a route that calls ``function`` in the thread that loads weights: the server goes on answering."""

        async def run(request: Request) -> Fields | None:
            content = b"".join([piece async for piece in _pieces(request, _FIELDS_BYTES.get(path, 1 << 16))])
            try:
                fields = msgspec.json.decode(content, type=dict[str, Any])
            except (msgspec.DecodeError, RecursionError) as error:
                raise HTTPException(400, f"the body is not JSON of an object: {error}") from error
            if path == protocol.INIT and self._receiving is not None:  # of a trainer that may be gone
                self._receiving.reschedule(0.0)
            async with self._updating:
                return await asyncio.get_running_loop().run_in_executor(self._loading, function, fields)

        return _route(path, run)

    # --- phases ---

    def _init(self, fields: Fields) -> None:
        """Make room for a version, if weights of this layout fit."""
        info = fields.get("init_info")
        if not isinstance(info, dict) or info.get("transfer") != protocol.TRANSFER:
            raise HTTPException(400, f"init_info.transfer is '{protocol.TRANSFER}' here, not {str(info)[:99]}")
        name = _text(info, "session")
        try:
            layout = Layout.decode(base64.b64decode(_text(info, "layout").encode(), validate=True))
        except ValueError as error:
            raise HTTPException(400, f"init_info.layout is malformed: {error}") from error
        if layout.nbytes > self._max_bytes:
            raise HTTPException(413, f"a version has {layout.nbytes} bytes, and max_bytes is {self._max_bytes}")
        if layout.extra:
            raise HTTPException(422, "extra state (pickles) is not accepted over HTTP")
        self._session, self._buffer, self._target, self._complete = "", None, None, False
        try:
            self._target = process_gate().call_without_forward(self._destination.target, layout, bind=False)
        except LayoutMismatch as error:
            raise HTTPException(422, f"LayoutMismatch: {error}") from error
        self._session, self._buffer = name, Buffer.new(layout)

    def _require_session(self, fields: Fields) -> None:
        name = _text(fields, "session")
        if not self._session:
            why = f"POST {protocol.INIT} comes first: an engine that was started again is readmitted"
            raise HTTPException(409, why)
        if self._session != name:
            raise HTTPException(409, _TAKEN)

    async def _update(self, request: Request) -> None:
        async with self._updating:
            self._require_session(request.query_params)
            place, size = self._buffer.memory, 0
            expected, self._complete = _text(request.query_params, "checksum"), False
            try:
                async with asyncio.timeout(None) as self._receiving:
                    async for piece in _pieces(request, len(place)):
                        place[size : size + len(piece)] = piece
                        size += len(piece)
            except TimeoutError:
                raise HTTPException(409, _TAKEN) from None
            finally:
                self._receiving = None
            found = await asyncio.get_running_loop().run_in_executor(self._loading, checksum_of, place, b"")
            if expected != f"{found:016x}":
                raise HTTPException(409, f"the version is incomplete or corrupt: checksum {found:016x}, not {expected}")
            self._complete = True

    def _finish(self, fields: Fields) -> Fields:
        """Load the version that has arrived, inside the gate."""
        self._require_session(fields)
        version = _text(fields, "weight_version")
        if not self._complete:
            raise HTTPException(409, f"no version has arrived whole: POST {protocol.UPDATE} comes first")
        return process_gate().call_without_forward(self._install, version, time.perf_counter())

    def _install(self, version: str, asked: float) -> Fields:
        began = time.perf_counter()
        try:
            self._target.install(self._buffer.views)
            self._set_mixed("")
        finally:
            if self._target.mixed:
                self._set_mixed(
                    f"this engine may have weights of two versions, because the install of version {version} failed "
                    "half-way: send again"
                )
        self.version = version
        seconds = {"wait_seconds": began - asked, "apply_seconds": time.perf_counter() - began}
        return {"weight_version": version, **seconds}

    def _verify(self, fields: Fields) -> None:
        self._require_session(fields)
        args = self._destination.model, msgspec.convert(fields.get("digests"), dict[str, int]), self.version
        process_gate().call_without_forward(require_digests, *args)

    def _set_mixed(self, why: str) -> None:
        if bool(why) != bool(self._mixed):
            (process_gate().attach if why else process_gate().detach)(self)
        self._mixed = why

    def poll_update(self) -> bool:
        """Refuse forwards while weights are mixed (a ``GateHook``, attached meanwhile)."""
        if self._mixed and entered_for_forward_of(self._destination.model):
            raise WeightSyncError(self._mixed)
        return False

    def leaving_gate(self, forward: bool) -> None:
        """Nothing is in use."""

    async def _world_size(self, request: Request) -> Fields:
        return {"world_size": 1}


def _text(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise HTTPException(400, f"the field '{name}' is missing, or no text")
    return value


def _route(path: str, endpoint: Callable[[Request], Awaitable[Fields | None]], method: str = "POST") -> Route:
    async def serve(request: Request) -> JSONResponse:  # errors are answered as JSON
        try:
            return JSONResponse(await endpoint(request) or {})
        except HTTPException:
            raise
        except Exception as error:  # noqa: BLE001  whatever the engine raised goes to the trainer, which raises it
            return _error(500, as_text(error))

    return Route(path, serve, methods=[method])


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status, {"connection": "close"})  # part of the body may be unread


async def _pieces(request: Request, limit: int) -> AsyncIterator[bytes]:
    """Yield the body of a request, which has at most ``limit`` bytes and does not stall."""
    left, pieces = limit, request.stream()
    try:
        while piece := await asyncio.wait_for(anext(pieces, b""), _STALLED):
            left -= len(piece)
            if left < 0:
                raise HTTPException(413, f"the body may have {limit} bytes")
            yield piece
    except TimeoutError:
        raise HTTPException(408, f"no byte of the body arrived for {_STALLED} s") from None
    except ClientDisconnect:
        raise HTTPException(400, "the trainer has closed the connection") from None
