"""Faults between a trainer and engines over HTTP: each an error that names the engine and the phase."""

import base64
import gc
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from asgi_server import serve
from http_engines import engines, refuse_next, start_engine, stop_engine, trainer, value

import wsync
from wsync.engine.client import BodyTransfer
from wsync.testing import WorkerPool, commands
from wsync.testing.models import Small, WithExtraState, fill


def test_a_killed_engine_is_an_error_at_once_and_another_takes_its_place(pool: WorkerPool) -> None:
    with engines(pool, 2) as (workers, urls), trainer(urls) as scheme:
        workers[1].kill()
        with pytest.raises(wsync.WorkerDied, match=rf"worker 1: {urls[1]}: phase start .*refused") as caught:
            scheme.send(fill(Small(), 2))
        assert list(caught.value.workers) == [1]
        assert workers[0].call(value) == ("2", [2.0] * 4)
        scheme.send(fill(Small(), 3))  # to those that are left
        workers.replace(1)
        workers[1].call(start_engine, int(urls[1].rsplit(":", 1)[1]))
        scheme.readmit(1)
        assert workers.call(value) == [("3", [3.0] * 4)] * 2
        scheme.send(fill(Small(), 4))
        assert workers.call(value) == [("4", [4.0] * 4)] * 2


def test_a_silent_engine_is_an_error_at_the_deadline(pool: WorkerPool) -> None:
    with engines(pool, 2) as (workers, urls), trainer(urls) as scheme:
        workers[1].stop()
        scheme.timeout = 1.0
        with pytest.raises(wsync.SyncTimeout, match=rf"worker 1: {urls[1]}: phase start.*no answer before"):
            scheme.send(fill(Small(), 2))
        assert workers[0].call(value) == ("2", [2.0] * 4)
        workers[1].resume()
        scheme.timeout = 30.0
        scheme.send(fill(Small(), 3))
        assert workers.call(value) == [("3", [3.0] * 4)] * 2


def test_a_new_trainer_ends_a_body_whose_sender_is_gone() -> None:
    with serve(wsync.engine_app(Small(), token=None)) as url:
        place = url.removeprefix("http://").split(":")

        def begin(client: Any, source: Any) -> Any:
            layout = base64.b64encode(source.layout.encode()).decode()
            client.init_weight_transfer_engine({"transfer": "body", "session": "gone", "layout": layout})
            return client

        with suppress(wsync.WorkerFailed), trainer(url, transfer=begin, token=None, timeout=5.0):
            pass  # it has initialised the engine, which cannot be paused
        with socket.create_connection((place[0], int(place[1]))) as gone:
            gone.sendall(
                b"POST /update_weights?session=gone&checksum=0 HTTP/1.1\r\nHost: a\r\nContent-Length: 16\r\n\r\n1"
            )
            with trainer(url, token=None, timeout=5.0) as scheme:
                scheme.send()
            assert gone.recv(1000).startswith(b"HTTP/1.1 409")


def test_an_unknown_route_reads_no_body() -> None:
    with serve(wsync.engine_app(Small(), token=None)) as url:
        place = url.removeprefix("http://").split(":")
        with socket.create_connection((place[0], int(place[1])), timeout=10.0) as stranger:
            stranger.sendall(b"POST /health HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000\r\n\r\n1")
            said = b""
            while part := stranger.recv(1000):
                said += part
        assert said.startswith(b"HTTP/1.1 404")


def control_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("wsync-control")]


def test_nothing_is_left_of_an_abandoned_scheme() -> None:
    with serve(wsync.engine_app(Small(), token=None)) as url:
        scheme = wsync.HTTPWeightSyncScheme(url)
        scheme.init_on_sender("policy", model=Small())
        scheme.connect()
        assert control_threads()
        del scheme
        gc.collect()
        assert not control_threads()


def test_weights_that_do_not_fit_are_an_error_at_connect() -> None:
    with serve(wsync.engine_app(Small(), token=None)) as url:
        with (
            pytest.raises(wsync.WorkerFailed, match=r"phase init .*422: LayoutMismatch.*weight"),
            trainer(url, Small(7)),
        ):
            pass
        with pytest.raises(wsync.LayoutMismatch, match="extra state cannot be sent"), trainer(url, WithExtraState()):
            pass
        with wsync.HTTPWeightSyncScheme(url) as scheme:
            scheme.init_on_sender("policy")
            scheme.connect()
            with pytest.raises(wsync.WorkerFailed, match=r"applied nowhere(?s:.)*LayoutMismatch"):
                scheme.send(Small(7))


def test_an_engine_that_never_comes() -> None:
    with wsync.HTTPWeightSyncScheme("http://127.0.0.1:9") as scheme:
        scheme.init_on_sender("policy", model=Small())
        with pytest.raises(ValueError, match="its process cannot be given"):
            scheme.connect(processes={0: threading.Event()})  # pyright: ignore[reportArgumentType]
    said = r"worker 0: http://127\.0\.0\.1:9: phase connect .*refused"
    with pytest.raises(wsync.SyncTimeout, match=said), trainer("http://127.0.0.1:9", timeout=0.3):
        pass


ON_DISK = {"transfer": "disk", "folder": "none"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"urls": []}, "at least one"),
        ({"urls": ["http://a", "http://a/"]}, "each engine once"),
        ({"urls": "ftp://a"}, "like 'http://host:8000'"),
        ({"urls": "http://user:word@a"}, "like 'http://host:8000', not 'http://…@a'"),
        *(({"urls": f"http://{end}"}, "like 'http://host:8000'") for end in ("a/b c", "ü", "a/?", "a#", "[::1", "a:0")),
        ({"urls": "http://a", "pause": "stop"}, "pause is 'abort'"),
        ({"urls": "http://a", "transfer": "nccl"}, "transfer is 'wsync'"),
        ({"urls": "http://a", "engine": "sglang"}, "SGLang takes"),
        ({"urls": "http://a", "engine": "sglang", "pause": "wait", **ON_DISK}, "no pause='wait'"),
        ({"urls": "http://a", "token": "x\r\ny"}, "printable"),
    ],
)
def test_wrong_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        wsync.HTTPWeightSyncScheme(**options)


def test_the_receiving_end_is_the_application() -> None:
    with pytest.raises(RuntimeError, match="engine_app"):
        wsync.HTTPWeightSyncScheme("http://a").init_on_receiver("policy", model=Small(), worker_idx=0)


# --- engines and workers that switch together: all of them, or none ---


@contextmanager
def fleet(pool: WorkerPool) -> Iterator[tuple[Any, list[str], Any, Callable[[float], Any], Callable[[], list[Any]]]]:
    """Two engines of a trainer, and a worker that has another model; what sends both, and what they have."""
    critic = wsync.MultiProcessWeightSyncScheme(timeout=30.0)
    with engines(pool, 2) as (servers, urls), pool.group(1) as actors, trainer(urls) as scheme, critic:
        critic.init_on_sender("critic", model=fill(Small(), 1), num_workers=1)
        actors[0].start(commands.join, critic, Small, 0, "critic")
        critic.connect()
        actors[0].result()

        def send(number: float) -> Any:
            return wsync.synchronize({scheme: fill(Small(), number), critic: fill(Small(), number)})

        def values() -> list[Any]:
            return [*(one[1][0] for one in servers.call(value)), *actors[0].call(commands.output, "critic")[:1]]

        yield servers, urls, scheme, send, values


def at_the(step: str, engine: int, urls: list[str], act: Callable[[], object], patch: pytest.MonkeyPatch) -> None:
    """Have ``act`` called after an engine has prepared, or before it commits."""
    usual = getattr(BodyTransfer, step)

    def take(transfer: Any) -> None:
        mine = transfer._client.url == urls[engine]
        if mine and step == "commit":
            act()
        usual(transfer)
        if mine and step == "prepare" and transfer._source.update.undecided:
            act()

    patch.setattr(BodyTransfer, step, take)


def test_all_switch_and_an_engine_that_fails_before_the_decision_leaves_all_with_the_old_version(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet(pool) as (servers, urls, scheme, send, values):
        reports = send(2)
        assert reports["policy"].version == reports["critic"].version == 2 and values() == [2.0] * 3
        servers[0].call(stop_engine)  # started again, it refuses
        servers[0].call(start_engine, int(urls[0].rsplit(":", 1)[1]))
        with pytest.raises(wsync.WorkerFailed, match=rf"applied nowhere(?s:.*){urls[0]}: phase start .*readmitted"):
            send(3)
        scheme.readmit(0)
        assert values() == [2.0] * 3
        scheme.timeout = 1.0
        servers[1].stop()
        with pytest.raises(wsync.SyncTimeout, match=rf"applied nowhere(?s:.*)worker 1: {urls[1]}: phase start"):
            send(4)
        servers[1].resume()
        scheme.timeout = 30.0
        assert values() == [2.0] * 3
        with monkeypatch.context() as patch:
            at_the("prepare", 1, urls, servers[1].kill, patch)
            scheme.send_async(fill(Small(), 7))  # the update that is aborted does not take its place
            with pytest.raises(wsync.WorkerDied, match=rf"applied nowhere(?s:.*)worker 1: {urls[1]}: phase health"):
                send(5)
        assert values() == [7.0, 2.0]  # of those that live
        send(6)
        assert values() == [6.0] * 2
        servers.replace(1).call(start_engine, int(urls[1].rsplit(":", 1)[1]))
        scheme.readmit(1)
        assert values() == [6.0] * 3


def test_what_fails_after_the_decision_is_named_and_the_others_switch(
    pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet(pool) as (servers, urls, scheme, send, values):
        servers[0].call(refuse_next)
        with pytest.raises(wsync.WorkerFailed, match=rf"was committed(?s:.*){urls[0]}: phase finish(?s:.*)refuses"):
            send(2)
        assert values() == [1.0, 2.0, 2.0]
        with monkeypatch.context() as patch:
            at_the("commit", 0, urls, servers[0].kill, patch)
            with pytest.raises(wsync.WorkerDied, match=rf"was committed(?s:.*)worker 0: {urls[0]}: phase finish"):
                send(3)
        assert values() == [3.0] * 2
        servers.replace(0).call(start_engine, int(urls[0].rsplit(":", 1)[1]))
        scheme.readmit(0)
        assert values() == [3.0] * 3
        scheme.send(fill(Small(), 4))
        assert values() == [4.0, 4.0, 3.0]
