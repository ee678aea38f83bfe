"""What an engine and its trainer refuse over HTTP: requests of anybody, and answers that do not fit."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from http_engines import EngineServer

import wsync
from wsync.testing.asgi import serve
from wsync.testing.models import Small, fill

WEIGHTS = {"content_type": "application/octet-stream"}
INIT, START, UPDATE, FINISH = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
USUAL = {"world_size": 1, "weight_version": "1", "apply_seconds": 0.5}


def recorded(requests: dict[str, bytes], answers: dict[str, Any]) -> Any:
    """A server that records the bodies of requests by their routes; it answers what ``answers`` says, or ``USUAL``."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message.get("more_body")
        requests[scope["path"]] = body
        answer = answers.get(scope["path"], json.dumps(USUAL).encode())
        if answer is None:
            await asyncio.Event().wait()
        headers = [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    return app


@pytest.mark.parametrize(
    ("route", "answer", "kind"),
    [
        ("/get_world_size", b"{}", wsync.WorkerFailed),
        (INIT, b"<html>welcome</html>", wsync.WorkerFailed),
        (INIT, None, wsync.SyncTimeout),
        (FINISH, b"{}", wsync.WorkerFailed),
        (FINISH, b'{"weight_version": "7"}', wsync.WorkerFailed),
        (FINISH, b'{"weight_version": "1", "apply_seconds": -1}', wsync.WorkerFailed),
    ],
)
def test_an_answer_that_does_not_fit_is_a_failure_of_that_engine(route: str, answer: Any, kind: Any) -> None:
    requests = dict[str, bytes]()
    with serve(recorded(requests, {route: answer})) as url:
        scheme = wsync.HTTPWeightSyncScheme(url, timeout=1.0 if answer is None else 10.0, pause="keep")
        with scheme, pytest.raises(kind, match=url):
            scheme.init_on_sender("policy", model=Small())
            scheme.connect()
    assert ("/pause" in requests) == ("/resume" in requests)  # nothing stays paused


@pytest.fixture(scope="module")
def started() -> dict[str, bytes]:
    """The bodies that a trainer of a ``Small`` has sent for its first version."""
    requests = dict[str, bytes]()
    with serve(recorded(requests, {})) as url, wsync.HTTPWeightSyncScheme(url) as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1))
        scheme.connect()
    return requests


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineServer]:
    with EngineServer().serving() as engine:
        yield engine


@pytest.mark.parametrize(
    ("route", "change", "body", "status", "said"),
    [
        ("/nowhere", {}, b"", 404, "nowhere"),
        (INIT, {}, b"{", 400, "not JSON"),
        (INIT, {}, b"[" * 100_000, 400, "not JSON"),
        (INIT, {}, b"{}", 400, "transfer"),
        (INIT, {"layout": "AAAA"}, None, 400, "layout"),
        (INIT, {"chunk_bytes": 1 << 60}, None, 413, "chunk_bytes"),
        (START, {"session": 3}, None, 400, "'session'"),
        (START, {"session": "\ud800"}, None, 409, "another trainer"),
        (START, {"base": "7"}, None, 409, "is not here"),
        (FINISH, {"checksum": "0" * 16}, None, 409, "0 of"),
        ("/pause?mode=stop", {}, b"", 400, "mode"),
        (UPDATE, {}, b"{}", 415, "octet-stream"),
    ],
)
def test_requests_that_are_refused(
    engine: EngineServer, started: Any, route: str, change: Any, body: bytes | None, status: int, said: str
) -> None:
    for known in (INIT, START):
        assert engine.ask("POST", known, started[known])[0] == 200
    if body is None:
        fields = json.loads(started[route])
        fields.get("init_info", fields).update(change)
        body = json.dumps(fields).encode()
    answer, content = engine.ask("POST", route, body)
    assert answer == status and said in content["error"] and not engine.calls


@pytest.mark.parametrize(
    ("change", "body", "status", "said"),
    [
        ({}, b"x", 400, "the body has 1 bytes"),
        ({}, bytes(64 << 20), 413, "may have"),
        ({"begin": "64"}, b"", 409, "not the next ones"),
        ({"end": "9" * 30}, b"", 409, "not the next ones"),
        ({"base": "0"}, b"", 409, "has not named"),
        ({"weight_version": "9"}, b"", 409, "has not been started"),
    ],
)
def test_weights_that_are_refused(
    engine: EngineServer, started: Any, change: dict[str, str], body: bytes, status: int, said: str
) -> None:
    for known in (INIT, START):
        assert engine.ask("POST", known, started[known])[0] == 200
    tags = json.loads(started[START])
    query = {**tags, "begin": "0", "end": str(len(started[UPDATE])), **change}
    answer, content = engine.ask("POST", f"{UPDATE}?{'&'.join(f'{k}={v}' for k, v in query.items())}", body, **WEIGHTS)
    assert answer == status and said in content["error"] and not engine.calls


def test_a_transfer_of_ones_own_has_the_methods_of_vllm() -> None:
    class Own:
        def __init__(self, client: Any, source: Any) -> None:
            self.client, self.source = client, source
            client.init_weight_transfer_engine({"world_size": 1 + client.get_world_size()})

        def send_weights(self) -> None:
            self.client.start_weight_update()
            self.client.update_weights({"names": [name for name, _ in self.source]})
            if model.weight[0] == 2:
                raise ArithmeticError("the transfer fails")
            self.client.finish_weight_update()

    requests, model = dict[str, bytes](), fill(Small(), 1)
    with (
        serve(recorded(requests, {FINISH: b"{}"})) as url,
        wsync.HTTPWeightSyncScheme(url, transfer=Own, pause="keep") as scheme,
    ):
        scheme.init_on_sender("policy", model=model)
        scheme.connect()
        assert [*requests] == ["/get_world_size", INIT, "/pause", START, UPDATE, FINISH, "/resume"]
        with pytest.raises(wsync.WorkerFailed, match="the transfer fails"):
            scheme.send(fill(model, 2))
        scheme.send(fill(model, 3))


def test_many_pauses_do_not_keep_a_resume_out() -> None:
    with EngineServer().serving() as engine, engine.app.generation() as generation:
        with generation.step():
            pass
        threads = [threading.Thread(target=engine.ask, args=("POST", "/pause?mode=wait")) for _ in range(40)]
        for thread in threads:
            thread.start()
        while not engine.ask("GET", "/is_paused")[1]["is_paused"]:
            pass
        assert engine.ask("GET", "/health")[0] == 200
        while engine.ask("GET", "/is_paused")[1]["is_paused"] or any(one.is_alive() for one in threads):
            assert engine.ask("POST", "/resume")[1] == {"status": "resumed"}
        engine.ask("POST", "/pause?mode=abort")
        with pytest.raises(wsync.GenerationAborted), generation.step():
            pass
