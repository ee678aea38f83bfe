"""Generations in flight while an engine's weights change: on one version, aborted, or named as mixed."""

from __future__ import annotations

import asyncio
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


def test_a_pause_that_lasts_too_long_is_an_error_and_the_engine_goes_on() -> None:
    app, begun, go_on = wsync.engine_app(Small(), token=None), threading.Event(), threading.Event()
    with serve(app) as url, wsync.HTTPWeightSyncScheme(url, pause="wait") as scheme, ThreadPoolExecutor(1) as threads:
        scheme.init_on_sender("policy", model=fill(Small(), 1))
        scheme.connect()
        running = threads.submit(generate, app, begun, go_on)
        assert begun.wait(30)
        scheme.timeout = 0.5
        with pytest.raises(wsync.SyncTimeout, match="phase pause"):
            scheme.send(fill(Small(), 2))
        go_on.set()
        assert running.result(30) == [("1", 0, 4)]
        scheme.timeout = 30.0
        scheme.send(fill(Small(), 3))
        assert generate(app, begun, go_on) == [("3", 0, 4)]


def test_a_pause_of_a_trainer_that_was_killed_ends() -> None:
    app, done = wsync.engine_app(Small(), token=None, pause_limit=0.2), threading.Event()
    done.set()
    with serve(app) as url:
        assert ask(url, "POST", "/pause?mode=keep") == {"status": "paused"}
        assert ask(url, "GET", "/is_paused") == {"is_paused": True}
        assert len(generate(app, done, done)) == 1
        assert ask(url, "GET", "/is_paused") == {"is_paused": False}


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_the_end_of_an_engine_ends_its_pause(mode: str) -> None:
    """Whatever waits for a trainer that does not come back would keep the process from ending."""
    app, begun, go_on = wsync.engine_app(Small(), token=None, pause_limit=None), threading.Event(), threading.Event()
    with serve(app) as url, ThreadPoolExecutor(2) as threads:
        running = threads.submit(generate, app, begun, go_on)
        assert begun.wait(30)
        pausing = threads.submit(ask, url, "POST", f"/pause?mode={mode}")
        while not ask(url, "GET", "/is_paused")["is_paused"]:
            pass
        if mode == "keep":
            go_on.set()
        app.close()
        assert "error" in pausing.result(30) or mode == "keep"
        go_on.set()
        assert running.result(30) == [("0", 0, 4)]


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


def test_a_pause_of_the_engine_itself_that_ends_after_the_resume_does_not_last() -> None:
    """A trainer that has given up waiting sends its /resume while ``pause`` still waits."""
    begun, ended, called = threading.Event(), threading.Event(), list[str]()

    def pause(mode: str) -> None:
        begun.set()
        assert ended.wait(30)
        called.append("pause")

    app = wsync.engine_app(Small(), token=None, pause=pause, resume=lambda: called.append("resume"))
    with serve(app) as url, ThreadPoolExecutor(1) as threads:
        pausing = threads.submit(ask, url, "POST", "/pause?mode=wait")
        assert begun.wait(30)
        assert ask(url, "POST", "/resume") == {"status": "resumed"}
        ended.set()
        assert "/resume" in pausing.result(30)["error"]
        assert called == ["resume", "pause", "resume"]
        assert ask(url, "GET", "/is_paused") == {"is_paused": False}


def test_a_failed_update_leaves_no_engine_paused() -> None:
    def refuse(pairs: Any) -> None:
        raise ArithmeticError

    with serve(wsync.engine_app(load=refuse, token=None)) as url, wsync.HTTPWeightSyncScheme(url, pause="keep") as one:
        one.init_on_sender("policy", model=fill(Small(), 1))
        with pytest.raises(wsync.WorkerFailed, match="ArithmeticError"):
            one.connect()
        assert ask(url, "GET", "/is_paused") == {"is_paused": False}


def test_a_wait_after_a_keep_lets_generations_in_flight_end() -> None:
    """The generation that stopped at the first pause goes on for the second, which waits for its end."""
    app, begun, go_on = wsync.engine_app(Small(), token=None), threading.Event(), threading.Event()
    with serve(app) as url, ThreadPoolExecutor(1) as threads:
        running = threads.submit(generate, app, begun, go_on)
        assert begun.wait(30)
        ask(url, "POST", "/pause?mode=keep")
        go_on.set()  # the next step waits
        assert ask(url, "POST", "/pause?mode=wait") == {"status": "paused"}
        assert running.result(30) == [("0", 0, 4)]
        ask(url, "POST", "/resume")


def test_a_pause_that_another_one_replaces_is_an_error() -> None:
    app, begun, go_on = wsync.engine_app(Small(), token=None), threading.Event(), threading.Event()
    with serve(app) as url, ThreadPoolExecutor(2) as threads:
        running = threads.submit(generate, app, begun, go_on)
        assert begun.wait(30)
        first = threads.submit(ask, url, "POST", "/pause?mode=wait")
        while not ask(url, "GET", "/is_paused")["is_paused"]:
            pass
        assert ask(url, "POST", "/pause?mode=keep") == {"status": "paused"}
        assert "another /pause" in first.result(30)["error"]
        ask(url, "POST", "/resume")
        go_on.set()
        assert running.result(30) == [("0", 0, 4)]


def test_a_pause_that_exceeds_its_limit_is_an_error_that_names_the_limit() -> None:
    app, begun, go_on = wsync.engine_app(Small(), token=None, pause_limit=0.2), threading.Event(), threading.Event()
    with serve(app) as url, ThreadPoolExecutor(1) as threads:
        running = threads.submit(generate, app, begun, go_on)
        assert begun.wait(30)
        assert "pause_limit, 0.2 s" in ask(url, "POST", "/pause?mode=wait")["error"]
        assert ask(url, "GET", "/is_paused") == {"is_paused": False}
        go_on.set()
        running.result(30)


def test_a_step_that_fails_is_of_no_version() -> None:
    target = fill(Small(), 1)
    app = wsync.engine_app(target, token=None)
    with serve(app) as url, wsync.HTTPWeightSyncScheme(url) as scheme, app.generation() as one:
        with one.step():
            pass
        scheme.init_on_sender("policy", model=target)
        scheme.connect()
        with pytest.raises(ArithmeticError), one.step():
            raise ArithmeticError
        assert not one.mixed and [(span.version, span.start, span.end) for span in one.weight_versions] == [("0", 0, 1)]


def test_an_engine_whose_pause_fails_is_not_said_to_be_paused() -> None:
    def pause(mode: str) -> None:
        raise ArithmeticError

    with serve(wsync.engine_app(Small(), token=None, pause=pause, resume=lambda: None)) as url:
        assert "ArithmeticError" in ask(url, "POST", "/pause")["error"]
        assert ask(url, "GET", "/is_paused") == {"is_paused": False}


def test_paused_generations_in_all_threads_of_the_event_loop_do_not_stop_an_update() -> None:
    """An update takes no thread of those that an engine generates in; it loads weights in one thread."""
    loading, waits = set[int](), threading.Event()
    app = wsync.engine_app(load=lambda pairs: loading.update(threading.get_ident() for _ in pairs), token=None)

    def generate_one() -> None:
        waits.set()
        with app.generation():
            return

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] != "/generate":
            await app(scope, receive, send)
            return
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await asyncio.to_thread(generate_one)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})

    with serve(engine) as url, wsync.HTTPWeightSyncScheme(url) as scheme, ThreadPoolExecutor(1) as threads:
        scheme.init_on_sender("policy", model=fill(Small(), 1))
        scheme.connect()
        assert ask(url, "POST", "/pause?mode=keep") == {"status": "paused"}
        running = threads.submit(ask, url, "POST", "/generate")
        assert waits.wait(30)
        scheme.send()
        assert ask(url, "POST", "/resume") == {"status": "resumed"}
        assert running.result() == {}
    assert len(loading) == 1


def test_an_engine_whose_load_has_failed_half_way_serves_no_step_until_a_version_is_loaded() -> None:
    fails = False

    def load(pairs: Any) -> None:
        for _ in pairs:
            if fails:
                raise ArithmeticError("no memory")

    app, go_on = wsync.engine_app(load=load, token=None), threading.Event()
    go_on.set()
    with serve(app) as url, wsync.HTTPWeightSyncScheme(url, pause="keep") as scheme:
        scheme.init_on_sender("policy", model=fill(Small(), 1))
        scheme.connect()
        fails = True
        for _ in range(2):
            with pytest.raises(wsync.WorkerFailed, match="no memory"):
                scheme.send(fill(Small(), 2))
            with pytest.raises(wsync.WeightSyncError, match="this engine may have weights of two versions"):
                generate(app, go_on, go_on)
            assert "two versions" in ask(url, "GET", "/health")["error"]
            assert ask(url, "GET", "/is_paused") == {"is_paused": False}
        fails = False
        scheme.send(fill(Small(), 3))
        assert generate(app, go_on, go_on) == [(str(scheme.version), 0, 4)]
        assert ask(url, "GET", "/health") == {}
