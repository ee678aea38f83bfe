"""Weights over HTTP: engines in processes of their own, driven through the phases of vLLM's weight transfer."""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
import torch
from http_engines import engines, trainer, value
from torch import Tensor

import wsync
from wsync.testing import WorkerPool
from wsync.testing.asgi import serve
from wsync.testing.models import Small, fill


@pytest.mark.parametrize("pause", [None, "abort", "wait", "keep"])
def test_every_version_arrives(pool: WorkerPool, pause: Any) -> None:
    with engines(pool, 2) as (workers, urls), trainer(urls, pause=pause) as scheme:
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


def count_bodies(app: Any, sizes: list[int]) -> Callable[..., Awaitable[None]]:
    """Return the application, and note the sizes of bodies with weights."""

    async def counted(scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope.get("path") == "/update_weights":
            sizes.append(int(dict(scope["headers"])[b"content-length"]))
        await app(scope, receive, send)

    return counted


class Extremes(Small):
    def forward(self) -> Tensor:
        return torch.stack([self.weight.min(), self.weight.max()])


def test_no_forward_is_torn() -> None:
    target, stop, odd = fill(Extremes(100_000), 0), threading.Event(), list[Any]()

    def act() -> None:
        while not stop.is_set():
            lowest, highest = target().tolist()
            if lowest != highest:
                odd.append((lowest, highest))

    thread = threading.Thread(target=act)
    with serve(wsync.engine_app(target, token=None)) as url, trainer(url, fill(Small(100_000), 1)) as scheme:
        thread.start()
        try:
            for number in range(30):
                scheme.send(fill(Small(100_000), number))
        finally:
            stop.set()
            thread.join()
    assert not odd and target()[0] == 29


# --- a transfer beside HTTP, as vLLM's own trainer engines are ---


def like_vllm(asked: list[tuple[str, Any]]) -> Callable[..., Awaitable[None]]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        query = f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
        asked.append((f"{scope['method']} {scope['path']}{query}", json.loads(body) if body else None))
        content = b'{"world_size": 2}' if scope["path"] == "/get_world_size" else b'{"message": "done"}'
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    return app
