"""The routes of one engine, called by a trainer."""

from __future__ import annotations

import asyncio
import json
import math
import re
import ssl
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote, urlsplit

from wsync.control.loop import control_loop
from wsync.deadlines import remaining
from wsync.engine import protocol
from wsync.errors import missing_extra

if TYPE_CHECKING:
    import httpx

_ANSWER_BYTES = 1 << 20  # the largest part of an answer that is read
_SHOWN = 2000  # characters of an answer that an error shows
_IDLE_LIMIT = 2.0  # seconds: a connection without requests for longer is not used again (uvicorn closes it after 5)


class EngineError(Exception):
    """A request failed.

    Attributes:
        kind: ``died``: there was no answer, as the connection was refused or broken; ``late``: there was none by the
            deadline; ``failed``: the answer is an error, or does not fit what was asked.
        status: the status of the answer; 0 if there was none.
        reason: the field ``reason`` of the answer.
    """

    def __init__(
        self, message: str, kind: Literal["died", "late", "failed"] = "failed", status: int = 0, reason: str = ""
    ) -> None:
        super().__init__(message)
        self.kind: Literal["died", "late", "failed"] = kind
        self.status, self.reason = status, reason


def checked_url(url: str) -> str:
    """Return the URL of an engine, without a slash at its end.

    Raises:
        ValueError: it is not one of HTTP with a host, has more than a path, or other characters than a URL may have.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and "@" not in parts.netloc
    except ValueError:  # a port, or brackets
        valid = False
    if not valid or not re.fullmatch(r"[!-~]+", url) or not {*url}.isdisjoint("?#"):
        shown = re.sub(r"//.*@", "//…@", url)  # without a password
        raise ValueError(f"the URL of an engine is like 'http://host:8000', not {shown!r}")
    return url.rstrip("/")


class EngineClient:
    """Calls one engine: a vLLM server (with ``VLLM_SERVER_DEV_MODE=1``), or ``wsync.engine_app``.

    Has the methods of vLLM's ``VLLMWeightSyncClient``, so that vLLM's own trainer engines can use it. They block, and
    are for a transfer's thread; the coroutines are for the control thread. Redirects are errors, and proxies are not
    used: weights go to no other host than that of ``url``.

    Args:
        url: the URL of the engine.
        token: sent with each request, as a bearer token.
        context: for ``https``.

    Attributes:
        url: as given.
        deadline: of every request, on ``time.monotonic``; None for no limit.
        version: the version of the weights that are being sent.
        phase: the phase of the last request: ``"init"``, ``"start"``, ``"update"``, ``"finish"``, ``"pause"``, ….
        times: seconds that the engine has waited for its gate, and that the load took, as it said last.
    """

    def __init__(self, url: str, token: str | None = None, context: ssl.SSLContext | None = None) -> None:
        self.url = checked_url(url)
        self.deadline: float | None = None
        self.version = 0
        self.phase = "connect"
        self.times = 0.0, 0.0
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise missing_extra(error, "engine") from error
        self._broken = httpx.HTTPError, OSError
        headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {token}"} if token else {})}
        self._http = httpx.AsyncClient(
            headers=headers,
            verify=(context or ssl.create_default_context()) if self.url.startswith("https:") else False,
            timeout=None,  # `request` has one for all of it
            trust_env=False,
            limits=httpx.Limits(keepalive_expiry=_IDLE_LIMIT),
        )

    # --- the routes; called by a transfer's thread ---

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Phase 1, once for a layout: tell the engine how weights will travel."""
        self._post("init", protocol.INIT, {"init_info": dict(init_info)})

    def start_weight_update(self, fields: Mapping[str, Any] | None = None) -> None:
        """Phase 2: begin a version. vLLM takes no ``fields``."""
        self._post("start", protocol.START, fields)

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Phase 3, for transfers beside HTTP: have the engine receive weights. One or more times."""
        self._post("update", protocol.UPDATE, {"update_info": dict(update_info)})

    def finish_weight_update(self, weight_version: str | None = None, **fields: Any) -> None:
        """Phase 4: have the engine use the version; it is named by its number unless ``weight_version`` is given."""
        control_loop().call(self.finish(weight_version or str(self.version), fields))

    def pause(self, mode: protocol.PauseMode) -> None:
        """Pause generation; ``mode`` is for generations in flight."""
        self._post("pause", f"{protocol.PAUSE}?mode={quote(mode)}")

    def resume(self) -> None:
        """Go on generating."""
        self._post("resume", protocol.RESUME)

    def get_world_size(self) -> int:
        """Return the number of processes in the engine."""
        return control_loop().call(self.world_size())

    def _post(self, phase: str, route: str, fields: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        return control_loop().call(self.request(phase, route, fields))

    # --- requests; in the control thread ---

    async def world_size(self) -> int:
        """Return the number of processes in the engine; EngineError: also if the answer does not say it."""
        answer = await self.request("connect", protocol.WORLD_SIZE, method="GET")
        size = answer.get("world_size")
        if type(size) is not int or size < 1:
            raise self._misfit(protocol.WORLD_SIZE, answer)
        return size

    async def finish(self, version: str, fields: Mapping[str, Any], *, named: bool = False) -> None:
        """Phase 4: see ``finish_weight_update``.

        Raises:
            EngineError: also if the engine has said that it has another version, or (``named``) has not said it.
        """
        answer = await self.request("finish", protocol.FINISH, {"weight_version": version, **fields})
        times = [answer.get(name, 0.0) for name in ("wait_seconds", "apply_seconds")]
        sound = all(isinstance(one, int | float) and 0 <= one < math.inf for one in times)
        if not sound or answer.get("weight_version", None if named else version) != version:
            raise self._misfit(protocol.FINISH, answer)
        self.times = float(times[0]), float(times[1])

    def _misfit(self, route: str, answer: Mapping[str, Any]) -> EngineError:
        return EngineError(f"{self.url}: {route} answered {str(answer)[:_SHOWN]}, which does not fit", status=200)

    async def request(
        self,
        phase: str,
        route: str,
        fields: Mapping[str, Any] | None = None,
        *,
        body: bytes | None = None,
        method: str = "POST",
    ) -> Mapping[str, Any]:
        """Make a request of a phase, with JSON ``fields`` or a ``body``; return the JSON object of its answer.

        Raises:
            EngineError: there is no answer, or not with status 200, or it is no JSON object.
        """
        self.phase = phase
        where = f"{self.url}: phase {phase} ({method} {route})"
        content = body if fields is None else json.dumps(fields).encode()
        kind = {"Content-Type": protocol.JSON if body is None else protocol.WEIGHTS}
        try:
            async with asyncio.timeout(remaining(self.deadline)):
                async with self._http.stream(method, self.url + route, content=content, headers=kind) as response:
                    answer = await _read(response)
        except TimeoutError as error:
            raise EngineError(f"{where}: no answer before the deadline", "late") from error
        except self._broken as error:
            raise EngineError(f"{where}: {_cause_of(error)}", "died") from error
        found: Any = None
        with suppress(ValueError, RecursionError):
            found = json.loads(answer)
        status, fields = response.status_code, found if isinstance(found, dict) else {}
        said = str(fields.get("error") or answer.decode(errors="replace").strip()[:_SHOWN])
        if status != 200:
            hint = " (a vLLM server has this route with VLLM_SERVER_DEV_MODE=1)" if status == 404 else ""
            reason = fields.get("reason", "")
            raise EngineError(f"{where}: answered {status}{hint}: {said}", status=status, reason=reason)
        if fields is not found:
            raise EngineError(f"{where}: answered what is no JSON object: {said!r}", status=status)
        return fields

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


async def _read(response: httpx.Response) -> bytes:
    content = b""
    async for piece in response.aiter_raw():
        content += piece
        if len(content) >= _ANSWER_BYTES:
            break
    return content


def _cause_of(error: BaseException) -> str:
    """Return the error that httpx has made another one of."""
    inner = error.__cause__ or error.__context__
    return f"{type(error).__name__}: {error}" if inner is None else _cause_of(inner)
