"""Generations in flight while an engine's weights change: on one version, aborted, or named as mixed."""

from __future__ import annotations

import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

import wsync
from wsync.testing.asgi import serve
from wsync.testing.models import Small, fill


def ask(url: str, method: str, route: str) -> Any:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        connection.request(method, route)
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def generate(app: Any, begun: threading.Event, go_on: threading.Event, steps: int = 4) -> list[tuple[str, int, int]]:
    """Generate a sequence, half of it after ``go_on``; return the spans of versions."""
    with app.generation() as one:
        try:
            for step in range(steps):
                if step == steps // 2:
                    begun.set()
                    assert go_on.wait(30)
                with one.step():
                    pass
        except wsync.GenerationAborted:
            pass
        assert one.mixed == (len(one.weight_versions) > 1)
        return [(span.version, span.start, span.end) for span in one.weight_versions]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (None, [("1", 0, 2), ("2", 2, 4)]),  # mixed, and named so
        ("keep", [("1", 0, 2), ("2", 2, 4)]),
        ("abort", [("1", 0, 2)]),
        ("wait", [("1", 0, 4)]),
    ],
)
def test_a_generation_in_flight(mode: Any, expected: list[tuple[str, int, int]]) -> None:
    app, begun, go_on = wsync.engine_app(Small(), token=None), threading.Event(), threading.Event()
    with serve(app) as url, wsync.HTTPWeightSyncScheme(url, pause=mode) as scheme, ThreadPoolExecutor(1) as threads:
        scheme.init_on_sender("policy", model=fill(Small(), 1))
        scheme.connect()
        running = threads.submit(generate, app, begun, go_on)
        assert begun.wait(30)
        if mode == "wait":
            threading.Timer(0.2, go_on.set).start()
        scheme.send(fill(Small(), 2))
        go_on.set()
        assert running.result(30) == expected
        assert generate(app, begun, go_on) == [("2", 0, 4)]


def test_a_pause_of_a_trainer_that_was_killed_ends() -> None:
    app, done = wsync.engine_app(Small(), token=None, pause_limit=0.2), threading.Event()
    done.set()
    with serve(app) as url:
        assert ask(url, "POST", "/pause?mode=keep") == {"status": "paused"}
        assert ask(url, "GET", "/is_paused") == {"is_paused": True}
        assert len(generate(app, done, done)) == 1
        assert ask(url, "GET", "/is_paused") == {"is_paused": False}


def test_pause_and_resume_of_the_engine_itself() -> None:
    called = list[str]()

    async def pause(mode: str) -> None:
        called.append(mode)

    app = wsync.engine_app(Small(), token=None, pause=pause, resume=lambda: called.append("resume"))
    with serve(app) as url, wsync.HTTPWeightSyncScheme(url, pause="keep") as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1))
        scheme.connect()
        assert called == ["keep", "resume"]
    with pytest.raises(ValueError, match="go together"):
        wsync.engine_app(Small(), token=None, pause=pause)
