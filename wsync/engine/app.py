"""The engine's half of the protocol: an ASGI application around a function that loads weights."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import json
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from typing import Any
from urllib.parse import parse_qs

from tensordict import TensorDictBase
from torch import nn

from wsync.engine import protocol
from wsync.engine.generations import Generation, Generations
from wsync.engine.update import EngineWeights, Refused
from wsync.gate import gate_model
from wsync.transforms.chain import Transform, compose
from wsync.weights.targets import Destination, Load

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Pause = Callable[[protocol.PauseMode], Awaitable[object] | object]
Resume = Callable[[], Awaitable[object] | object]

_LAYOUT_BYTES = 64 << 20  # largest body of /init_weight_transfer_engine, which has the layout
_FIELDS_BYTES = 64 << 10  # largest body of the other requests with JSON
_STALLED = 60.0  # longest time without a byte of a body, in seconds
_DROPPING = 1.0  # the same, for a body that is refused


class EngineApp:
    """See ``engine_app``.

    Args:
        weights: the weights of the engine.
        token: the token that requests must have.
        pause, resume: see ``engine_app``.
        generations: are paused, if there is no ``pause``.
    """

    def __init__(
        self,
        weights: EngineWeights,
        token: str | None,
        pause: Pause | None,
        resume: Resume | None,
        generations: Generations,
    ) -> None:
        self._weights = weights
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._pause: Pause = pause or generations.pause
        self._resume: Resume = resume or generations.resume
        self._generations = generations
        self._paused = False
        self._pausing_for: object = None  # the request of the last /pause; None after a /resume
        self._updating = asyncio.Lock()  # one body at a time is in memory
        # Not the event loop's own threads: an engine may keep all of those busy with generations that are paused.
        self._loading = ThreadPoolExecutor(1, "wsync-load")
        self._pausing = ThreadPoolExecutor(thread_name_prefix="wsync-pause")
        self._phases: Mapping[str, tuple[Callable[[Any], Mapping[str, Any] | None], str]] = {
            protocol.INIT: (weights.initialise, "Weight transfer initialized"),
            protocol.START: (weights.start, "Weight update started"),
            protocol.UPDATE: (weights.add, "Weights updated"),
            protocol.FINISH: (weights.finish, "Weight update finished"),
        }
        self._controls: Mapping[str, Callable[[Mapping[str, Sequence[str]]], Awaitable[Mapping[str, Any]]]] = {
            protocol.PAUSE: self._pause_generation,
            protocol.RESUME: self._resume_generation,
        }
        self._questions: Mapping[str, Callable[[], Mapping[str, Any] | None]] = {
            protocol.IS_PAUSED: lambda: {"is_paused": self._paused if pause else generations.paused},
            protocol.WEIGHT_INFO: lambda: {"weight_version": self.version},
            protocol.WORLD_SIZE: lambda: {"world_size": 1},
            protocol.HEALTH: weights.require_whole,
        }

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
        """End a pause, and the threads that load weights and pause generation. The server's end calls it."""
        self._loading.shutdown(wait=False)
        self._pausing.shutdown(wait=False)
        self._generations.resume()  # what waits in them, or in a generation, would keep the process from ending

    # --- ASGI ---

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request (an ASGI application)."""
        if scope["type"] == "lifespan":
            return await self._lifespan(receive, send)
        if scope["type"] != "http":
            raise NotImplementedError(f"this application serves HTTP, not {scope['type']}")
        unread = True

        async def receive_part() -> Mapping[str, Any]:
            nonlocal unread
            message = await receive()
            unread = message.get("more_body", False)
            return message

        try:
            answer, status = await self._answer(scope, receive_part), 200
        except Refused as error:
            answer, status = {"error": str(error), "reason": error.reason}, error.status
        except Exception:  # noqa: BLE001  whatever the engine raised goes to the trainer, which raises it
            answer, status = {"error": traceback.format_exc()}, 500
        content = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        if status != 200:
            headers.append((b"connection", b"close"))  # a part of the body may not have been read
        await send({"type": "http.response.start", "status": status, "headers": headers})
        drops = unread and status not in (200, 401)  # without the token nothing is read
        await send({"type": "http.response.body", "body": content, "more_body": drops})
        if drops:
            await _drop_body(receive)
            await send({"type": "http.response.body"})

    async def _answer(self, scope: Scope, receive: Receive) -> Mapping[str, Any]:
        """Authenticate, then find the route, and only then read the body."""
        path = scope["path"].removeprefix(scope.get("root_path", "")) or "/"
        headers = {name.lower(): value for name, value in scope["headers"]}
        expected = None if path == protocol.HEALTH else self._authorization
        if expected is not None and not hmac.compare_digest(headers.get(b"authorization", b""), expected):
            raise Refused(401, "the token is missing or wrong")
        routes = [*self._phases, *self._controls, *self._questions]
        if path not in routes:
            raise Refused(404, f"there is no {path}; there are {', '.join(routes)}")
        method = "GET" if path in self._questions else "POST"
        if scope["method"] != method:
            raise Refused(405, f"{path} takes {method}")
        if path in self._questions:
            return self._questions[path]() or {}
        if path in self._controls:
            return await self._controls[path](parse_qs(scope.get("query_string", b"").decode(errors="replace")))
        async with self._updating:
            if path != protocol.UPDATE:
                limit = _LAYOUT_BYTES if path == protocol.INIT else _FIELDS_BYTES
                return await self._load(path, _fields(bytes(await _body(headers, receive, limit, bytearray()))))
            if headers.get(b"content-type", b"").split(b";")[0].strip() != protocol.SAFETENSORS.encode():
                raise Refused(415, f"{path} takes {protocol.SAFETENSORS} here (transfer '{protocol.TRANSFER}')")
            buffer = self._weights.body_buffer()
            return await self._load(path, await _body(headers, receive, len(buffer), buffer))

    async def _load(self, path: str, content: Any) -> Mapping[str, Any]:
        """Take a phase of an update in the thread that loads weights, so that the server goes on answering."""
        function, message = self._phases[path]
        return {"message": message, **(await _in(self._loading, function, content) or {})}

    async def _pause_generation(self, query: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
        mode = query.get("mode", ["abort"])[-1]
        if mode not in protocol.PAUSE_MODES:
            raise Refused(400, f"mode is one of {', '.join(protocol.PAUSE_MODES)}, not {mode!r}")
        own = self._pausing_for = object()
        await self._call(self._pause, mode)
        if self._pausing_for is not own:
            if self._pausing_for is None:  # that /resume may have found nothing to end yet
                await self._call(self._resume)
            raise Refused(409, "/resume, or another /pause, came before generation had paused")
        self._paused = True
        return {"status": "paused"}

    async def _resume_generation(self, query: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
        self._pausing_for = None
        await self._call(self._resume)
        self._paused = False
        return {"status": "resumed"}

    async def _call(self, function: Callable[..., Any], *arguments: object) -> None:
        """Call a function that may block in a thread; await one that is asynchronous."""
        asynchronous = inspect.iscoroutinefunction(function)
        result = function(*arguments) if asynchronous else await _in(self._pausing, function, *arguments)
        if inspect.isawaitable(result):
            await result

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            phase = (await receive())["type"]
            await send({"type": f"{phase}.complete"})
            if phase == "lifespan.shutdown":
                self.close()
                return


def _in(threads: ThreadPoolExecutor, function: Callable[..., Any], *arguments: object) -> Awaitable[Any]:
    return asyncio.get_running_loop().run_in_executor(threads, function, *arguments)


async def _drop_body(receive: Receive) -> None:
    """Read the rest of a body: a connection that is closed with unread bytes is reset, and its answer may be lost."""
    with suppress(TimeoutError):
        while (await asyncio.wait_for(receive(), _DROPPING)).get("more_body", False):
            pass


async def _body(headers: Mapping[bytes, bytes], receive: Receive, limit: int, body: bytearray) -> memoryview:
    """Read the body of a request, of at most ``limit`` bytes, into ``body``; return the part of it that was written."""
    declared = headers.get(b"content-length", b"0")
    if not declared.isdigit() or len(declared) > 19 or int(declared) > limit:
        raise Refused(413, f"the body may have {limit} bytes, and content-length is {declared[:20]!r}")
    size = 0
    while True:
        try:
            message = await asyncio.wait_for(receive(), _STALLED)
        except TimeoutError:
            raise Refused(408, f"no byte of the body arrived for {_STALLED} s") from None
        if message["type"] == "http.disconnect":
            raise Refused(400, "the trainer has closed the connection")
        piece = message.get("body", b"")
        if size + len(piece) > limit:
            raise Refused(413, f"the body has more than {limit} bytes")
        body[size : size + len(piece)] = piece
        size += len(piece)
        if not message.get("more_body", False):
            return memoryview(body)[:size]


def _fields(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise Refused(400, "the body is not a JSON object")
    return found


def engine_app(
    model: nn.Module | TensorDictBase | Mapping[str, Any] | None = None,
    *,
    load: Load | None = None,
    token: str | None,
    pause: Pause | None = None,
    resume: Resume | None = None,
    version: str = "0",
    chunk_bytes: int | None = None,
    receive_transform: Transform | Sequence[Transform] | None = None,
    max_bytes: int = 64 << 30,
    pause_limit: float | None = 600.0,
) -> EngineApp:
    """Return an ASGI application by which ``HTTPWeightSyncScheme`` updates an engine in this process.

    Serve it with any ASGI server, in one process (``uvicorn --workers 1``), or mount it in an application of your own
    (``app.mount("/weights", engine_app(…))``). A version is collected first: it takes its size in memory. When all of
    it has arrived and fits, it is loaded inside ``wsync.gate()``. A version that is incomplete, damaged or malformed is
    not loaded at all. If loading fails half-way, ``/health`` answers 503, and the gate raises ``WeightSyncError``,
    until a version is loaded.

    Args:
        model: a module (its forwards are gated), or a mapping of tensors, into which weights are copied.
        load: for an inference engine: see ``WeightSyncScheme.init_on_receiver``. Always called in the same thread,
            which is not the main one: it has to set the CUDA device, if it needs one.
        token: requests without this bearer token are refused before their bodies are read, except ``/health``. None:
            any process that reaches the port can change the weights.
        pause: called with the mode (``"abort"``, ``"wait"`` or ``"keep"``) for ``/pause``; returns, or is awaited, when
            generation has paused. By default ``app.generation()`` is paused.
        resume: called for ``/resume``, and once more when a ``pause`` has returned after that. Goes with ``pause``.
        version: the name of the weights that the engine has.
        chunk_bytes: see ``init_on_receiver``.
        receive_transform: see ``WeightSyncScheme``.
        max_bytes: the largest version that is accepted.
        pause_limit: seconds after which ``app.generation()`` goes on without a ``/resume``; None: never.

    Raises:
        TypeError: ``model`` is of another kind. ValueError: ``pause`` or ``resume`` is missing, or the token malformed.
    """
    if (pause is None) != (resume is None):
        raise ValueError("pause and resume go together")
    protocol.require_valid_token(token)
    transform = compose(receive_transform, "receive_transform")
    destination = Destination(model, load=load, chunk_bytes=chunk_bytes, transform=transform)
    if destination.module is not None:
        gate_model(destination.module)
    weights = EngineWeights(destination, version, max_bytes)
    return EngineApp(weights, token, pause, resume, Generations(lambda: weights.version, pause_limit))
