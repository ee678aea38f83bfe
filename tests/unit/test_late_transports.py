"""What a transport still does after its set-up, or after its worker has gone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from memory_transport import FromMemory
from torch import Tensor
from workers_here import connect, make_worker, model_of, weights_of

import wsync
from wsync.testing.models import fill

TIMEOUT = 20.0


class Hanging(FromMemory):
    """Its second ``send_weights`` returns when the test lets it, and records what it reads before and after."""

    calls: ClassVar[list[int]] = []
    reading, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    read: ClassVar[list[float]] = []

    def send_weights(self, weights: Any = None, older_weights: Any = None) -> None:
        super().send_weights(weights)
        self.calls.append(1)
        if len(self.calls) == 2:
            self.read.append(weights["weight"][0, 0].item())
            self.reading.set()
            self.go_on.wait(TIMEOUT)
            self.read.append(weights["weight"][0, 0].item())
            self.ended.set()


class HangingScheme(wsync.DistributedWeightSyncScheme):
    name = "hanging"

    def create_transport(self, worker_idx: int | None = None) -> Any:
        return Hanging()


@pytest.fixture
def released() -> Iterator[None]:
    Hanging.calls.clear()
    Hanging.read.clear()
    for event in (Hanging.reading, Hanging.go_on, Hanging.ended):
        event.clear()
    yield
    Hanging.go_on.set()


@pytest.mark.usefixtures("released")
def test_memory_that_an_abandoned_call_reads_is_not_written() -> None:
    model = model_of(1)
    with HangingScheme(timeout=TIMEOUT, strategy="state_dict") as sender:
        sender.init_on_sender("policy", model=model, num_workers=1)
        with make_worker(sender, 0, near=False) as far:
            connect(sender.connect, far)
            fill(model, 2)
            sender.send_async()
            assert Hanging.reading.wait(TIMEOUT)
            sender.disconnect(0)
        with make_worker(sender, 0) as near:
            connect(lambda: sender.readmit(0), near)
            for value in range(3, 12):
                fill(model, value)
                sender.send()
                assert weights_of(near) == [value, value]
            Hanging.go_on.set()
            assert Hanging.ended.wait(TIMEOUT) and Hanging.read == [2.0, 2.0]


@pytest.mark.usefixtures("released")
def test_a_worker_whose_transport_does_not_return_in_time_is_reported_as_dead() -> None:
    with HangingScheme(timeout=TIMEOUT, strategy="state_dict") as sender:
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        with make_worker(sender, 0, near=False) as far:
            connect(sender.connect, far)
            sender.timeout = 0.1
            with pytest.raises(wsync.WorkerDied, match="did not return in time"):
                sender.send(model_of(2), worker_ids=0)


def test_workers_that_die_together_have_the_newest_version_kept_for_their_replacements() -> None:
    with wsync.DistributedWeightSyncScheme(timeout=TIMEOUT) as sender, ExitStack() as stack:
        sender.init_on_sender("policy", model=model_of(1), num_workers=3)
        far = [stack.enter_context(make_worker(sender, index, near=False)) for index in range(3)]
        connect(sender.connect, *far)
        for worker in far[1:]:
            worker.shutdown()
        with pytest.raises(wsync.WorkerDied):
            sender.send(model_of(2))
        for index in (1, 2):
            replacement = stack.enter_context(make_worker(sender, index))
            connect(partial(sender.readmit, index), replacement)
            assert weights_of(replacement) == [2, 2]


class Late:
    """A ``FlatTransport`` that carries nothing. One end sets a key when the other end's ``connect`` has returned."""

    device = torch.device("cpu")
    receives_ahead = False
    inline_bytes = 0
    late_rank = -1
    other_returned = threading.Event()

    def connect(self, store: Any, rank: int, connection_number: int, host: str, deadline: float | None) -> None:
        if rank == self.late_rank:
            assert self.other_returned.wait(TIMEOUT)
            store.set("key", b"value")

    def begin_send(self, flat: Tensor, transfers: list[Any]) -> None:
        raise RuntimeError("nothing can be sent")

    begin_receive = begin_send

    def close(self, pending: Any = None) -> bool:
        return False


class LateScheme(wsync.WeightSyncScheme):
    name = "late"

    def create_transport(self, worker_idx: int | None = None) -> Any:
        return Late()


@pytest.mark.parametrize("late_rank", [0, 1])
def test_a_key_that_is_set_late_ends_no_connection(monkeypatch: pytest.MonkeyPatch, late_rank: int) -> None:
    monkeypatch.setattr(Late, "late_rank", late_rank)
    monkeypatch.setattr(Late, "other_returned", threading.Event())
    with LateScheme(timeout=TIMEOUT) as sender:
        sender.init_on_sender("policy", num_workers=1)
        with make_worker(sender, 0) as worker:
            ends = {0: sender, 1: worker}
            late = threading.Thread(target=ends[late_rank].connect)
            late.start()
            ends[1 - late_rank].connect()
            Late.other_returned.set()
            late.join()
            with pytest.raises(wsync.WeightSyncError, match="nothing can be sent"):
                sender.send(model_of(1))
