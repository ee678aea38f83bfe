"""The engine's half of the protocol: an ASGI application around a function that loads weights."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import json
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from wsync.control.loop import run_blocking
from wsync.engine import protocol
from wsync.engine.generations import Generation, Generations
from wsync.engine.weights import EngineWeights, Refused
from wsync.weights.targets import Destination

Pause = Callable[[protocol.PauseMode], Awaitable[object] | object]
Resume = Callable[[], Awaitable[object] | object]
Endpoint = Callable[[Request], Awaitable[Mapping[str, Any]]]

_LAYOUT_BYTES = 64 << 20  # largest body of /init_weight_transfer_engine, which has the layout
_FIELDS_BYTES = 64 << 10  # largest body of the other requests with JSON
_STALLED = 60.0  # longest time without a byte of a body, in seconds
_DROPPING = 10.0  # seconds in which the rest of a body that is refused is read


class EngineApp:
    """An ASGI application by which a trainer updates an engine: ``engine_app`` documents the arguments."""

    def __init__(
        self,
        destination: Destination,
        token: str | None,
        pause: Pause | None,
        resume: Resume | None,
        version: str,
        max_bytes: int,
        pause_limit: float | None,
    ) -> None:
        weights = self._weights = EngineWeights(destination, version, max_bytes)
        generations = self._generations = Generations(lambda: weights.version, pause_limit)
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._pause: Pause = pause or generations.pause
        self._resume: Resume = resume or generations.resume
        self._paused = False
        self._updating = asyncio.Lock()  # one body at a time is in memory
        self._loading = ThreadPoolExecutor(1, "wsync-load")
        routes = [
            self._phase(protocol.INIT, weights.initialise, "Weight transfer initialized", _LAYOUT_BYTES),
            self._phase(protocol.START, weights.start, "Weight update started"),
            self._route(protocol.UPDATE, self._update),
            self._phase(protocol.FINISH, weights.finish, "Weight update finished"),
            self._route(protocol.PAUSE, self._pause_generation),
            self._route(protocol.RESUME, self._resume_generation),
            self._question(protocol.IS_PAUSED, lambda: {"is_paused": self._paused if pause else generations.paused}),
            self._question(protocol.WEIGHT_INFO, lambda: {"weight_version": self.version}),
            self._question(protocol.WORLD_SIZE, lambda: {"world_size": 1}),
            self._question(protocol.HEALTH, weights.require_whole),
        ]
        handlers: Any = {HTTPException: _no_route}
        self._app = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)

    @property
    def version(self) -> str:
        """The name of the weights that the engine has. Inside ``wsync.gate()`` it does not change."""
        return self._weights.version

    def generation(self) -> AbstractContextManager[Generation]:
        """Return a context manager around one generation, for an engine without pause and resume of its own.

        Each of its steps is made inside ``generation.step()``. A pause acts between two steps::

            with app.generation() as generation:
                while not done:
                    with generation.step():
                        token = next_token(engine)
            generation.weight_versions  # more than one: mixed

        Both wait (block the thread) while generation is paused. ``step`` raises ``GenerationAborted`` when the trainer
        has paused with ``mode=abort``.
        """
        return self._generations.generation()

    def close(self) -> None:
        """End a pause, and the thread that loads weights. The server's end calls it."""
        self._loading.shutdown(wait=False)
        self._generations.resume()  # what waits in a generation would keep the process from ending

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request (an ASGI application); without the token nothing of it is looked at."""
        if scope["type"] == "http" and self._authorization is not None:
            given = dict(scope["headers"]).get(b"authorization", b"")
            public = scope["path"].removeprefix(scope.get("root_path", "")) == protocol.HEALTH
            if not public and not hmac.compare_digest(given, self._authorization):
                return await _error(401, "the token is missing or wrong")(scope, receive, send)
        await self._app(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.close()

    # --- routes ---

    def _route(self, path: str, endpoint: Endpoint, method: str = "POST") -> Route:
        """Return a route that answers errors as JSON."""

        async def serve(request: Request) -> JSONResponse:
            try:
                return JSONResponse(await endpoint(request))
            except Refused as error:
                answer = _error(error.status, str(error), error.reason)
            except Exception:  # noqa: BLE001  whatever the engine raised goes to the trainer, which raises it
                answer = _error(500, traceback.format_exc())
            if method == "POST":
                await _drop_body(request)
            return answer

        return Route(path, serve, methods=[method])

    def _question(self, path: str, answer: Callable[[], Mapping[str, Any] | None]) -> Route:
        async def ask(request: Request) -> Mapping[str, Any]:
            return answer() or {}

        return self._route(path, ask, "GET")

    def _phase(self, path: str, function: Callable[[Any], Any], message: str, limit: int = _FIELDS_BYTES) -> Route:
        async def run(request: Request) -> Mapping[str, Any]:
            fields = await _fields(request, limit)
            async with self._updating:
                return await self._load(message, function, fields)

        return self._route(path, run)

    async def _update(self, request: Request) -> Mapping[str, Any]:
        kind = request.headers.get("content-type", "").split(";")[0].strip()
        if kind != protocol.WEIGHTS:
            raise Refused(415, f"{protocol.UPDATE} takes {protocol.WEIGHTS} here (transfer '{protocol.TRANSFER}')")
        async with self._updating:
            buffer = self._weights.body_buffer()
            body = await _read(request, len(buffer), buffer)
            return await self._load("Weights updated", self._weights.add, dict(request.query_params), body)

    async def _load(self, message: str, function: Callable[..., Mapping[str, Any] | None], *arguments: object) -> Any:
        """Take a phase of an update in the thread that loads weights, so that the server goes on answering."""
        loop = asyncio.get_running_loop()
        return {"message": message, **(await loop.run_in_executor(self._loading, function, *arguments) or {})}

    async def _pause_generation(self, request: Request) -> Mapping[str, Any]:
        mode = request.query_params.get("mode", "abort")
        if mode not in protocol.PAUSE_MODES:
            raise Refused(400, f"mode is one of {', '.join(protocol.PAUSE_MODES)}, not {mode!r}")
        await _call("pause", self._pause, mode)
        self._paused = True
        return {"status": "paused"}

    async def _resume_generation(self, request: Request) -> Mapping[str, Any]:
        await _call("resume", self._resume)
        self._paused = False
        return {"status": "resumed"}


def _error(status: int, message: str, reason: str = "") -> JSONResponse:
    headers = {"connection": "close"}  # a part of the body may not have been read
    return JSONResponse({"error": message, "reason": reason}, status, headers)


async def _no_route(request: Request, error: HTTPException) -> JSONResponse:
    return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}")


async def _call(name: str, function: Callable[..., Any], *arguments: object) -> None:
    """Call a function that may block in a thread of its own; await one that is asynchronous."""
    asynchronous = inspect.iscoroutinefunction(function)
    result = function(*arguments) if asynchronous else await run_blocking(name, function, *arguments)
    if inspect.isawaitable(result):
        await result


async def _drop_body(request: Request) -> None:
    """Read the rest of a body: a connection that is closed with unread bytes is reset, and its answer may be lost."""
    with suppress(TimeoutError, ClientDisconnect, RuntimeError):  # the last: there is no rest
        async with asyncio.timeout(_DROPPING):
            async for _ in request.stream():
                pass


async def _read(request: Request, limit: int, body: bytearray) -> memoryview:
    """Read the body of a request, of at most ``limit`` bytes, into ``body``; return the part of it that was written."""
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or len(declared) > 19 or int(declared) > limit:
        raise Refused(413, f"the body may have {limit} bytes, and content-length is {declared[:20]!r}")
    size, pieces = 0, request.stream()
    try:
        while piece := await asyncio.wait_for(anext(pieces, b""), _STALLED):
            if size + len(piece) > limit:
                raise Refused(413, f"the body has more than {limit} bytes")
            body[size : size + len(piece)] = piece
            size += len(piece)
    except TimeoutError:
        raise Refused(408, f"no byte of the body arrived for {_STALLED} s") from None
    except ClientDisconnect:
        raise Refused(400, "the trainer has closed the connection") from None
    return memoryview(body)[:size]


async def _fields(request: Request, limit: int) -> Mapping[str, Any]:
    """Return the JSON object in the body of a request."""
    try:
        found = json.loads(bytes(await _read(request, limit, bytearray())))
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Refused(400, "the body is not a JSON object")
    return found
