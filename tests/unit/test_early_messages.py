"""One end sets up its transport later than the other, which sends messages meanwhile: none is lost."""

from __future__ import annotations

import os
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
from memory_transport import FromMemory, Scheme
from stopping import wait_until_asleep
from torch import nn

import wsync
from wsync.testing.models import Small, fill

TIMEOUT = 20.0


class Slow(FromMemory):
    """One end's set-up waits until it is let go."""

    wait_for: ClassVar[dict[str, threading.Event]] = {}

    def setup_connection_and_weights_on_sender(self) -> None:
        assert self.wait_for["sender"].wait(TIMEOUT)

    def setup_connection_and_weights_on_receiver(self, **_: Any) -> None:
        assert self.wait_for["receiver"].wait(TIMEOUT)


@pytest.fixture(autouse=True)
def both_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    events = {end: threading.Event() for end in ("sender", "receiver")}
    monkeypatch.setattr(Slow, "wait_for", events)
    for event in events.values():
        event.set()


def joining(sender: wsync.WeightSyncScheme, model: nn.Module) -> wsync.WeightSyncScheme:
    worker = pickle.loads(pickle.dumps(sender))
    worker.init_on_receiver("policy", model=model, worker_idx=0)
    return worker


def test_an_update_that_is_sent_while_the_worker_sets_up_is_installed() -> None:
    Slow.wait_for["receiver"].clear()
    model = Small()
    with ThreadPoolExecutor() as pool, Scheme(Slow, timeout=TIMEOUT) as sender:
        sender.init_on_sender("policy", num_workers=1)
        with joining(sender, model) as worker:
            connected = pool.submit(worker.connect)
            sender.connect()
            let_go = pool.submit(let_go_when_asleep, os.getpid(), "receiver")
            sender.send(fill(Small(), 3))
            let_go.result()
            connected.result()
            assert model.weight.eq(3).all()
            sender.send(fill(Small(), 4))
            assert model.weight.eq(4).all()


def test_a_request_that_comes_while_the_sender_sets_up_is_answered() -> None:
    Slow.wait_for["sender"].clear()
    model, pulled = Small(), list[Any]()
    with ThreadPoolExecutor() as pool, Scheme(Slow, initiator="receiver", timeout=TIMEOUT) as sender:
        sender.init_on_sender("policy", num_workers=1)
        with joining(sender, model) as worker:
            connecting = pool.submit(sender.connect)
            worker.connect()
            pulling = threading.Thread(target=lambda: pulled.append(worker.pull(TIMEOUT)))
            pulling.start()
            assert pulling.native_id is not None
            let_go_when_asleep(pulling.native_id, "sender")
            connecting.result()
            sender.send(fill(Small(), 3))
            pulling.join()
            assert (pulled, model.weight.eq(3).all()) == ([1], True)


def let_go_when_asleep(thread: int, end: str) -> None:
    wait_until_asleep(thread)
    Slow.wait_for[end].set()
