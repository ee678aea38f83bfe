"""Weights over HTTP: engines in processes of their own, driven through the phases of vLLM's weight transfer."""

from __future__ import annotations

import threading
from typing import Any

import torch
from asgi_server import serve
from http_engines import engines, trainer, value
from torch import Tensor

import wsync
from wsync.testing import WorkerPool
from wsync.testing.models import Small, fill


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
