"""Weights over HTTP: engines in processes of their own, driven through the phases of vLLM's weight transfer."""

import asyncio
import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from asgi_server import serve
from http_engines import TOKEN, engines, trainer, value

import wsync
from wsync.testing import WorkerPool
from wsync.testing.models import Small, fill
from wsync.transforms import Cast


def test_every_version_arrives(pool: WorkerPool) -> None:
    with engines(pool, 2) as (workers, urls), trainer(urls) as scheme:
        assert workers.call(value) == [("1", [1.0] * 4)] * 2
        for number in range(2, 5):
            report = scheme.send(fill(Small(), number))
            assert report is not None and report.version == number and report.phases["apply"] > 0
            assert workers.call(value) == [(str(number), [float(number)] * 4)] * 2
        scheme.send(fill(Small(), 9), worker_ids=[1])
        assert workers.call(value) == [("4", [4.0] * 4), ("5", [9.0] * 4)]
        scheme.send_async(fill(Small(), 10))
        scheme.send_async(fill(Small(), 11))
        scheme.wait_async()
        assert workers.call(value) == [("7", [11.0] * 4)] * 2


def test_verify_names_what_differs() -> None:
    engine: Any = {"weight": torch.zeros(4, dtype=torch.bfloat16), "other": torch.zeros(2, dtype=torch.bfloat16)}
    options: Any = {"token": None, "receive_transform": Cast("bfloat16")}
    server = ExitStack()
    url = server.enter_context(serve(wsync.engine_app(engine, **options)))
    with server, trainer(url, {"weight": torch.rand(4), "other": torch.rand(2)}, **options) as scheme:
        scheme.send()
        (row,) = scheme.verify()
        assert (row["verified"], row["where"]) == (2, url)
        engine["weight"][2] += 1
        with pytest.raises(wsync.WorkerFailed, match=rf"{url}: phase verify(?s:.*)version 2, with other.*of 'weight'$"):
            scheme.verify()
        server.close()
        with pytest.raises(wsync.WorkerDied, match=rf"{url}: phase verify .*refused"):
            scheme.verify()
        assert scheme.ledger()[0]["state"] == "dead"
    with (
        serve(wsync.engine_app(load=list, token=None)) as url,
        trainer(url, token=None) as scheme,
        pytest.raises(wsync.WorkerFailed, match="a function has loaded the weights"),
    ):
        scheme.verify()


def test_no_forward_is_torn() -> None:
    target, stop, odd = fill(Small(4096), 0), threading.Event(), list[Any]()

    def act() -> None:
        while not stop.is_set():
            lowest, highest = target(twice=True).tolist()
            if lowest != highest:
                odd.append((lowest, highest))

    with (
        serve(wsync.engine_app(target, token=None)) as url,
        trainer(url, fill(Small(4096), 1), token=None) as scheme,
        ThreadPoolExecutor(1) as executor,
    ):
        acting = executor.submit(act)
        try:
            for number in range(30):
                scheme.send(fill(Small(4096), number))
        finally:
            stop.set()
        acting.result()
    assert not odd and target()[0] == 29


# --- the application as others serve it: what it refuses is tested in tests/unit/test_engine.py ---


def test_nothing_is_read_before_the_token() -> None:
    """Also by an application of one's own, which is asked by ASGI."""
    app = wsync.engine_app(load=list, token="right")
    for route in ("/init_weight_transfer_engine", "/update_weights", "/get_world_size", "/nowhere"):
        sent = list[Any]()

        async def receive() -> Any:
            raise AssertionError("the body was read")

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        for given_token in ([], [(b"authorization", b"Bearer wrong")], [(b"authorization", b"right")]):
            scope = {"type": "http", "method": "POST", "path": route, "headers": given_token}
            asyncio.run(app(scope, receive, send))
            assert sent[-2]["status"] == 401


def test_uvicorn_serves_it() -> None:
    """No thread of the application is left when the server has ended."""
    before = {*threading.enumerate()}
    loaded = dict[str, torch.Tensor]()
    app = wsync.engine_app(load=lambda pairs: loaded.update({n: t.clone() for n, t in pairs}), token="t")
    with serve(app, lifespan="auto", timeout_graceful_shutdown=None) as url:
        model = torch.nn.Linear(1000, 1000)
        with trainer(url, model, token="t") as scheme:
            scheme.send()
            assert torch.equal(loaded["weight"], model.weight) and app.version == "2"
        with pytest.raises(wsync.WorkerFailed, match=r"401.*token"), trainer(url, token="other"):
            pass
    for thread in {*threading.enumerate()} - before:
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A file with a self-signed certificate of 127.0.0.1, and its key."""
    command = shutil.which("openssl") or pytest.skip("there is no openssl command")
    made = tmp_path / "made.pem"
    options = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=engine -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [command, *options.split(), "-keyout", made, "-out", tmp_path / "own.pem"],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    made.write_bytes(made.read_bytes() + (tmp_path / "own.pem").read_bytes())
    return made


def test_only_a_trusted_engine_is_sent_anything(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Small()
    with serve(wsync.engine_app(target, token=TOKEN), ssl_certfile=certificate, ssl_keyfile=certificate) as served:
        url = served.replace("http:", "https:")
        with pytest.raises(wsync.SyncTimeout, match=r"(?i)certificate"), trainer(url, timeout=3.0):
            pass
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with trainer(url):
            assert target()[0] == 1
