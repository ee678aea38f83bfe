"""After a fault between a trainer and engines: nothing stays paused, and a new attempt begins afresh."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from http_engines import trainer

import wsync
from wsync.deadlines import remaining
from wsync.engine.client import EngineClient, EngineError
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


def test_a_transfer_that_exits_does_not_end_the_thread() -> None:
    class Exiting(LikeVLLM):
        def send_weights(self) -> None:
            if self.client.version == 2:
                raise SystemExit("the transfer exits")
            super().send_weights()

    with serve(engine([])) as url, trainer(url, transfer=Exiting, timeout=2.0) as scheme:
        with pytest.raises(wsync.WorkerFailed, match="the transfer exits"):
            scheme.send(fill(Small(), 2))
        scheme.send(fill(Small(), 3))


def test_a_resume_that_fails_is_made_again() -> None:
    routes = list[str]()

    async def fail_once(route: str) -> int:
        return 500 if route == "/resume" and routes.count("/resume") == 2 else 200

    with serve(engine(routes, fail_once)) as url, trainer(url, transfer=LikeVLLM, pause="keep") as scheme:
        with pytest.raises(wsync.WorkerFailed, match="phase resume"):
            scheme.send(fill(Small(), 2))
        assert routes[-2:] == ["/resume", "/resume"]


def test_a_transfer_is_made_again_for_an_engine_that_was_started_again() -> None:
    routes, made = list[str](), "/init_weight_transfer_engine"
    with serve(engine(routes)) as url:
        context = trainer(url, transfer=LikeVLLM)
        scheme = context.__enter__()
    try:
        with pytest.raises(wsync.WorkerDied):
            scheme.send(fill(Small(), 2))
        with serve(engine(routes), port=int(url.rsplit(":", 1)[1])):
            scheme.readmit(0)
            assert routes.count(made) == 2
            scheme.send(fill(Small(), 3))
            assert routes.count(made) == 2
            scheme.readmit(0)  # the trainer has not noticed, and is told
            assert routes.count(made) == 3
    finally:
        context.__exit__(None, None, None)


def test_an_attempt_that_was_given_up_does_not_answer_for_the_next_one() -> None:
    """The first attempt ends, with its timeout, after the second one has begun."""
    routes, resumed, silent = list[str](), asyncio.Event(), [False]

    async def handle(route: str) -> int:
        if silent[0] and route == "/start_weight_update":
            await asyncio.Event().wait()  # this attempt gets no answer
        if silent[0] and route == "/resume":
            await resumed.wait()
        if silent[0] and route == "/get_world_size":  # the second attempt is about to begin
            silent[0] = False
            asyncio.get_running_loop().call_later(0.2, resumed.set)
        return 200

    with serve(engine(routes, handle)) as url, trainer(url, transfer=LikeVLLM, pause="keep") as scheme:
        silent[0] = True
        scheme.timeout = 0.3
        with pytest.raises(wsync.SyncTimeout):
            scheme.send(fill(Small(), 2))
        scheme.readmit(0, timeout=30.0)
        assert routes.count("/finish_weight_update") == 2


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


def test_a_request_and_its_answer_have_one_deadline() -> None:
    """The body is read shortly before the deadline, and nothing is answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = EngineClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
        client.deadline = deadline = time.monotonic() + 1.0

        def read_late() -> None:
            connection, _ = listener.accept()
            with connection:
                threading.Event().wait(deadline - 0.1 - time.monotonic())
                while connection.recv(1 << 20):
                    pass

        serving = threading.Thread(target=read_late)
        serving.start()
        with pytest.raises(EngineError, match="no answer before the deadline"):
            client.send_body([bytes(32 << 20)])
        assert time.monotonic() < deadline + 0.6
        serving.join()


def test_the_number_of_workers_is_that_of_the_urls() -> None:
    with wsync.HTTPWeightSyncScheme(["http://a", "http://b"]) as scheme:
        for count in (1, 3):
            with pytest.raises(ValueError, match="urls"):
                scheme.init_on_sender("policy", model=Small(), num_workers=count)
        scheme.init_on_sender("policy", model=Small(), num_workers=2)


def test_a_request_that_ends_while_it_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ending(http.client.HTTPConnection):
        """While ``aborting``, its request ends as soon as another thread has looked at its socket."""

        aborting = False
        looks = 0

        @property
        def sock(self) -> Any:
            self.looks += self.aborting
            return None if self.looks > 1 and self.aborting else self._sock

        @sock.setter
        def sock(self, sock: Any) -> None:
            self._sock = sock

    monkeypatch.setattr("wsync.engine.client.HTTPConnection", Ending)
    app = wsync.engine_app(Small(), token=None)
    with serve(app) as url, closing(EngineClient(url)) as client:
        assert client.get_world_size() == 1
        monkeypatch.setattr(Ending, "aborting", True)
        client.abort()
        monkeypatch.setattr(Ending, "aborting", False)


def test_a_connection_that_was_not_used_for_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server may close it just then, and the next request would get no answer."""
    body = b'{"world_size": 1}'
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    def serve_once_per_connection() -> None:
        for _ in range(2):
            connection = server.accept()[0]
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

    monkeypatch.setattr("wsync.engine.client._IDLE_LIMIT", 0.0, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        serving = threading.Thread(target=serve_once_per_connection, daemon=True)
        serving.start()
        with closing(EngineClient(f"http://127.0.0.1:{server.getsockname()[1]}")) as client:
            assert [client.get_world_size() for _ in range(2)] == [1, 1]
        serving.join()


def test_a_host_that_does_not_answer_before_the_deadline_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's own limit for a connection is an error of the class that a deadline has."""

    def time_out(*_: Any, **__: Any) -> socket.socket:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(socket, "create_connection", time_out)
    with pytest.raises(EngineError, match="Connection timed out") as caught:
        EngineClient("http://127.0.0.1:9").get_world_size()
    assert caught.value.died and not caught.value.late


def test_a_send_without_a_thread_is_an_error_and_the_next_one_begins_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        monkeypatch.undo()
        raise RuntimeError("can't start new thread")

    app = wsync.engine_app(Small(), token=None)
    with serve(app) as url, wsync.HTTPWeightSyncScheme(url, timeout=30.0) as scheme:
        scheme.init_on_sender("policy")
        scheme.connect()
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
            patch.setattr(threading.Thread, "start", refuse)
            scheme.send(fill(Small(), 1))
        scheme.send(fill(Small(), 2))


def test_a_send_that_is_interrupted_as_its_thread_starts_leaves_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupt(thread: threading.Thread) -> None:
        start(thread)
        if thread.name.startswith("wsync-engine"):
            raise KeyboardInterrupt

    def threads() -> int:
        return sum(thread.name.startswith("wsync-engine") for thread in threading.enumerate())

    app = wsync.engine_app(Small(), token=None)
    with serve(app) as url, wsync.HTTPWeightSyncScheme(url, timeout=30.0) as scheme:
        scheme.init_on_sender("policy")
        scheme.connect()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(threading.Thread, "start", interrupt)
            scheme.send(fill(Small(), 1))
        scheme.send(fill(Small(), 2))
        assert threads() == 1
    assert threads() == 0


def test_a_port_that_is_in_use_is_an_error_of_the_test_server() -> None:
    with serve(like_nothing) as url, pytest.raises(OSError, match="in use"):
        serve(like_nothing, port=int(url.rsplit(":", 1)[1])).__enter__()


async def like_nothing(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("there is no request")
