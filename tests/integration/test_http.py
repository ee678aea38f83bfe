"""Weights over HTTP: engines in processes of their own, driven through the phases of vLLM's weight transfer."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from asgi_server import serve
from http_engines import engines, trainer, value
from torch import Tensor

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
    with server, wsync.HTTPWeightSyncScheme(url, **options) as scheme:
        scheme.init_on_sender("policy", weights={"weight": torch.rand(4), "other": torch.rand(2)})
        scheme.connect()
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
