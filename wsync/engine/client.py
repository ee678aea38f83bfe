"""The routes of one engine, called by a trainer."""

from __future__ import annotations

import errno
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any
from urllib.parse import quote, urlsplit

from wsync.deadlines import remaining
from wsync.engine import protocol

_ANSWER_BYTES = 1 << 20  # the largest part of an answer that is read
_SHOWN = 2000  # characters of an answer that an error shows
_IDLE_LIMIT = 2.0  # seconds: a connection without requests for longer is not used again (uvicorn closes it after 5)


class EngineError(Exception):
    """A request failed.

    Attributes:
        died: whether there was no answer: the connection was refused or broken.
        late: whether there was none by the deadline.
        status: the status of the answer; 0 if there was none.
        reason: the field ``reason`` of the answer.
    """

    def __init__(
        self, message: str, *, died: bool = False, late: bool = False, status: int = 0, reason: str = ""
    ) -> None:
        super().__init__(message)
        self.died = died
        self.late = late
        self.status = status
        self.reason = reason


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
    """Calls one engine: a vLLM server (in development mode: ``VLLM_SERVER_DEV_MODE=1``), or ``wsync.engine_app``.

    Has the methods of vLLM's ``VLLMWeightSyncClient``, so that vLLM's own trainer engines can use it. Redirects are
    errors, and proxies are not used: weights go to no other host than that of ``url``. One thread at a time calls it.

    Args:
        url: the URL of the engine.
        token: sent with each request, as a bearer token.
        context: for ``https``.

    Attributes:
        url: as given.
        deadline: on ``time.monotonic``; None for no limit. At the deadline a request that waits for the next bytes of
            its answer ends; one that keeps sending bytes is ended by ``abort``, or inside ``until``.
        version: the version of the weights that are being sent.
        phase: the phase of the last request: ``"init"``, ``"start"``, ``"update"``, ``"finish"``, ``"pause"``, ….
        finish_answer: the answer to ``finish_weight_update``.
    """

    def __init__(self, url: str, token: str | None = None, context: ssl.SSLContext | None = None) -> None:
        self.url = checked_url(url)
        self.deadline: float | None = None
        self.version = 0
        self.phase = "connect"
        self.finish_answer: Mapping[str, Any] = {}
        self._token = token
        self._context = context
        self._connection: HTTPConnection | None = None
        self._answered_at = 0.0  # when the last answer had been read, on ``time.monotonic``

    def clone(self) -> EngineClient:
        """Return a new client of the same engine."""
        return EngineClient(self.url, self._token, self._context)

    @contextmanager
    def until(self, deadline: float | None) -> Iterator[EngineClient]:
        """Return a context manager in which requests end at ``deadline``, also while the engine still sends bytes.

        At the end of the block the connection is closed.
        """
        self.deadline = deadline
        left = remaining(deadline)
        timer = None if left is None else threading.Timer(left, self.abort)
        if timer is not None:
            timer.daemon = True
            timer.start()
        try:
            yield self
        finally:
            if timer is not None:
                timer.cancel()
            self.close()

    # --- the routes ---

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        """Phase 1, once for a layout: tell the engine how weights will travel."""
        self.post("init", protocol.INIT, {"init_info": dict(init_info)})

    def start_weight_update(self, fields: Mapping[str, Any] | None = None) -> None:
        """Phase 2: begin a version. vLLM takes no ``fields``."""
        self.post("start", protocol.START, fields)

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        """Phase 3, for transfers beside HTTP: have the engine receive weights. One or more times."""
        self.post("update", protocol.UPDATE, {"update_info": dict(update_info)})

    def send_body(self, body: Sequence[bytes | memoryview]) -> None:
        """Phase 3 of the body transfer: see ``protocol``. The pieces are sent one after the other."""
        self.request("update", "POST", protocol.UPDATE, body, protocol.SAFETENSORS)

    def finish_weight_update(self, weight_version: str | None = None, **fields: Any) -> None:
        """Phase 4: have the engine use the version; it is named by its number unless ``weight_version`` is given."""
        named = {"weight_version": weight_version or str(self.version), **fields}
        self.finish_answer = self.post("finish", protocol.FINISH, named)

    def pause(self, mode: protocol.PauseMode) -> None:
        """Pause generation; ``mode`` is for generations in flight."""
        self.request("pause", "POST", f"{protocol.PAUSE}?mode={quote(mode)}")

    def resume(self) -> None:
        """Go on generating."""
        self.request("resume", "POST", protocol.RESUME)

    def get_world_size(self) -> int:
        """Return the number of processes in the engine."""
        answer = self.request("connect", "GET", protocol.WORLD_SIZE)
        size = answer.get("world_size")
        if type(size) is not int:
            raise EngineError(
                f"{self.url}: GET {protocol.WORLD_SIZE} answered {answer}, without a world_size", status=200
            )
        return size

    # --- requests ---

    def post(self, phase: str, route: str, fields: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """``request`` with JSON fields."""
        return self.request(phase, "POST", route, () if fields is None else [json.dumps(fields).encode()])

    def request(
        self,
        phase: str,
        method: str,
        route: str,
        body: Sequence[bytes | memoryview] = (),
        kind: str = protocol.JSON,
    ) -> Mapping[str, Any]:
        """Return the fields of the answer.

        Raises:
            EngineError: there is none, or its status is not 200; names the URL, the phase and the answer.
        """
        self.phase = phase
        where = f"{self.url}: phase {phase} ({method} {route})"
        headers = {"Content-Type": kind, **({"Authorization": f"Bearer {self._token}"} if self._token else {})}
        try:
            status, content = self._exchange(method, route, body, headers)
        except (OSError, HTTPException) as error:
            self.close()
            late = isinstance(error, TimeoutError) and error.errno != errno.ETIMEDOUT  # that one is the kernel's own
            if late or remaining(self.deadline) == 0.0:  # the connection was closed at the deadline, by ``abort``
                raise EngineError(f"{where}: no answer before the deadline", late=True) from error
            raise EngineError(f"{where}: {type(error).__name__}: {error}", died=True) from error
        answer = _fields(content)
        if status != 200:
            self.close()
            said = content.decode(errors="replace").strip()[:_SHOWN]
            hint = " (a vLLM server has this route with VLLM_SERVER_DEV_MODE=1)" if status == 404 else ""
            reason = str(answer.get("reason", ""))
            raise EngineError(
                f"{where}: answered {status}{hint}: {_error_in(answer) or said}", status=status, reason=reason
            )
        return answer

    def _exchange(
        self, method: str, route: str, body: Sequence[bytes | memoryview], headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        connection = self._connected()
        target = urlsplit(self.url).path + route
        size = sum(len(piece) for piece in body)
        try:
            pieces = self._pieces(connection, body) if body else None
            connection.request(method, target, pieces, {**headers, "Content-Length": str(size)})
        except (BrokenPipeError, ConnectionResetError) as error:
            try:  # an engine that refuses a request need not read all of it
                response = self._response(connection)
            except (OSError, HTTPException):
                raise error from None
        else:
            response = self._response(connection)
        content = response.read(_ANSWER_BYTES)
        self._answered_at = time.monotonic()
        if remaining(self.deadline) == 0.0:  # ``abort`` may have ended the answer before it was complete
            raise TimeoutError
        if response.status == 200 and response.length and len(content) < _ANSWER_BYTES:
            raise IncompleteRead(content, response.length)  # ``read`` with a limit does not
        if response.will_close or response.read(1):
            self.close()
        return response.status, content

    def _pieces(self, connection: HTTPConnection, body: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for piece in body:
            self._limit(connection.sock)
            yield piece

    def _response(self, connection: HTTPConnection) -> HTTPResponse:
        """Return the beginning of an answer; what is waited for later ends at the deadline as well."""
        sock = connection.sock  # ``getresponse`` may set it to None
        self._limit(sock)
        response = connection.getresponse()
        self._limit(sock)
        return response

    def _limit(self, sock: socket.socket | None) -> None:
        """Set the timeout, which is that of each call of a socket, to the time that is left.

        Raises:
            TimeoutError: there is none.
        """
        left = remaining(self.deadline)
        if left == 0.0:
            raise TimeoutError
        if sock is not None:
            sock.settimeout(left)

    def _connected(self) -> HTTPConnection:
        if time.monotonic() - self._answered_at > _IDLE_LIMIT:
            self.close()
        if self._connection is None:
            parts = urlsplit(self.url)
            if parts.scheme == "https":
                self._connection = HTTPSConnection(parts.netloc, context=self._context)
            else:
                self._connection = HTTPConnection(parts.netloc)
        self._connection.timeout = remaining(self.deadline)
        self._limit(self._connection.sock)
        return self._connection

    def abort(self) -> None:
        """End the request in progress with an error. Called by another thread, at the deadline."""
        self.deadline = time.monotonic()
        connection = self._connection
        sock = None if connection is None else connection.sock  # read once: the other thread may set it to None
        if sock is not None:
            with suppress(OSError):  # it has ended meanwhile
                # not SSLSocket's own, which first ends the encryption: the other thread may be between two pieces
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next request opens another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _fields(content: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _error_in(answer: Mapping[str, Any]) -> str:
    """Return the text of ``wsync.engine_app``'s errors with its lines; of others nothing, so that all is shown."""
    error = answer.get("error")
    return error if isinstance(error, str) and answer.keys() <= {"error", "reason"} else ""
