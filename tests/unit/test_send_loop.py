"""What a sender does with updates beside the call that sends them."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from memory_transport import FromMemory, Scheme
from small_models import linear
from stopping import end_of, wait_until_asleep
from torch import nn

import wsync
from wsync.backends.none import NoTransport
from wsync.receiving import prepared_updates
from wsync.sending.send_loop import SendLoop


class FailingOnce:
    """In the place of ``WorkerConnections``: something arrives, and the first attempt to read it fails."""

    def __init__(self) -> None:
        self.arrived = os.eventfd(1)
        self.awaited_descriptors = [self.arrived]
        self.reads = 0

    def read(self, _: float | None) -> bool:
        self.reads += 1
        if self.reads == 1:
            raise ArithmeticError("of a user's transport")
        return True


def test_the_send_loop_starts_again_after_an_error(caplog: pytest.LogCaptureFixture) -> None:
    connections: Any = FailingOnce()
    loop = SendLoop(connections, threading.RLock(), lambda: connections.reads < 2)
    for reads in (1, 2):
        loop.start_or_end()
        end_of("wsync-send-loop")
        assert connections.reads == reads
    assert "of a user's transport" in caplog.text
    loop.close()
    os.close(connections.arrived)


class Silent:
    """In the place of ``WorkerConnections``: nothing arrives."""

    awaited_descriptors = ()

    def read(self, _: float | None) -> bool:
        return False


def test_the_send_loop_ends_when_another_thread_has_read_what_it_waits_for() -> None:
    connections: Any = Silent()
    waits = [True]
    loop = SendLoop(connections, threading.RLock(), lambda: waits[0])
    loop.start_or_end()
    assert loop.running
    waits[0] = False
    loop.start_or_end()
    end_of("wsync-send-loop")
    loop.close()


class Interrupting(FromMemory):
    """The trainer is interrupted while ``send_weights`` runs, which returns when the trainer has aborted."""

    aborted: ClassVar = threading.Event()
    wanted: ClassVar = False

    def send_weights(self, weights: Any = None, older_weights: Any = None) -> None:
        super().send_weights(weights)
        if self.wanted:
            wait_until_asleep(os.getpid())
            os.kill(os.getpid(), signal.SIGINT)
            self.aborted.wait()


def connected(sender: wsync.WeightSyncScheme, model: nn.Module) -> wsync.WeightSyncScheme:
    """A worker in this process."""
    worker = pickle.loads(pickle.dumps(sender))
    worker.init_on_receiver("policy", model=model, worker_idx=0)
    joining = threading.Thread(target=worker.connect)
    joining.start()
    if sender.sender.connected:
        sender.readmit(0)
    else:
        sender.connect()
    joining.join()
    return worker


class Raising(FromMemory):
    """The first ``send_weights`` raises."""

    calls: ClassVar[list[int]] = []

    def send_weights(self, weights: Any = None, older_weights: Any = None) -> None:
        self.calls.append(1)
        if len(self.calls) == 1:
            raise ValueError("no room")
        super().send_weights(weights)


def test_an_error_of_the_first_send_weights_is_the_trainers_and_the_worker_stays() -> None:
    model = nn.Linear(2, 2)
    with Scheme(Raising) as sender:
        sender.init_on_sender("policy", model=linear(1.0), num_workers=1)
        with pickle.loads(pickle.dumps(sender)) as worker:
            worker.init_on_receiver("policy", model=model, worker_idx=0)
            joining = threading.Thread(target=worker.connect)
            joining.start()
            with pytest.raises(wsync.WorkerFailed, match=r"(?s)worker 0.*ValueError: no room"):
                sender.connect()
            joining.join()
            assert worker.version == 0
            sender.send(linear(2.0))
            assert worker.version == 2 and torch.all(model.weight == 2.0)


class EndingTogether(FromMemory):
    """The calls of ``send_weights`` for all workers end at the same time, once all are connected."""

    end: ClassVar = threading.Barrier(8)
    connected: ClassVar = threading.Event()

    def send_weights(self, weights: Any = None, older_weights: Any = None) -> None:
        super().send_weights(weights)
        if self.connected.is_set():
            self.end.wait()


def test_updates_that_nobody_waits_for_reach_all_workers_when_their_transfers_end_together() -> None:
    count = EndingTogether.end.parties
    with Scheme(EndingTogether) as sender, ExitStack() as stack, ThreadPoolExecutor() as pool:
        sender.init_on_sender("policy", model=linear(0.0), num_workers=count)
        workers = [stack.enter_context(pickle.loads(pickle.dumps(sender))) for _ in range(count)]
        for index, worker in enumerate(workers):
            worker.init_on_receiver("policy", model=nn.Linear(2, 2), worker_idx=index)
        joining = [pool.submit(worker.connect) for worker in workers]
        sender.connect()
        for one in joining:
            one.result()
        EndingTogether.connected.set()
        for value in range(1, 100):
            sender.send_async(linear(value))
            assert all(worker.receive(30.0) is not None for worker in workers)
            assert all((worker.model.weight == value).all() for worker in workers)


class Returning(FromMemory):
    """``receive_weights`` returns something else than was sent."""

    returned: ClassVar[list[Any]] = [None]

    def receive_weights(self, timeout: float | None = None, **_: Any) -> Any:
        return self.returned[0]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "receive_weights returned None"),
        (nn.Linear(2, 2), "receive_weights returned weights with another"),
        (7, r"Returning\.receive_weights raised, or did not return weights"),
    ],
)
def test_what_receive_weights_has_returned_is_in_the_error(returned: Any, message: str) -> None:
    Returning.returned[0] = returned
    with Scheme(Returning) as sender, ThreadPoolExecutor() as pool:
        sender.init_on_sender("policy", model=linear(1.0), num_workers=1)
        with pickle.loads(pickle.dumps(sender)) as worker:
            worker.init_on_receiver("policy", model=nn.Linear(2, 2), worker_idx=0)
            joining = pool.submit(worker.connect)
            with pytest.raises(wsync.WeightSyncError, match=message):
                sender.connect()
            with pytest.raises(wsync.WeightSyncError, match=message):
                joining.result()


def test_an_update_that_is_aborted_while_it_is_sent_is_dropped_by_the_worker() -> None:
    model = nn.Linear(2, 2)
    with Scheme(Interrupting) as sender:
        sender.init_on_sender("policy", model=linear(1.0), num_workers=1)
        with connected(sender, model):
            Interrupting.wanted = True
            with pytest.raises(KeyboardInterrupt):
                wsync.synchronize({sender: linear(2.0)})
            Interrupting.wanted = False
            Interrupting.aborted.set()
            sender.send(linear(3.0))
            assert torch.all(model.weight == 3.0)
            assert prepared_updates.updates_by_transaction == {}


@pytest.mark.parametrize("kind", [wsync.SharedMemWeightSyncScheme, lambda: Scheme(FromMemory)])
def test_a_partial_update_may_follow_a_transaction(kind: Callable[[], Any]) -> None:
    model = nn.Linear(2, 2)
    with kind() as sender:
        sender.init_on_sender("policy", model=linear(1.0), num_workers=1)
        with connected(sender, model):
            wsync.synchronize({sender: linear(2.0)})
            sender.send({"bias": torch.full((2,), 3.0)}, partial=True)
            assert model.weight.eq(2.0).all() and model.bias.eq(3.0).all()


def test_a_transform_runs_once_for_each_send() -> None:
    model, source, calls = nn.Linear(2, 2), linear(1.0), list[int]()

    def transform(weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        calls.append(1)
        return weights

    with wsync.SharedMemWeightSyncScheme(send_transform=transform) as sender:
        sender.init_on_sender("policy", model=source, num_workers=1)
        with connected(sender, model):
            for worker in (None, None, 0, None, None):
                calls.clear()
                sender.send(worker_ids=worker)
                assert len(calls) == 1


class RefusedOnce(FromMemory):
    """The first one that the trainer, the main thread, makes cannot be created."""

    refused: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        if threading.current_thread() is threading.main_thread() and not self.refused:
            self.refused.append(1)
            raise ArithmeticError("no transport")


class Full(FromMemory):
    """``send_weights`` raises while there is no room."""

    full: ClassVar = False

    def send_weights(self, weights: Any = None, older_weights: Any = None) -> None:
        if self.full:
            raise ValueError("no room")
        super().send_weights(weights)


def test_a_request_ends_when_the_requested_version_could_not_be_sent() -> None:
    with Scheme(Full, initiator="receiver", timeout=None) as sender, ThreadPoolExecutor() as pool:
        sender.init_on_sender("policy", model=linear(1.0), num_workers=1)
        with connected(sender, nn.Linear(2, 2)) as worker:
            Full.full = True
            sender.send(linear(2.0))
            with pytest.raises(wsync.WeightSyncError, match=r"version 2 could not be installed(?s:.)*send_weights"):
                pool.submit(worker.pull).result(30.0)
            Full.full = False
            with pytest.raises(wsync.WorkerFailed, match="no room"):
                sender.send(linear(3.0))
            assert worker.pull() == 3 and worker.model.weight.eq(3.0).all()


class RefusedTo(FromMemory):
    """Cannot be created for the workers in ``indices``, once they are set."""

    indices: ClassVar[set[int]] = set()


class OfWorkers(Scheme):
    name = "of workers"

    def create_transport(self, worker_idx: int | None = None) -> Any:
        if threading.current_thread() is threading.main_thread() and worker_idx in RefusedTo.indices:
            raise ArithmeticError("no transport")
        return FromMemory()


def test_a_death_is_reported_after_the_replacement_could_not_join_during_another_readmit() -> None:
    with OfWorkers(FromMemory) as sender, ExitStack() as stack, ThreadPoolExecutor() as pool:
        sender.init_on_sender("policy", model=linear(1.0), num_workers=3)

        def start(index: int) -> tuple[wsync.WeightSyncScheme, Any]:
            worker = pickle.loads(pickle.dumps(sender))
            worker.init_on_receiver("policy", model=nn.Linear(2, 2), worker_idx=index)
            return worker, pool.submit(worker.connect)

        started = [start(index) for index in range(3)]
        sender.connect()
        for worker, joining in started:
            joining.result()
            stack.enter_context(worker)
        for worker, _ in started[:2]:
            worker.shutdown()
        RefusedTo.indices.add(1)
        replacement, joining = start(1)

        def start_another_once_refused() -> wsync.WeightSyncScheme:
            with pytest.raises(wsync.NotConnected):
                joining.result()
            replacement.shutdown()
            other, ready = start(0)
            ready.result()
            return other

        started_later = pool.submit(start_another_once_refused)
        sender.readmit(0)
        stack.enter_context(started_later.result())
        with pytest.raises(wsync.WorkerDied, match="worker 1: process"):
            sender.send(linear(2.0))
        assert sender.send(linear(3.0)).workers.keys() == {0, 2}


def test_a_worker_whose_transport_cannot_be_created_is_disconnected() -> None:
    with Scheme(RefusedOnce) as sender:
        sender.init_on_sender("policy", model=linear(1.0), num_workers=1)
        worker = pickle.loads(pickle.dumps(sender))
        worker.init_on_receiver("policy", model=nn.Linear(2, 2), worker_idx=0)
        with ThreadPoolExecutor() as pool, worker:
            refused = pool.submit(worker.connect)
            with pytest.raises(ArithmeticError, match="no transport"):
                sender.connect()
            with pytest.raises(wsync.NotConnected):
                refused.result()
        model = nn.Linear(2, 2)
        with connected(sender, model):
            sender.send(linear(2.0))
            assert model.weight.eq(2.0).all()


@pytest.mark.parametrize("index", [torch.tensor(0), np.int64(0)])
def test_numbers_of_any_type_are_a_count_and_an_index(index: Any) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with Scheme(NoTransport) as sender:
        sender.init_on_sender("policy", num_workers=np.int64(1))  # pyright: ignore
        with connected(sender, model):
            sender.disconnect(index)
            with connected(sender, other):
                assert sender.num_workers == 1
            with pytest.raises(ValueError, match="one worker's index"):
                sender.disconnect([])  # pyright: ignore


def test_threads_of_former_connections_are_not_kept() -> None:
    def ended() -> int:
        gc.collect()
        found = [one for one in gc.get_objects() if type(one) is threading.Thread and not one.is_alive()]
        return sum(thread.name == "wsync-transfer" for thread in found)

    before = ended()
    with Scheme(NoTransport) as sender:
        sender.init_on_sender("policy", num_workers=1)
        for _ in range(5):
            connected(sender, nn.Linear(2, 2)).shutdown()
        assert ended() - before <= 2


class Counted:
    """A transform that counts its copies."""

    copies = 0

    def __call__(self, weights: Any) -> Any:
        return weights

    def __deepcopy__(self, _: Any) -> Counted:
        Counted.copies += 1
        return Counted()


def test_a_transform_is_not_copied_at_every_send() -> None:
    with wsync.SharedMemWeightSyncScheme(send_transform=Counted()) as scheme:
        scheme.init_in_process("policy", nn.Linear(2, 2), linear(1.0))
        copies = Counted.copies
        for value in (2.0, 3.0, 4.0):
            scheme.send(linear(value))
        assert Counted.copies == copies
