"""The engine's half over HTTP: what is refused before anything changes; generations in flight while weights change."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import uvicorn
from http_engines import EngineServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

import wsync
from wsync.checksum import checksum_of
from wsync.control.settings import SenderSettings
from wsync.engine import protocol
from wsync.testing.models import Small
from wsync.weights.layout import Layout
from wsync.weights.snapshot import snapshot
from wsync.weights.tensor_file import dump_tensors

WEIGHTS = {"one": torch.arange(6.0).reshape(2, 3), "two": torch.ones(5, dtype=torch.bfloat16)}
LAYOUT = Layout.of(snapshot(WEIGHTS))
TAGS = {"session": "s", "weight_version": "1"}
INIT = {
    "transfer": "body",
    "session": "s",
    "layout": SenderSettings(LAYOUT, checksum=True).dump().decode(),
    "chunk_bytes": 1024,
}


class Engine(EngineServer):
    """An engine, and the requests of an update to it."""

    def update(self, body: bytes) -> tuple[int, Mapping[str, Any]]:
        return self.ask("POST", protocol.UPDATE, body, content_type=protocol.SAFETENSORS)

    def begin(self) -> None:
        assert self.post(protocol.INIT, {"init_info": INIT})[0] == 200
        assert self.post(protocol.START, TAGS)[0] == 200

    def finish(self, **fields: Any) -> tuple[int, Mapping[str, Any]]:
        return self.post(protocol.FINISH, {**TAGS, "checksum": "0" * 16, **fields})


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine().serving() as engine:
        yield engine


def body(weights: Mapping[str, torch.Tensor] = WEIGHTS, **tags: str) -> bytes:
    return save(dict(weights), {**TAGS, **tags})


def test_bodies_are_safetensors_files() -> None:
    pieces = dump_tensors(LAYOUT, [WEIGHTS[name] for name in LAYOUT.names], range(len(LAYOUT.names)), TAGS)
    found = load(b"".join(pieces))
    assert found.keys() == WEIGHTS.keys() and all(torch.equal(found[name], WEIGHTS[name]) for name in found)


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        (b"", 400, "ends within its header"),
        (b"\xff" * 8 + b"{}", 400, "ends within its header"),
        (body()[:-1], 400, "its tensors end at byte"),
        (body() + b"x", 400, "its tensors end at byte"),
        (body(weight_version="2"), 409, "has not been started"),
        (body(session="other"), 409, "another trainer"),
        (save(WEIGHTS), 400, "'session' is missing"),
        (body({"three": torch.ones(1)}), 422, "'three' is not in the layout"),
        (body({"one": torch.ones(3, 2)}), 422, r"'one' is F32\[3, 2\], not F32\[2, 3\]"),
        (body({"two": torch.ones(5)}), 422, r"'two' is F32\[5\], not BF16\[5\]"),
    ],
)
def test_malformed_bodies_change_nothing(engine: Engine, content: bytes, status: int, said: str) -> None:
    engine.begin()
    answered, answer = engine.update(content)
    assert answered == status
    assert re.search(said, answer["error"])
    assert engine.finish()[0] == 409 and not engine.calls


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bodies_are_never_loaded(engine: Engine, data: st.DataObject) -> None:
    """Any change of any byte is refused, if not as malformed then by the checksum."""
    content = bytearray(body())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    protocol_error = None
    try:
        protocol.parse_body(memoryview(content))
    except ValueError as error:
        protocol_error = error
    engine.begin()
    status, answer = engine.update(bytes(content))
    assert status in (200, 400, 409, 422) and (status == 400 or protocol_error is None), answer
    checksum = f"{checksum_of(packed(), b''):016x}"
    finished = engine.finish(checksum=checksum)[0]
    assert finished == 409 or load(bytes(content)).keys() == WEIGHTS.keys()
    assert not engine.calls or finished == 200
    engine.calls = 0


def packed() -> torch.Tensor:
    flat = torch.zeros(LAYOUT.nbytes, dtype=torch.uint8)
    for view, name in zip(LAYOUT.views(flat), LAYOUT.names, strict=True):
        view.copy_(WEIGHTS[name])
    return flat


def test_a_version_that_is_not_whole_is_not_loaded(engine: Engine) -> None:
    engine.begin()
    assert engine.update(body({"one": WEIGHTS["one"]}))[0] == 200
    status, answer = engine.finish()
    assert status == 409 and "1 tensor(s) have not arrived: 'two'" in answer["error"]
    assert engine.update(body({"two": WEIGHTS["two"]}))[0] == 200
    status, answer = engine.finish()
    assert status == 409 and "corrupt" in answer["error"] and not engine.calls


@pytest.mark.parametrize(
    ("method", "route", "content", "status"),
    [
        ("POST", "/nowhere", b"", 404),
        ("GET", protocol.INIT, b"", 405),
        ("POST", protocol.INIT, b"{", 400),
        ("POST", protocol.INIT, b"[" * 100_000, 400),
        ("POST", protocol.INIT, b"[]", 400),
        ("POST", protocol.INIT, b"{}", 400),
        ("POST", protocol.INIT, json.dumps({"init_info": {**INIT, "layout": "[]"}}).encode(), 400),
        ("POST", protocol.INIT, json.dumps({"init_info": {**INIT, "transfer": "nccl"}}).encode(), 400),
        ("POST", protocol.INIT, json.dumps({"init_info": {**INIT, "chunk_bytes": 1 << 60}}).encode(), 413),
        ("POST", protocol.START, json.dumps({"session": 3}).encode(), 400),
        ("POST", protocol.UPDATE, b"{}", 415),
        ("POST", "/pause?mode=stop", b"", 400),
    ],
)
def test_requests_that_are_refused(engine: Engine, method: str, route: str, content: bytes, status: int) -> None:
    assert engine.ask(method, route, content)[0] == status
    assert not engine.calls


def test_texts_that_cannot_be_encoded_are_refused(engine: Engine) -> None:
    """JSON can have half of a surrogate pair."""
    half = "\ud800"
    assert engine.post(protocol.INIT, {"init_info": {**INIT, "layout": half}})[0] == 400
    engine.begin()
    assert engine.post(protocol.START, {**TAGS, "session": half})[0] == 409
    assert engine.update(body({"one": WEIGHTS["one"]}))[0] == 200 == engine.update(body({"two": WEIGHTS["two"]}))[0]
    assert engine.finish(checksum=half)[0] == 409 and not engine.calls


def test_a_version_that_is_larger_than_its_tensors_is_refused(engine: Engine) -> None:
    layout = SenderSettings(replace(LAYOUT, nbytes=64 << 30), checksum=True).dump().decode()
    status, answer = engine.post(protocol.INIT, {"init_info": {**INIT, "layout": layout}})
    assert status == 400 and "the buffer has" in answer["error"]


def test_a_version_that_is_too_large() -> None:
    with Engine(max_bytes=64).serving() as engine:
        assert engine.post(protocol.INIT, {"init_info": {**INIT, "chunk_bytes": 1}})[0] == 413


def test_a_body_that_is_too_large_is_refused_before_it_is_read(engine: Engine) -> None:
    engine.begin()
    for route in (protocol.UPDATE, protocol.START, protocol.INIT):
        status, answer = engine.ask("POST", route, content_type=protocol.SAFETENSORS, content_length="9" * 10)
        assert status == 413 and "may have" in answer["error"]


def test_nothing_is_read_before_the_token() -> None:
    """Also by an application of one's own, which is asked by ASGI."""
    app = wsync.engine_app(load=list, token="right")
    for route in (protocol.INIT, protocol.UPDATE, protocol.WEIGHT_INFO, "/nowhere"):
        sent = list[Any]()

        async def receive() -> Any:
            raise AssertionError("the body was read")

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        for given_token in ([], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"right")]):
            scope = {"type": "http", "method": "POST", "path": route, "headers": given_token}
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
        with wsync.HTTPWeightSyncScheme(url, token="t", pause="wait", chunk_bytes=1 << 20) as scheme:
            model = torch.nn.Linear(1000, 1000)
            scheme.init_on_sender("policy", model=model)
            scheme.connect()
            scheme.send()
            assert torch.equal(loaded["weight"], model.weight) and app.version == "2"
        with (
            pytest.raises(wsync.WorkerFailed, match=r"401.*token"),
            wsync.HTTPWeightSyncScheme(url, token="other") as scheme,
        ):
            scheme.init_on_sender("policy", model=Small())
            scheme.connect()
    for thread in {*threading.enumerate()} - before:
        thread.join(30)
        assert not thread.is_alive()


def test_weights_before_init_are_told_what_is_missing() -> None:
    with Engine().serving() as engine:
        status, answer = engine.update(save(WEIGHTS, TAGS))
        assert (status, answer["reason"]) == (409, "not_initialised")


def test_a_small_version_takes_little_memory_whatever_the_size_of_a_chunk() -> None:
    assert protocol.body_limit(LAYOUT, 1 << 40) == LAYOUT.nbytes + protocol.HEADER_BYTES


def test_a_large_body_that_is_refused_gets_its_answer() -> None:
    """Also if the trainer reads the answer only when it has sent all of the body."""
    with Engine().serving() as engine:
        for _ in range(2):
            status, answer = engine.update(bytes(64 << 20))
            assert (status, answer["reason"]) == (409, "not_initialised")
        engine.begin()
        assert engine.update(bytes(64 << 20))[0] == 413
