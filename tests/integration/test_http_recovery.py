"""After a fault between a trainer and engines: nothing stays paused, and a new attempt begins afresh."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from http_engines import trainer

import wsync
from wsync.deadlines import remaining
from wsync.engine.client import EngineClient
from wsync.engine.transfers import VersionSource
from wsync.testing.asgi import serve
from wsync.testing.models import Small, fill


class LikeVLLM:
    """As vLLM's trainer engine: it is made once for an engine, and sends no weights over HTTP."""

    def __init__(self, client: EngineClient, source: VersionSource) -> None:
        client.init_weight_transfer_engine({})
        self.client = client

    def send_weights(self) -> None:
        self.client.start_weight_update()
        self.client.update_weights({})
        self.client.finish_weight_update()


class Slow(LikeVLLM):
    """Returns at the deadline, when the engine has loaded the version; not before ``slow`` is set."""

    slow = threading.Event()

    def send_weights(self) -> None:
        super().send_weights()
        if self.slow.is_set():
            threading.Event().wait(remaining(self.client.deadline))


Handler = Callable[[str], Awaitable[int]]


async def agree(route: str) -> int:
    return 200


def engine(routes: list[str], handle: Handler = agree) -> Callable[..., Awaitable[None]]:
    """Return an application that notes the routes it is asked for, and answers with the status that ``handle`` says."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        routes.append(scope["path"])
        content = json.dumps({"world_size": 1}).encode()
        status = await handle(scope["path"])
        headers = [(b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    return app


def test_an_engine_is_resumed_if_the_deadline_passes_after_finish() -> None:
    routes = list[str]()
    with serve(engine(routes)) as url, trainer(url, transfer=Slow, pause="keep") as scheme:
        scheme.timeout = 0.5
        Slow.slow.set()
        try:
            with pytest.raises(wsync.SyncTimeout):
                scheme.send(fill(Small(), 2))
        finally:
            Slow.slow.clear()
        scheme.shutdown()  # waits for the engine's thread
    assert routes.count("/pause") == routes.count("/resume") == 2 and routes[-1] == "/resume"


def test_a_transport_that_is_not_connected_is_an_error_at_once() -> None:
    target = Small()
    app = wsync.engine_app(target, token=None)
    with serve(app) as url:
        transport = wsync.HTTPWeightSyncScheme(url).create_transport()
        with pytest.raises(wsync.NotConnected, match="setup_connection_and_weights_on_sender"):
            transport.send_weights(fill(Small(), 1))
        transport.setup_connection_and_weights_on_sender()
        transport.send_weights(fill(Small(), 2))
    with pytest.raises(wsync.WorkerDied):
        transport.send_weights(fill(Small(), 3))
    with pytest.raises(wsync.NotConnected):
        transport.send_weights(fill(Small(), 4))
    with serve(app, port=int(url.rsplit(":", 1)[1])):
        transport.setup_connection_and_weights_on_sender()
        transport.send_weights(fill(Small(), 5))
        assert target()[0] == 5
    transport.close()


@contextmanager
def dripping() -> Iterator[str]:
    """A server that answers with one byte after the other, without an end."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve_all() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    try:
                        connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                        while not over.wait(0.02):
                            connection.sendall(b"x")
                    except OSError:
                        continue

        thread = threading.Thread(target=serve_all)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_an_engine_that_answers_without_an_end_holds_no_connect() -> None:
    with dripping() as url, pytest.raises(wsync.SyncTimeout, match="no answer before"), trainer(url, timeout=0.5):
        pass


def test_the_number_of_workers_is_that_of_the_urls() -> None:
    with wsync.HTTPWeightSyncScheme(["http://a", "http://b"]) as scheme:
        for count in (1, 3):
            with pytest.raises(ValueError, match="urls"):
                scheme.init_on_sender("policy", model=Small(), num_workers=count)
        scheme.init_on_sender("policy", model=Small(), num_workers=2)
