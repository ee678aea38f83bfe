"""A load function that fails half-way leaves weights of two versions: no forward may use them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from workers_here import TIMEOUT, connect, make_worker, model_of, weights_of

import wsync
from wsync.testing.models import fill


class Engine:
    """Keeps tensors, and raises ``failure``, if there is one, once it has kept ``after`` of them."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.failure: BaseException | None = None
        self.after = 1

    def load(self, pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
        if self.failure is not None and not self.after:
            raise self.failure
        for count, (name, tensor) in enumerate(pairs, 1):
            self.weights[name] = tensor.clone()
            if self.failure is not None and count == self.after:
                raise self.failure

    def forward(self) -> set[float]:
        with wsync.gate():
            return {value for tensor in self.weights.values() for value in tensor.flatten().tolist()}


def engine_and_model(stack: ExitStack, *, near: bool) -> tuple[wsync.WeightSyncScheme, Engine, list[Any]]:
    """A trainer of two workers in this process: an engine, and a model; both have version 1."""
    sender, engine = stack.enter_context(wsync.DistributedWeightSyncScheme(timeout=TIMEOUT)), Engine()
    sender.init_on_sender("policy", model=model_of(1), num_workers=2)
    workers = [make_worker(sender, 0, near=near, load=engine.load), make_worker(sender, 1, near=near)]
    for worker in workers:
        stack.enter_context(worker)
    connect(sender.connect, *workers)
    return sender, engine, workers


@pytest.mark.parametrize("near", [True, False])
def test_no_forward_uses_mixed_weights_until_a_version_is_loaded(near: bool) -> None:
    with ExitStack() as stack:
        sender, engine, workers = engine_and_model(stack, near=near)
        engine.failure = ArithmeticError("no memory")
        for value in (2, 3):
            with pytest.raises(wsync.WorkerFailed, match=r"(?s)worker 0.*no memory"):
                sender.send(model_of(value))
            for _ in range(2):
                with pytest.raises(wsync.WeightSyncError, match=r"worker 0: .* may have weights of two versions"):
                    engine.forward()
            assert workers[0].receive(0.01) is None  # waits for a whole version
            assert workers[1].model(torch.ones(2)).item() == 3 * value  # another model of this process
            assert weights_of(workers[1]) == [value, value]
        engine.failure = None
        sender.send(model_of(4))
        assert engine.forward() == {4.0} and workers[0].receive(TIMEOUT) == sender.version


@pytest.mark.parametrize(("failure", "after"), [(ArithmeticError("first"), 0), (wsync.LayoutMismatch("unlike"), 1)])
def test_a_load_that_has_changed_nothing_leaves_the_weights_as_they_were(failure: Exception, after: int) -> None:
    """It had taken no tensor yet, or says so."""
    with ExitStack() as stack:
        sender, engine, _ = engine_and_model(stack, near=True)
        engine.failure, engine.after = failure, after
        with pytest.raises(wsync.WorkerFailed, match=str(failure)):
            sender.send(model_of(1))
        assert engine.forward() == {1.0}


def test_a_pull_from_a_store_loads_the_next_version_into_an_engine_that_is_refused(tmp_path: Path) -> None:
    engine = Engine()
    with wsync.StoreWeightSyncScheme(str(tmp_path)) as sender, ExitStack() as stack:
        sender.init_on_sender("policy", model=model_of(1))
        sender.connect()
        reader = stack.enter_context(wsync.StoreWeightSyncScheme(str(tmp_path), initiator="receiver"))
        reader.init_on_receiver("policy", load=engine.load, worker_idx=0)
        reader.connect()
        engine.failure = ArithmeticError("no memory")
        sender.send(model_of(2))
        with pytest.raises(wsync.WeightSyncError, match=r"version 2 could not be installed(?s:.)*no memory"):
            reader.pull()
        with pytest.raises(wsync.WeightSyncError, match="two versions"):
            engine.forward()
        engine.failure = None
        sender.send(model_of(3))
        assert reader.pull() == 3 and engine.forward() == {3.0}


class Unforgetting(nn.Linear):
    """Takes no extra state as long as it ``refuses``, not even its own."""

    refuses = False

    def get_extra_state(self) -> int:
        return 0

    def set_extra_state(self, state: int) -> None:
        if self.refuses:
            raise OSError("stubborn")


@pytest.mark.parametrize("kind", [wsync.SharedMemWeightSyncScheme, wsync.DistributedWeightSyncScheme])
def test_a_model_that_an_update_has_changed_in_part_is_not_used(kind: Any) -> None:
    model, sent = Unforgetting(2, 1), fill(Unforgetting(2, 1), 1)
    with kind(timeout=TIMEOUT) as sender:
        sender.init_on_sender("policy", model=sent, num_workers=1)
        with make_worker(sender, 0, near=False, model=model) as worker:
            connect(sender.connect, worker)
            sender.send(fill(sent, 2))
            assert model(torch.ones(2)).item() == 6
            model.refuses = True
            with pytest.raises(wsync.WorkerFailed, match="stubborn"):
                sender.send(fill(sent, 3))
            with pytest.raises(wsync.WeightSyncError, match=r"worker 0: .* may have weights of two versions"):
                model(torch.ones(2))
            model.refuses = False
            sender.send(fill(sent, 4))
            assert model(torch.ones(2)).item() == 12
