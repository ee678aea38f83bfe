"""A small HTTP/1.1 server for ASGI applications: for tests and examples. Serve engines with uvicorn or the like."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import unquote, urlsplit

_PIECE = 1 << 20  # bytes of a body in one ASGI message
Application = Callable[..., Awaitable[None]]


@contextmanager
def serve(app: Application, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve ``app`` in a thread while the block runs; gives the URL.

    Args:
        app: an ASGI application.
        host: to listen on.
        port: 0: one that the system chooses.

    Raises:
        OSError: the port is in use, or there is no such host.
    """
    loop, listening = asyncio.new_event_loop(), Future[asyncio.Server]()

    def run() -> None:
        asyncio.set_event_loop(loop)
        try:
            server = loop.run_until_complete(asyncio.start_server(lambda r, w: _serve_one(app, r, w), host, port))
        except BaseException as error:  # noqa: BLE001  the calling thread raises it
            loop.close()
            listening.set_exception(error)
            return
        listening.set_result(server)
        loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
        loop.close()

    thread = threading.Thread(target=run, name="asgi-server", daemon=True)
    thread.start()
    server = listening.result()
    try:
        yield f"http://{host}:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()


async def _serve_one(app: Application, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one connection: its requests, one after the other."""
    malformed = (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError)
    with suppress(ConnectionError, asyncio.CancelledError, *malformed):
        while head := await reader.readuntil(b"\r\n\r\n"):
            request, *lines = head.decode("latin-1").split("\r\n")
            method, target, _ = request.split(" ", 2)
            headers = [(name.strip().lower(), value.strip()) for name, _, value in (li.partition(":") for li in lines)]
            if not await _Exchange(app, reader, writer, method, target, dict(headers)).run():
                break
    writer.close()


class _Exchange:
    """One request and its answer."""

    def __init__(
        self,
        app: Application,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        method: str,
        target: str,
        headers: Mapping[str, str],
    ) -> None:
        self._app = app
        self._reader = reader
        self._writer = writer
        self._left = int(headers.get("content-length", "0"))
        self._asked = False
        self._close = False
        parts = urlsplit(target)
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(parts.path),
            "raw_path": parts.path.encode(),
            "query_string": parts.query.encode(),
            "root_path": "",
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items() if name],
            "server": writer.get_extra_info("sockname"),
            "client": writer.get_extra_info("peername"),
        }

    async def run(self) -> bool:
        """Return whether the connection can be used again."""
        await self._app(self._scope, self._receive, self._send)
        await self._writer.drain()
        return not self._close and not self._left

    async def _receive(self) -> Mapping[str, Any]:
        if self._asked and not self._left:
            return {"type": "http.disconnect"}
        self._asked = True
        piece = await self._reader.read(min(self._left, _PIECE)) if self._left else b""
        if self._left and not piece:
            return {"type": "http.disconnect"}
        self._left -= len(piece)
        return {"type": "http.request", "body": piece, "more_body": self._left > 0}

    async def _send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = [*message["headers"]]
            self._close = (b"connection", b"close") in headers
            lines = [f"HTTP/1.1 {message['status']} -".encode(), *(name + b": " + value for name, value in headers)]
            self._writer.write(b"\r\n".join(lines) + b"\r\n\r\n")
        else:
            self._writer.write(message.get("body", b""))
