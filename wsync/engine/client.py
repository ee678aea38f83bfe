"""The routes of one engine, called by a trainer, and how the weights of a version travel to it."""

from __future__ import annotations

import base64
import io
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from types import SimpleNamespace
from typing import Any, Literal
from urllib.parse import urlencode, urlsplit

import msgspec
import torch
from torch import Tensor

from wsync.control.listen import KEEPALIVE
from wsync.control.wire import Seconds
from wsync.deadlines import NOW, readable, remaining
from wsync.engine import protocol
from wsync.update import Update
from wsync.weights.layout import Layout

_URL = re.compile(r"https?://([\w.-]+|\[[\da-f:.]+\])(:[1-9]\d{0,4})?(/[!-~]*)?", re.ASCII | re.IGNORECASE)
_ANSWER_BYTES = 1 << 20  # the largest part of an answer that is read
_SHOWN = 2000  # characters of an answer that an error shows
_IDLE_LIMIT = 2.0  # seconds: a connection without requests for longer is not used again (uvicorn closes it after 5)

Kind = Literal["died", "late", "failed"]
Fields = Mapping[str, Any]
Body = Fields | memoryview | None


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


class _Stream(io.RawIOBase):
    """What ``http.client`` reads and writes: a socket of which no call, whatever it waits for, passes the deadline."""

    def __init__(self, sock: socket.socket, deadline: float | None) -> None:
        self._sock, self._deadline = sock, deadline

    def _wait_no_longer(self) -> None:
        left = remaining(self._deadline)
        if left == 0.0:
            raise TimeoutError
        self._sock.settimeout(left)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._wait_no_longer()
        return self._sock.recv_into(buffer)

    def sendall(self, data: Any) -> None:
        self._wait_no_longer()
        self._sock.sendall(data)

    def makefile(self, _: str) -> io.BufferedReader:
        return io.BufferedReader(_Stream(self._sock, self._deadline))


class EngineClient:
    """Calls one engine: a vLLM server (with ``VLLM_SERVER_DEV_MODE=1``), an SGLang server, or ``wsync.engine_app``.

    The methods of the phases are those of vLLM's ``VLLMWeightSyncClient``, so that vLLM's own trainer engines can use
    this client. All methods but ``give_up`` block, and are called outside the control thread. Weights go to no other
    host than that of ``url``: redirects are errors, and proxies are not used.

    Attributes:
        deadline: of a transfer's requests, on ``time.monotonic``; None for no limit.
        version: the version of the weights that are being sent.
        phase: of the last request: ``"init"``, ``"start"``, ``"update"``, ``"finish"``, ``"pause"``, ….
        times: seconds that the engine has waited for its gate, and that the load took, as it said last.
        own_host: the address from which the engine was called last.
        presence, health: routes that an engine answers when it serves, and as long as it lives.
    """

    def __init__(self, url: str, token: str | None = None, kind: protocol.EngineKind = "vllm") -> None:
        self.url = checked_url(url)
        self.kind: protocol.EngineKind = kind
        self.presence, self.health = protocol.ALIVE[kind]
        self.deadline: float | None = None
        self.version, self.phase, self.times = 0, "connect", (0.0, 0.0)
        self.own_host = "127.0.0.1"
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        parts = urlsplit(self.url)
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port, self._path = parts.hostname or "", parts.port, parts.path
        self._idle: list[tuple[socket.socket, float]] = []  # connections that no request uses, and since when
        self._busy: set[socket.socket] = set()  # of the transfer's requests

    def init_weight_transfer_engine(self, init_info: Fields) -> None:
        """Phase 1, once for a layout: tell the engine how weights will travel."""
        self._begin("init", protocol.INIT, {"init_info": dict(init_info)})

    def start_weight_update(self, fields: Fields | None = None) -> None:
        """Phase 2: begin a version. vLLM takes no ``fields``."""
        self._begin("start", protocol.START, fields)

    def _begin(self, phase: str, route: str, fields: Fields | None) -> None:
        """Make a request again after an update that a dead trainer has begun is finished, if the engine has one."""
        try:
            self.post(phase, route, fields)
        except EngineError as error:
            if "already active" not in str(error):
                raise
            with suppress(EngineError):  # of a rank that has ended it
                self.post(phase, protocol.FINISH)
            self.post(phase, route, fields)

    def update_weights(self, update_info: Fields) -> None:
        """Phase 3, for transfers beside HTTP: have the engine receive weights. One or more times."""
        self.post("update", protocol.UPDATE, {"update_info": dict(update_info)})

    def finish_weight_update(self, weight_version: str | None = None, **fields: Any) -> None:
        """Phase 4: have the engine use the version, by default named by its number; EngineError: it has another."""
        version = weight_version or str(self.version)
        answer = self.post("finish", protocol.FINISH, {"weight_version": version, **fields})
        unsaid = "" if fields else version  # vLLM, which takes no further fields, does not name the version
        times = answer.get("wait_seconds", 0.0), answer.get("apply_seconds", 0.0)
        try:
            if (answer.get("weight_version") or unsaid) != version:
                raise ValueError(version)
            self.times = msgspec.convert(times, tuple[Seconds, Seconds])
        except ValueError as error:  # msgspec's, too
            said = str(answer)[:_SHOWN]
            raise EngineError(f"{self.url}: it was sent version {version}, and answered {said}") from error

    def get_world_size(self) -> int:
        return int(self.post("connect", protocol.WORLD_SIZE)["world_size"])

    def post(self, phase: str, route: str, body: Body = None) -> Fields:
        """Make a request of the transfer, as ``request`` does; called by its thread."""
        return self.request(phase, route, body, deadline=self.deadline, transfer=True)

    def give_up(self) -> None:
        """Have the transfer's request that is in progress fail, and each later one. Called by any thread."""
        self.deadline = NOW
        for sock in [*self._busy]:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def request(
        self, phase: str, route: str, body: Body = None, *, deadline: float | None, transfer: bool = False
    ) -> Fields:
        """Make a request with fields (as JSON) or weights; return the fields of its answer. EngineError: it failed."""
        self.phase = phase
        return self._call(phase, route, body, deadline, transfer=transfer)

    def require_alive(self, deadline: float | None) -> None:
        """Raise ``EngineError`` if the engine does not answer its health route; another thread's request may wait."""
        self._call("health", self.health, None, deadline, alone=True)

    def _call(self, phase: str, route: str, body: Body, deadline: float | None, **options: bool) -> Fields:
        method = "GET" if route in protocol.READ_ONLY else "POST"
        where = f"{self.url}: phase {phase} ({method} {route})"
        try:
            status, answer = self._exchange(method, route, body, deadline, **options)
        except (HTTPException, OSError) as error:
            if remaining(deadline) == 0.0:
                raise EngineError(f"{where}: no answer before the deadline", "late") from error
            raise EngineError(f"{where}: {type(error).__name__}: {error}", "died") from error
        found: dict[str, Any] | None = None
        said = answer.decode(errors="replace").strip()[:_SHOWN]
        with suppress(msgspec.DecodeError, RecursionError):
            found = msgspec.json.decode(answer, type=dict[str, Any])
            error = found.get("error")
            said = str((error.get("message") if isinstance(error, dict) else error) or said)  # vLLM's is an object
        if status != 200:
            missing = status == 404 and self.kind == "vllm"
            hint = " (a vLLM server has this route with VLLM_SERVER_DEV_MODE=1)" if missing else ""
            dead = status == 503 or "EngineDead" in said or "EngineCore encountered" in said  # its name, or its text
            raise EngineError(f"{where}: answered {status}{hint}: {said}", "died" if dead else "failed", status)
        if found is None:
            raise EngineError(f"{where}: answered what is no JSON object: {said!r}", status=status)
        return found

    def _exchange(
        self, method: str, route: str, body: Body, deadline: float | None, transfer: bool = False, alone: bool = False
    ) -> tuple[int, bytes]:
        """Return the status and the body of an answer. ``alone``: by a connection for this request only."""
        headers = self._headers
        if body is not None and not isinstance(body, memoryview):
            body, headers = memoryview(msgspec.json.encode(body)), {**headers, "Content-Type": "application/json"}
        sock = self._new_connection(deadline) if alone else self._connected(deadline)
        kept = False
        try:
            self.own_host = sock.getsockname()[0]
            if transfer:
                self._busy.add(sock)
            connection = HTTPConnection(self._host, self._port)  # only writes and reads what travels by `sock`
            stream: Any = _Stream(sock, deadline)
            connection.sock = stream
            connection.request(method, self._path + route, body, headers)
            response = connection.getresponse()
            status, answer = response.status, response.read(_ANSWER_BYTES)
            # After an exception, uvicorn answers 500 as if the connection stayed open, and closes it.
            kept = status == 200 and response.isclosed() and not response.will_close and not alone
            return status, answer
        finally:
            if transfer:
                self._busy.clear()
            if kept:
                self._idle.append((sock, time.monotonic()))
            else:
                sock.close()

    def _connected(self, deadline: float | None) -> socket.socket:
        """Return a connection: one that was used a moment ago, or a new one."""
        while self._idle:
            sock, since = self._idle.pop()
            recent = time.monotonic() - since < _IDLE_LIMIT
            if recent and not readable([sock.fileno()], NOW):  # else the engine has closed it
                return sock
            sock.close()
        return self._new_connection(deadline)

    def _new_connection(self, deadline: float | None) -> socket.socket:
        left = remaining(deadline)
        if left == 0.0:
            raise TimeoutError
        connection = self._kind(self._host, self._port, timeout=left)
        connection.connect()
        for option in KEEPALIVE:
            connection.sock.setsockopt(*option)
        return connection.sock

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[0].close()


class Metadata(list[Any]):
    """A list, which vLLM 0.33 reads; vLLM 0.32 calls ``source.metadata()`` to get it."""

    def __call__(self) -> Metadata:
        return self


class VersionSource:
    """The weights that are sent to one engine, of one version: a ``WeightSource`` of vLLM 0.32 and of 0.33.

    Attributes:
        device: where the tensors are copied to when they are read; None: they stay where they were packed (the CPU).
        update: the version. None outside ``send_weights``.
        metadata: names, types and shapes.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.device: torch.device | str | None = None
        self.update: Update | None = None
        whole = {"owners": None, "mesh_shape": None, "placements": None}  # every rank of the trainer has it
        entries = zip(layout.names, layout.dtypes, layout.shapes, strict=True)
        self.metadata = Metadata(SimpleNamespace(name=n, dtype=dtype, shape=s, **whole) for n, dtype, s in entries)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        assert self.update is not None, "the source is read within send_weights()"
        for name, view in zip(self.layout.names, self.update.views, strict=True):
            yield name, view if self.device is None else view.to(self.device)

    iter_full = __iter__  # of vLLM 0.33, as the next three

    def implements_iter_full(self) -> bool:
        return True

    def implements_iter_local(self) -> bool:
        return False

    def owned_names(self, rank: int) -> list[str]:
        return list(self.layout.names)

    def held_names(self) -> None:
        """Return None, by which vLLM 0.32 knows that this process has all tensors."""


class Transfer:
    """How versions travel to one engine: steps, each called in a thread of its own. A subclass has those it needs."""

    prepares = True  # whether the engine can have a version and use the one before, so that several switch together

    def stage(self) -> None:
        """Do what needs no engine, before generation is paused."""

    def prepare(self) -> None:
        """Have the engine get and verify the version. It uses the one before."""

    def commit(self) -> None:
        """Have the engine use the version."""

    def abort(self) -> None:
        """Have the engine go on with the version before, as if ``prepare`` had not been."""

    def verify(self, digests: Mapping[str, int]) -> None:
        """Have the engine compare what it has of the newest version with digests; EngineError: names what differs."""
        raise EngineError("verify() is not answered by engines that get weights like this")

    def shutdown(self) -> None:
        """End the transfer."""


MakeTransfer = Callable[[EngineClient, VersionSource], Any]
"""Makes the transfer to one engine, as phase 1 (init): a ``Transfer``, or an object with ``send_weights()``, as vLLM's
(``TrainerWeightTransferEngine``). That sends what the source has now, by the phases start, update and finish; if it has
``shutdown()``, that ends it. Exceptions of the function and of all methods, the trainer raises as ``WorkerFailed``.
"""


def as_transfer(made: Any) -> Transfer:
    """Return what a ``MakeTransfer`` has made; an object with ``send_weights()`` does all in one step."""
    if isinstance(made, Transfer):
        return made
    transfer = Transfer()
    transfer.prepares, transfer.commit = False, made.send_weights
    transfer.shutdown = getattr(made, "shutdown", transfer.shutdown)
    return transfer


class BodyTransfer(Transfer):
    """The transfer that is used by default: an HTTP body, as ``protocol`` says."""

    def __init__(self, client: EngineClient, source: VersionSource) -> None:
        self._client, self._source = client, source
        self._session = {"session": secrets.token_hex(8)}
        layout = base64.b64encode(source.layout.encode()).decode()
        client.init_weight_transfer_engine({"transfer": protocol.TRANSFER, **self._session, "layout": layout})

    def prepare(self) -> None:
        client, update = self._client, self._source.update
        assert update is not None
        client.start_weight_update(self._session)
        query = urlencode({**self._session, "checksum": f"{update.checksum:016x}"})
        client.post("update", f"{protocol.UPDATE}?{query}", update.buffer.memory)

    def commit(self) -> None:
        self._client.finish_weight_update(**self._session)

    def verify(self, digests: Mapping[str, int]) -> None:
        self._client.post("verify", protocol.VERIFY, {**self._session, "digests": digests})
