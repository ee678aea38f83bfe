"""A load function that fails half-way leaves weights of two versions: no forward may use them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from forking import idle_child
from tensordict import TensorDict
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
                with pytest.raises(wsync.WeightSyncError, match="worker 0 may have weights of two versions"):
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


def test_a_chunk_that_is_refused_after_another_was_loaded_leaves_mixed_weights() -> None:
    with wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT) as sender:
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        engine, chunks = Engine(), list[str]()

        def load(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
            chunks.extend(name for name, _ in pairs)
            if len(chunks) == 4:
                raise wsync.LayoutMismatch("the last chunk")

        with pickle.loads(pickle.dumps(sender)) as worker:
            worker.init_on_receiver("policy", load=load, chunk_bytes=1, worker_idx=0)
            connect(sender.connect, worker)
            with pytest.raises(wsync.WorkerFailed, match="the last chunk"):
                sender.send(model_of(2))
            with pytest.raises(wsync.WeightSyncError, match="two versions"):
                engine.forward()
        assert engine.forward() == set()  # the worker has left: nothing is refused any more


async def load_later(pairs: Iterable[Any]) -> None:
    list(pairs)


def load_one(pairs: Iterable[Any]) -> object:
    return next(iter(pairs))


@pytest.mark.filterwarnings("ignore:coroutine .load_later. was never awaited")
@pytest.mark.parametrize(("load", "taken"), [(load_later, 0), (load_one, 1)])
def test_a_load_function_that_leaves_pairs_has_not_loaded_the_version(load: Any, taken: int) -> None:
    with ExitStack() as stack:
        sender = stack.enter_context(wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT))
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        worker = stack.enter_context(make_worker(sender, 0, load=load))
        connecting = stack.enter_context(ThreadPoolExecutor()).submit(worker.connect)
        with pytest.raises(wsync.WorkerFailed, match=rf"{load.__name__} returned when it had taken {taken} of 2 pairs"):
            sender.connect()
        with pytest.raises(wsync.WeightSyncError, match="plain function"):
            connecting.result()
        assert worker.version == 0


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


class Stubborn(nn.Parameter):
    """A parameter that cannot be bound to other values while ``refuses``."""

    refuses = False

    @property
    def data(self) -> torch.Tensor:
        return super().data

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        if self.refuses and not torch.equal(self.data, other):
            raise OSError("stubborn")
        nn.Parameter.data.__set__(self, other)


class Unforgetting(nn.Linear):
    """Takes no extra state as long as it ``refuses``, not even its own."""

    refuses = False

    def get_extra_state(self) -> int:
        return 0

    def set_extra_state(self, state: int) -> None:
        if self.refuses:
            raise OSError("stubborn")


def stubborn_model(*, extra: bool) -> tuple[nn.Linear, Any]:
    """A model, and the part of it that has to refuse so that an install fails half-way."""
    if extra:
        model = Unforgetting(2, 1)
        return model, model
    model = model_of(0)
    model.bias = Stubborn(torch.zeros(1))
    return model, model.bias


@pytest.mark.parametrize("extra", [True, False])
@pytest.mark.parametrize("kind", [wsync.SharedMemWeightSyncScheme, wsync.DistributedWeightSyncScheme])
def test_a_model_that_an_update_has_changed_in_part_is_not_used(kind: Any, extra: bool) -> None:
    model, part = stubborn_model(extra=extra)
    sent = fill(Unforgetting(2, 1), 1) if extra else model_of(1)
    with kind(timeout=TIMEOUT) as sender:
        sender.init_on_sender("policy", model=sent, num_workers=1)
        with make_worker(sender, 0, near=False, model=model) as worker:
            connect(sender.connect, worker)
            for value in (2, 4):
                fill(sent, value)
                sender.send()
                assert model(torch.ones(2)).item() == 3 * value
                part.refuses = True
                fill(sent, value + 1)
                with pytest.raises(wsync.WorkerFailed, match="stubborn"):
                    sender.send()
                with pytest.raises(wsync.WeightSyncError, match=r"worker 0 may have weights of two versions.*half-way"):
                    model(torch.ones(2))
                part.refuses = False
            sender.send()
            assert model(torch.ones(2)).item() == 15


def test_tensors_that_an_update_has_changed_in_part_are_not_used() -> None:
    own = model_of(0).state_dict()
    with wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT) as sender:
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        with make_worker(sender, 0, model=own) as worker:
            connect(sender.connect, worker)
            with wsync.gate(), torch.inference_mode():
                own["bias"] = torch.zeros(1)
            with pytest.raises(wsync.WorkerFailed, match="inference tensor"):
                sender.send(model_of(2))
            with pytest.raises(wsync.WeightSyncError, match="two versions"), wsync.gate():
                pass
            own["bias"] = torch.zeros(1)
            sender.send()
            with wsync.gate():
                assert [tensor.unique().item() for tensor in own.values()] == [1, 1]


def test_mixed_weights_are_refused_while_the_worker_connects_again() -> None:
    with ExitStack() as stack:
        engine = Engine()
        sender = stack.enter_context(wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT))
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        worker = stack.enter_context(make_worker(sender, 0, load=engine.load))
        engine.failure = ArithmeticError("no memory")
        connecting = stack.enter_context(ThreadPoolExecutor()).submit(worker.connect)
        with pytest.raises(wsync.WorkerFailed, match="no memory"):
            sender.connect()
        with pytest.raises(wsync.WeightSyncError, match="no memory"):
            connecting.result()
        with pytest.raises(wsync.WeightSyncError, match="two versions"):
            engine.forward()
        engine.failure = None
        connecting = stack.enter_context(ThreadPoolExecutor()).submit(worker.connect)
        sender.readmit(0)
        connecting.result()
        sender.send(model_of(2))
        assert engine.forward() == {2.0}


def test_a_disconnected_worker_does_not_use_later_registered_weights_after_a_fork() -> None:
    """A fork gives the model memory of its own, and its next forward binds it to the registered weights again."""
    with ExitStack() as stack:
        sender = stack.enter_context(wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT))
        sender.register_shared_weights("policy", TensorDict.from_module(model_of(1)).data.share_memory_())
        sender.init_on_sender("policy", num_workers=2)
        workers = [stack.enter_context(make_worker(sender, index, near=True)) for index in range(2)]
        connect(sender.connect, *workers)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert workers[0].model(torch.ones(2)).item() == 3
        sender.disconnect(0)
        for value in range(2, 7):
            sender.send(model_of(value))
        with suppress(wsync.NotConnected):  # they were written before it found out
            assert workers[0].model(torch.ones(2)).item() == 3


def follow(worker: wsync.WeightSyncScheme) -> None:
    with worker:
        worker.init_on_receiver("policy", model=model_of(0), worker_idx=1)
        worker.connect()
        while worker.receive() is not None:
            pass


@pytest.mark.parametrize("forked", [True, False])
def test_registered_weights_that_were_written_are_noticed_while_the_slot_is_not_written(forked: bool) -> None:
    with ExitStack() as stack:
        sender = stack.enter_context(wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT))
        sender.register_shared_weights("policy", TensorDict.from_module(model_of(1)).data.share_memory_())
        sender.init_on_sender("policy", num_workers=2)
        worker = stack.enter_context(make_worker(sender, 0))
        follower = multiprocessing.get_context("forkserver").Process(target=follow, args=(sender,))
        follower.start()
        stack.callback(follower.join)
        stack.callback(sender.shutdown)
        connect(sender.connect, worker)
        if forked:
            stack.enter_context(idle_child())
        assert worker.model(torch.ones(2)).item() == 3
        with pytest.raises(wsync.NotConnected, match="two versions"), wsync.gate():  # it is disconnected in a forward
            sender.disconnect(0)
            sender.send(model_of(2))  # into another slot, and into the registered weights
        with pytest.raises(wsync.NotConnected, match="two versions"):
            worker.model(torch.ones(2))


def test_a_model_that_was_given_memory_of_its_own_stays_whole_when_its_worker_is_disconnected() -> None:
    with ExitStack() as stack:
        sender = stack.enter_context(wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT, acknowledge="published"))
        sender.init_on_sender("policy", model=model_of(1), num_workers=2)
        workers = [stack.enter_context(make_worker(sender, index, near=True)) for index in range(2)]
        connect(sender.connect, *workers)
        workers[0].apply_weights(model_of(9).state_dict())
        sender.send(model_of(2), worker_ids=1)  # the other one leaves that slot, too
        assert workers[1].model(torch.ones(2)).item() == 6
        with wsync.gate():  # so that the worker does not notice its disconnection yet
            sender.disconnect(0)
            for value in range(2, 7):  # the slot that the model has left is written
                sender.send(model_of(value))
        assert workers[0].model(torch.ones(2)).item() == 27 and workers[1].model(torch.ones(2)).item() == 18
