"""The routes of one engine, called by a trainer, and how the weights of a version travel to it."""

from __future__ import annotations

import asyncio
import base64
import re
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple
from urllib.parse import urlencode

import msgspec
import torch
from torch import Tensor

from wsync.control.listen import KEEPALIVE
from wsync.control.loop import control_loop
from wsync.control.wire import Seconds
from wsync.deadlines import NOW, remaining
from wsync.engine import protocol
from wsync.errors import missing_extra
from wsync.update import Update
from wsync.weights.layout import Layout

_URL = re.compile(r"https?://([\w.-]+|\[[\da-f:.]+\])(:[1-9]\d{0,4})?(/[!-~]*)?", re.ASCII | re.IGNORECASE)
_ANSWER_BYTES = 1 << 20  # the largest part of an answer that is read
_PIECE = 1 << 20  # bytes of a body that are written at once
_SHOWN = 2000  # characters of an answer that an error shows
_IDLE_LIMIT = 2.0  # seconds: a connection without requests for longer is not used again (uvicorn closes it after 5)

Kind = Literal["died", "late", "failed"]
Fields = Mapping[str, Any]


class _Finished(msgspec.Struct):
    weight_version: str = ""
    wait_seconds: Seconds = 0.0
    apply_seconds: Seconds = 0.0


class EngineError(Exception):
    """A request failed: ``kind`` as in ``Cause``; ``status`` of the answer, 0 if there was none."""

    def __init__(self, message: str, kind: Kind = "failed", status: int = 0) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.status = status


def checked_url(url: str) -> str:
    """Return an engine's URL without a slash at its end; ValueError: it has more than host, port and path."""
    if not _URL.fullmatch(url) or not {*url}.isdisjoint("?#"):
        shown = re.sub(r"//.*@", "//…@", url)  # without a password
        raise ValueError(f"the URL of an engine is like 'http://host:8000', not {shown!r}")
    return url.rstrip("/")


class EngineClient:
    """Calls one engine: a vLLM server (with ``VLLM_SERVER_DEV_MODE=1``), or ``wsync.engine_app``.

    The methods of the phases are those of vLLM's ``VLLMWeightSyncClient``, so that vLLM's own trainer engines can use
    this client. They block, and are for a transfer's thread. Weights go to no other host than that of ``url``:
    redirects are errors, and proxies are not used.

    Attributes:
        deadline: of a transfer's requests, on ``time.monotonic``; None for no limit.
        version: the version of the weights that are being sent.
        phase: of the last request: ``"init"``, ``"start"``, ``"update"``, ``"finish"``, ``"pause"``, ….
        times: seconds that the engine has waited for its gate, and that the load took, as it said last.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = checked_url(url)
        self.deadline: float | None = None
        self.version, self.phase, self.times = 0, "connect", (0.0, 0.0)
        self._posting: asyncio.Task[Any] | None = None  # the transfer's request that is in progress, or was the last
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise missing_extra(error, "engine") from error
        self._broken = httpx.HTTPError, OSError
        headers = {"Accept-Encoding": "identity"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        transport = httpx.AsyncHTTPTransport(
            verify=ssl.create_default_context() if self.url.startswith("https:") else False,  # it takes 20 ms
            trust_env=False,
            limits=httpx.Limits(keepalive_expiry=_IDLE_LIMIT),
            socket_options=KEEPALIVE,
        )
        # `request` has one timeout for all of it.
        self._http = httpx.AsyncClient(headers=headers, timeout=None, trust_env=False, transport=transport)

    def init_weight_transfer_engine(self, init_info: Fields) -> None:
        """Phase 1, once for a layout: tell the engine how weights will travel."""
        self.post("init", protocol.INIT, {"init_info": dict(init_info)})

    def start_weight_update(self, fields: Fields | None = None) -> None:
        """Phase 2: begin a version. vLLM takes no ``fields``."""
        self.post("start", protocol.START, fields)

    def update_weights(self, update_info: Fields) -> None:
        """Phase 3, for transfers beside HTTP: have the engine receive weights. One or more times."""
        self.post("update", protocol.UPDATE, {"update_info": dict(update_info)})

    def finish_weight_update(self, weight_version: str | None = None, **fields: Any) -> None:
        """Phase 4: have the engine use the version, by default named by its number; EngineError: it has another."""
        version = weight_version or str(self.version)
        answer = self.post("finish", protocol.FINISH, {"weight_version": version, **fields})
        unsaid = "" if fields else version  # vLLM, which takes no further fields, does not name the version
        try:
            said = msgspec.convert(answer, _Finished)
        except msgspec.ValidationError:
            said = _Finished()
        if (said.weight_version or unsaid) != version:
            raise EngineError(f"{self.url}: it was sent version {version}, and answered {str(answer)[:_SHOWN]}")
        self.times = said.wait_seconds, said.apply_seconds

    def get_world_size(self) -> int:
        return int(self.post("connect", protocol.WORLD_SIZE)["world_size"])

    def post(self, phase: str, route: str, body: Fields | memoryview | None = None) -> Fields:
        """Make a request of the transfer, as ``request`` does; called by its thread."""

        async def post() -> Fields:
            self._posting = asyncio.current_task()
            return await self.request(phase, route, body, deadline=self.deadline)

        return control_loop().call(post())

    def give_up(self) -> None:
        """Have the transfer's request that is in progress fail, and each later one. In the control thread."""
        self.deadline = NOW
        if self._posting is not None:
            self._posting.cancel()

    async def request(
        self, phase: str, route: str, body: Fields | memoryview | None = None, *, deadline: float | None
    ) -> Fields:
        """Make a request with fields (as JSON) or weights; return the fields of its answer. EngineError: it failed."""
        self.phase = phase
        method = "GET" if route == protocol.WORLD_SIZE else "POST"
        where = f"{self.url}: phase {phase} ({method} {route})"
        content, headers = None, {}
        if isinstance(body, memoryview):
            content, headers = _pieces(body), {"Content-Length": str(len(body))}
        elif body is not None:
            content, headers = msgspec.json.encode(body), {"Content-Type": "application/json"}
        try:
            async with asyncio.timeout(remaining(deadline)):
                async with self._http.stream(method, self.url + route, content=content, headers=headers) as response:
                    answer = await anext(response.aiter_raw(_ANSWER_BYTES), b"")
        except TimeoutError as error:
            raise EngineError(f"{where}: no answer before the deadline", "late") from error
        except self._broken as error:
            raise EngineError(f"{where}: {_cause_of(error)}", "died") from error
        found: dict[str, Any] | None = None
        status, said = response.status_code, answer.decode(errors="replace").strip()[:_SHOWN]
        with suppress(msgspec.DecodeError, RecursionError):
            found = msgspec.json.decode(answer, type=dict[str, Any])
            said = str(found.get("error") or said)
        if status != 200:
            hint = " (a vLLM server has this route with VLLM_SERVER_DEV_MODE=1)" if status == 404 else ""
            raise EngineError(f"{where}: answered {status}{hint}: {said}", status=status)
        if found is None:
            raise EngineError(f"{where}: answered what is no JSON object: {said!r}", status=status)
        return found

    async def close(self) -> None:
        await self._http.aclose()


async def _pieces(body: memoryview) -> AsyncIterator[bytes]:
    for begin in range(0, len(body), _PIECE):
        yield bytes(body[begin : begin + _PIECE])


def _cause_of(error: BaseException) -> str:
    """Return the error that httpx has made another one of."""
    inner = error.__cause__ or error.__context__
    return f"{type(error).__name__}: {error}" if inner is None else _cause_of(inner)


class ParamMeta(NamedTuple):
    """As in vLLM."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class VersionSource:
    """The weights that are sent to one engine, of one version: what vLLM calls a ``WeightSource``.

    Attributes:
        device: where the tensors are copied to when they are read; None: they stay where they were packed (the CPU).
        update: the version. None outside ``send_weights``.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.device: torch.device | str | None = None
        self.update: Update | None = None

    def metadata(self) -> list[ParamMeta]:
        entries = zip(self.layout.names, self.layout.dtypes, self.layout.shapes, strict=True)
        return [ParamMeta(name, dtype, tuple(shape)) for name, dtype, shape in entries]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        assert self.update is not None, "the source is read within send_weights()"
        for name, view in zip(self.layout.names, self.update.views, strict=True):
            yield name, view if self.device is None else view.to(self.device)

    def held_names(self) -> None:
        """Return None. vLLM calls it for the tensors that this process holds; None means all."""


MakeTransfer = Callable[[EngineClient, VersionSource], Any]
"""Makes the transfer to one engine, as phase 1 (init). Its ``send_weights()`` sends what the source has now, by the
phases start, update and finish, as vLLM's ``TrainerWeightTransferEngine`` does. Both are called in threads of their
own. Exceptions that they raise, the trainer raises as ``WorkerFailed``."""


class BodyTransfer:
    """The transfer that is used by default: an HTTP body, as ``protocol`` says."""

    def __init__(self, client: EngineClient, source: VersionSource) -> None:
        self._client, self._source = client, source
        self._session = {"session": secrets.token_hex(8)}
        layout = base64.b64encode(source.layout.encode()).decode()
        client.init_weight_transfer_engine({"transfer": protocol.TRANSFER, **self._session, "layout": layout})

    def send_weights(self) -> None:
        client, update = self._client, self._source.update
        assert update is not None
        client.start_weight_update(self._session)
        client.post("update", f"{protocol.UPDATE}?{urlencode(self._session)}", update.buffer.memory)
        client.finish_weight_update(**self._session, checksum=f"{update.checksum:016x}")
