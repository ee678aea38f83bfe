"""The engine's application as others serve it. What it refuses is tested in tests/unit/test_engine.py."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from asgi_server import serve

import wsync
from wsync.testing.models import Small


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
        with wsync.HTTPWeightSyncScheme(url, token="t") as scheme:
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
