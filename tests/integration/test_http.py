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
from wsync.testing.models import EveryTensorKind, Small, fill, scramble


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


def test_every_kind_of_tensor_in_bounded_bodies() -> None:
    given = scramble(EveryTensorKind(), 1).state_dict()
    weights = {name: tensor for name, tensor in given.items() if isinstance(tensor, torch.Tensor)}
    loaded, sizes = dict[str, Tensor](), list[int]()
    app = wsync.engine_app(load=lambda pairs: loaded.update({name: one.clone() for name, one in pairs}), token=None)
    limit = max(tensor.nbytes for tensor in weights.values())
    with serve(count_bodies(app, sizes)) as url:
        transport = wsync.HTTPWeightSyncScheme(url, chunk_bytes=limit).create_transport()
        transport.setup_connection_and_weights_on_sender()
        transport.send_weights(weights)
        transport.close()
    assert loaded.keys() == weights.keys() and len(sizes) > 2
    assert max(sizes) < limit + 16_384  # with the header
    for name, tensor in weights.items():
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=0, equal_nan=True)


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


def test_a_transfer_of_ones_own_drives_the_documented_routes() -> None:
    """A server with vLLM's routes and fields; the weights do not go through it."""
    asked, passed = list[tuple[str, Any]](), list[dict[str, Tensor]]()

    class Trainer:  # as vLLM's TrainerWeightTransferEngine, with its VLLMWeightSyncClient and WeightSource
        def __init__(self, client: Any, source: Any) -> None:
            self.client, self.source = client, source
            client.init_weight_transfer_engine({"world_size": 1 + client.get_world_size()})

        def send_weights(self) -> None:
            self.client.start_weight_update()
            meta = self.source.metadata()
            passed.append({name: tensor.clone() for name, tensor in self.source})
            self.client.update_weights({"names": [one.name for one in meta], "shapes": [one.shape for one in meta]})
            self.client.finish_weight_update()

    with serve(like_vllm(asked)) as url, trainer(url, transfer=Trainer, pause="keep") as scheme:
        scheme.send(fill(Small(), 2))
    update = [
        ("POST /pause?mode=keep", None),
        ("POST /start_weight_update", None),
        ("POST /update_weights", {"update_info": {"names": ["weight"], "shapes": [[4]]}}),
        ("POST /finish_weight_update", {"weight_version": "2"}),
        ("POST /resume", None),
    ]
    assert asked[-5:] == update
    assert ("POST /init_weight_transfer_engine", {"init_info": {"world_size": 3}}) in asked
    assert [one["weight"].tolist() for one in passed] == [[1.0] * 4, [2.0] * 4]


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
