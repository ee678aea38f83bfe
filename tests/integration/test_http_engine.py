"""The engine's half over HTTP: what is refused before anything changes."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import uvicorn
from http_engines import EngineServer, trainer

import wsync
from wsync.testing.asgi import serve
from wsync.testing.models import Small, fill

INIT, UPDATE = "/init_weight_transfer_engine", "/update_weights"


def disturbed(app: Any, state: dict[str, Any]) -> Callable[..., Awaitable[None]]:
    """The application; ``state["body"]`` changes each body with weights, ``state["broken"]`` breaks the answer off."""

    async def disturbing(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope.get("path") != UPDATE or not state:
            await app(scope, receive, send)
            return
        content = b""
        more = True
        while more:
            message = await receive()
            content, more = content + message["body"], message.get("more_body", False)
        if state.get("broken"):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            raise ConnectionResetError
        content = state["body"](content)

        async def changed() -> Mapping[str, Any]:
            return {"type": "http.request", "body": content, "more_body": False}

        length = (b"content-length", str(len(content)).encode())
        headers = [length if name == length[0] else (name, value) for name, value in scope["headers"]]
        await app({**scope, "headers": headers}, changed, send)

    return disturbing


def flipped(chance: random.Random) -> Callable[[bytes], bytes]:
    def flip(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[chance.randrange(len(changed))] ^= chance.randrange(1, 256)
        return bytes(changed)

    return flip


def test_damaged_bodies_are_never_loaded() -> None:
    """Any change of any byte is refused, if not as malformed then by the checksum, and the next version arrives."""
    target, state, chance = Small(), dict[str, Any](), random.Random(0)
    cuts = [lambda content: b"", lambda content: content[:-1], lambda content: content + b"x", lambda content: b"{}"]
    with serve(disturbed(wsync.engine_app(target, token=None), state)) as url, trainer(url) as scheme:
        for body in (*cuts, *(flipped(chance) for _ in range(30))):
            before = target()[0].item()
            state["body"] = body
            with pytest.raises(wsync.WeightSyncError, match=r"phase (update|finish)"):
                scheme.send(fill(Small(), before + 1))
            assert target().unique().tolist() == [before]
            state.clear()
            scheme.send(fill(Small(), before + 2))
            assert target().unique().tolist() == [before + 2]


def test_an_answer_that_breaks_off_changes_nothing() -> None:
    target, state = Small(), dict[str, Any]()
    with serve(disturbed(wsync.engine_app(target, token=None), state)) as url, trainer(url) as scheme:
        state["broken"] = True
        with pytest.raises(wsync.WorkerDied, match="phase update"):
            scheme.send(fill(Small(), 3))
        assert target()[0] == 1
        state.clear()
        scheme.readmit(0)  # it gets what was sent last
        assert target()[0] == 3


@pytest.mark.parametrize(
    ("method", "route", "content", "status"),
    [
        ("POST", "/nowhere", b"", 404),
        ("GET", INIT, b"", 405),
        *(("POST", INIT, content, 400) for content in (b"{", b"[" * 100_000, b"[]", b"{}", b'{"init_info": {}}')),
        ("POST", "/start_weight_update", b'{"session": 3}', 400),
        ("POST", "/pause?mode=stop", b"", 400),
    ],
)
def test_requests_that_are_refused(method: str, route: str, content: bytes, status: int) -> None:
    with EngineServer().serving() as engine:
        assert engine.ask(method, route, content)[0] == status
        assert not engine.calls


def test_a_version_that_is_too_large() -> None:
    with EngineServer(max_bytes=64).serving() as engine, pytest.raises(wsync.WorkerFailed, match="413"):
        trainer(engine.url, Small(1000)).__enter__()


def test_a_body_that_is_too_large_is_refused_before_it_is_read() -> None:
    with EngineServer().serving() as engine, trainer(engine.url):
        for route in ("/start_weight_update", INIT):
            assert engine.ask("POST", route, content_length="9" * 10)[0] == 413


def test_nothing_is_read_before_the_token() -> None:
    """Also by an application of one's own, which is asked by ASGI."""
    app = wsync.engine_app(load=list, token="right")
    for route in (INIT, UPDATE, "/nowhere"):
        sent = list[Any]()

        async def receive() -> Any:
            raise AssertionError("the body was read")

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        for given_token in ([], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"right")]):
            scope = {"type": "http", "method": "POST", "path": route, "headers": given_token, "query_string": b""}
            asyncio.run(app(scope, receive, send))
            assert sent[-2]["status"] == 401


@contextmanager
def serve_by_uvicorn(app: Any) -> Iterator[str]:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            threading.Event().wait(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def test_uvicorn_serves_it() -> None:
    """No thread of the application is left when the server has ended."""
    before = {*threading.enumerate()}
    loaded = dict[str, torch.Tensor]()
    app = wsync.engine_app(load=lambda pairs: loaded.update({n: t.clone() for n, t in pairs}), token="t")
    with serve_by_uvicorn(app) as url:
        model = torch.nn.Linear(1000, 1000)
        with trainer(url, model, token="t", pause="wait", chunk_bytes=1 << 20) as scheme:
            scheme.send()
            assert torch.equal(loaded["weight"], model.weight) and app.version == "2"
        with pytest.raises(wsync.WorkerFailed, match=r"401.*token"):
            trainer(url, token="other").__enter__()
    for thread in {*threading.enumerate()} - before:
        thread.join(30)
        assert not thread.is_alive()
