"""Several ends in this process: workers that take weights from shared memory and, as if elsewhere, by a transport."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import pytest
import torch
from limits import descriptors_left
from tensordict import TensorDict
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from workers_here import TIMEOUT, connect, make_worker, model_of, weights_of

import wsync
from wsync.receiving import handshake
from wsync.shm.arena import SenderArena, WorkerArena
from wsync.shm.memory import open_handle
from wsync.shm.registered import RegisteredView, RegisteredWeights


@pytest.mark.parametrize("near", [True, False])
def test_a_part_completes_what_the_worker_was_sent_last(near: bool) -> None:
    with wsync.DistributedWeightSyncScheme(timeout=TIMEOUT) as sender:
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        with make_worker(sender, 0, near=near) as worker:
            connect(sender.connect, worker)
            for value in (2, 3):  # by the fast path, too
                sender.send(model_of(value))
            sender.send({"bias": model_of(4).bias}, partial=True)
            assert weights_of(worker) == [3, 4]
        with make_worker(sender, 0, near=not near) as worker:
            connect(partial(sender.readmit, 0), worker)
            sender.send({"weight": model_of(5).weight}, partial=True)
            assert weights_of(worker) == [5, 4]


def test_a_log_says_where_a_worker_takes_weights_from(caplog: pytest.LogCaptureFixture) -> None:
    with wsync.DistributedWeightSyncScheme(timeout=TIMEOUT) as sender, ExitStack() as workers:
        sender.init_on_sender("policy", model=model_of(1), num_workers=2)
        ends = [workers.enter_context(make_worker(sender, index, near=index == 0)) for index in range(2)]
        with caplog.at_level("DEBUG", logger="wsync.receiving.channel"):
            connect(sender.connect, *ends)
    said = {message.split(" is ")[0]: message.rpartition(" from ")[2] for message in caplog.messages}
    assert said == {"worker 0": "the sender's memory", "worker 1": "a transport"}


def test_a_replacement_that_is_lost_as_it_joins_leaves_the_newest_version_for_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with wsync.DistributedWeightSyncScheme(timeout=TIMEOUT) as sender, ExitStack() as workers:
        sender.init_on_sender("policy", model=model_of(1), num_workers=2)
        near, far = (make_worker(sender, index, near=index == 0) for index in range(2))
        workers.enter_context(near)
        connect(sender.connect, near, far)
        far.shutdown()
        with pytest.raises(wsync.WorkerDied):
            sender.send(model_of(2))
        sender.send(model_of(3))

        def lose(_: object) -> None:
            raise ConnectionError("lost")

        lost = make_worker(sender, 1)
        monkeypatch.setattr(handshake, "open_handle", lose)

        def fail() -> None:
            with pytest.raises(wsync.NotConnected):
                lost.connect()

        failing = threading.Thread(target=fail)
        failing.start()
        with pytest.raises(wsync.WorkerDied):
            sender.readmit(1)
        failing.join()
        far = workers.enter_context(make_worker(sender, 1, near=False))
        connect(partial(sender.readmit, 1), far)
        assert weights_of(far) == [3, 3]


def test_a_worker_that_connects_to_another_trainer_counts_versions_anew() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own_client = TCPStore("127.0.0.1", store.port, is_master=False)  # a client waits for one key at a time
    with wsync.DistributedWeightSyncScheme(store=own_client, timeout=TIMEOUT) as worker:
        worker.init_on_receiver("policy", model=model_of(0), worker_idx=0)
        for values in ([11, 12], [21]):
            with wsync.DistributedWeightSyncScheme(store=store, timeout=TIMEOUT) as sender:
                sender.init_on_sender("policy", num_workers=1)
                connect(sender.connect, worker)
                assert worker.version == 0 and worker.receive(0.0) is None
                for version, value in enumerate(values, 1):
                    sender.send(model_of(value))
                    assert worker.receive(TIMEOUT) is not None and worker.version == version
                    assert weights_of(worker) == [value] * 2


def test_a_worker_connects_to_another_trainer_before_it_has_read_that_the_first_one_has_shut_down() -> None:
    loading, release = threading.Event(), threading.Event()

    def load(pairs: Iterable[object]) -> None:  # in the receiver thread, which reads nothing meanwhile
        list(pairs)
        loading.set()
        release.wait(TIMEOUT)

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    own_client = TCPStore("127.0.0.1", store.port, is_master=False)
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        other = stack.enter_context(wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT))
        other.init_on_sender("policy", num_workers=1)
        connect(other.connect, stack.enter_context(make_worker(other, 0, load=load)))
        worker = stack.enter_context(wsync.DistributedWeightSyncScheme(store=own_client, timeout=TIMEOUT))
        worker.init_on_receiver("policy", model=model_of(0), worker_idx=0)
        for value in (1, 2):
            sender = stack.enter_context(wsync.DistributedWeightSyncScheme(store=store, timeout=TIMEOUT))
            sender.init_on_sender("policy", num_workers=1)
            connected = [pool.submit(sender.connect), pool.submit(worker.connect)]
            if value == 2:
                with pytest.raises(FutureTimeout):  # it waits for the receiver thread
                    connected[1].result(0.2)
                release.set()
            for one in connected:
                one.result(TIMEOUT)
            sender.send(model_of(value))
            assert worker.receive(TIMEOUT) is not None and weights_of(worker) == [value] * 2
            if value == 1:
                sending = pool.submit(other.send, model_of(1))
                loading.wait(TIMEOUT)
                sender.shutdown()
        sending.result(TIMEOUT)


@pytest.mark.parametrize("near", [True, False])
def test_a_connect_that_ends_in_a_timeout_keeps_the_replacements_that_it_has_accepted(near: bool) -> None:
    with wsync.DistributedWeightSyncScheme(timeout=TIMEOUT) as sender, ExitStack() as stack:
        sender.init_on_sender("policy", model=model_of(1), num_workers=2)
        workers = [make_worker(sender, index, near=near) for index in range(2)]
        connect(sender.connect, *workers)
        for worker in workers:
            worker.shutdown()
        with pytest.raises(wsync.WorkerDied):
            sender.send(model_of(2))
        sender.timeout = 1.0
        replacement = stack.enter_context(make_worker(sender, 0, near=near))

        def accept() -> None:
            with pytest.raises(wsync.SyncTimeout, match=r"worker\(s\) 1 "):
                sender.connect()

        connect(accept, replacement)
        sender.timeout = TIMEOUT
        report = sender.send(model_of(3), worker_ids=0)
        assert report is not None and report.workers.keys() == {0} and weights_of(replacement) == [3, 3]


def replace_the_first_two(sender: wsync.WeightSyncScheme, stack: ExitStack, *, reported: bool) -> list[Any]:
    """Three workers; the first two have been replaced, and the second one's replacement connected unawaited."""
    sender.init_on_sender("policy", model=model_of(1), num_workers=3)
    workers = [make_worker(sender, index) for index in range(3)]
    stack.enter_context(workers[2])
    connect(sender.connect, *workers)
    for worker in workers[:2]:
        worker.shutdown()
    if reported:
        with pytest.raises(wsync.WorkerDied):
            sender.send(model_of(2))
    workers[:2] = [stack.enter_context(make_worker(sender, index)) for index in range(2)]
    pool = stack.enter_context(ThreadPoolExecutor())
    readmitted = pool.submit(sender.readmit, 0)
    pool.submit(workers[1].connect).result()
    pool.submit(workers[0].connect).result()
    readmitted.result()
    return workers


@pytest.mark.parametrize("reported", [True, False])
def test_a_replacement_may_connect_while_another_one_is_awaited(reported: bool) -> None:
    with wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT) as sender, ExitStack() as stack:
        workers = replace_the_first_two(sender, stack, reported=reported)
        report = sender.send(model_of(2))
        assert report is not None and report.workers.keys() == {0, 1, 2}
        sender.readmit(1)
        sender.send(model_of(3))
        assert [weights_of(worker) for worker in workers] == [[3, 3]] * 3


def test_a_replacement_that_was_not_awaited_may_have_answered_a_transaction_since() -> None:
    with wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT) as sender, ExitStack() as stack:
        workers = replace_the_first_two(sender, stack, reported=False)
        bias = workers[2].model.bias
        workers[2].model.bias = nn.Parameter(torch.zeros(7))
        with pytest.raises(wsync.WorkerFailed, match="worker 2"):
            wsync.synchronize({sender: model_of(2)})
        workers[2].model.bias = bias
        sender.readmit(1)
        sender.send(model_of(3))
        assert [weights_of(worker) for worker in workers] == [[3, 3]] * 3


def test_the_successor_of_a_replacement_that_was_not_awaited_is_awaited() -> None:
    with wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT) as sender, ExitStack() as stack:
        workers = replace_the_first_two(sender, stack, reported=False)
        sender.send(model_of(2))
        workers[1].shutdown()

        def refuse(pairs: Iterable[tuple[str, torch.Tensor]]) -> None:
            raise ArithmeticError("refused")

        successor = stack.enter_context(make_worker(sender, 1, load=refuse))
        connecting = stack.enter_context(ThreadPoolExecutor()).submit(successor.connect)
        with pytest.raises(wsync.WorkerFailed, match="ArithmeticError: refused"):
            sender.readmit(1)
        with pytest.raises(wsync.WeightSyncError, match="ArithmeticError: refused"):
            connecting.result()


def test_a_worker_that_shuts_down_keeps_its_weights_while_the_trainer_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    clone = torch.Tensor.clone
    with wsync.SharedMemWeightSyncScheme(acknowledge="published", timeout=TIMEOUT) as sender:
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        worker = make_worker(sender, 0)
        connect(sender.connect, worker)
        sender.send(model_of(2))

        def clone_slowly(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
            monkeypatch.undo()
            for value in range(3, 9):
                sender.send(model_of(value))
            return clone(tensor, **options)

        monkeypatch.setattr(torch.Tensor, "clone", clone_slowly)
        model = worker.model
        worker.shutdown()
        assert {value for parameter in model.parameters() for value in parameter.flatten().tolist()} == {2.0}


@pytest.mark.parametrize("update", ["aborted", "for one worker", "for all"])
def test_registered_buffers_outside_shared_memory_get_what_all_workers_are_sent(update: str) -> None:
    buffers = TensorDict.from_module(model_of(1)).data.clone()
    with wsync.SharedMemWeightSyncScheme({"policy": buffers}, timeout=TIMEOUT) as sender, ExitStack() as stack:
        sender.init_on_sender("policy", num_workers=2)
        workers = [stack.enter_context(make_worker(sender, index)) for index in range(2)]
        connect(sender.connect, *workers)
        if update == "aborted":
            with wsync.SharedMemWeightSyncScheme() as other:
                other.init_in_process("other", nn.Linear(1, 1), nn.Linear(1, 1))
                with pytest.raises(wsync.WeightSyncError):
                    wsync.synchronize({sender: model_of(2), other: model_of(2)})
        else:
            sender.send(model_of(2), worker_ids=0 if update == "for one worker" else None)
        value = 2 if update == "for all" else 1
        assert [tensor.flatten()[0].item() for tensor in buffers.values()] == [value] * 2
        sender.send()
        assert [weights_of(worker) for worker in workers] == [[value] * 2] * 2


def test_without_descriptors_shared_memory_is_not_taken_for_another_machines() -> None:
    with closing(SenderArena(1)) as arena:
        registered = RegisteredWeights.create(arena, {"weight": torch.ones(4).share_memory_()})
        with descriptors_left(1), pytest.raises(OSError, match="Too many open files"):
            open_handle(arena.handle)
        opened = open_handle(arena.handle)
        assert registered is not None and opened is not None
        with closing(registered), closing(WorkerArena(1, opened)) as worker:
            with descriptors_left(0), pytest.raises(OSError, match="Too many open files"):
                RegisteredView.of(worker)
            assert RegisteredView.of(worker) is not None


def refuse(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    if any(tensor.eq(3).any() for _, tensor in weights):
        raise ArithmeticError("3")


@pytest.mark.parametrize("lacks", ["dead", "refused"])
def test_an_update_that_a_worker_lacks_is_not_undone_by_the_registered_buffers(lacks: str) -> None:
    buffers = TensorDict.from_module(model_of(1)).data.share_memory_()
    with wsync.SharedMemWeightSyncScheme({"policy": buffers}, timeout=TIMEOUT) as sender, ExitStack() as stack:
        sender.init_on_sender("policy", num_workers=2)
        workers = [make_worker(sender, 0), make_worker(sender, 1, load=refuse)]
        stack.enter_context(workers[0])
        connect(sender.connect, *workers)
        if lacks == "dead":
            workers[1].shutdown()
            with pytest.raises(wsync.WorkerDied):
                sender.send(model_of(2))
            sender.send()
            assert weights_of(workers[0]) == [2, 2]
        else:
            stack.enter_context(workers[1])
            with pytest.raises(wsync.WorkerFailed, match="ArithmeticError"):
                sender.send(model_of(3))
            with pytest.raises(wsync.WeightSyncError, match="registered weights lack version 2"):
                sender.send()
            sender.send(model_of(4))
            sender.send()
            assert weights_of(workers[0]) == [4, 4] and workers[1].version == sender.version


def test_registered_buffers_lack_an_update_while_the_arena_has_two_versions() -> None:
    buffers = TensorDict.from_module(model_of(1)).data.share_memory_()
    with wsync.SharedMemWeightSyncScheme({"policy": buffers}, timeout=TIMEOUT) as sender, ExitStack() as stack:
        sender.init_on_sender("policy", num_workers=2)
        workers = [make_worker(sender, 0), stack.enter_context(make_worker(sender, 1, load=refuse))]
        stack.enter_context(workers[0])
        connect(sender.connect, *workers)
        with pytest.raises(wsync.WorkerFailed, match="ArithmeticError"):
            sender.send(model_of(3))
        sender.disconnect(1)
        sender.send(model_of(4), worker_ids=[0])
        with pytest.raises(wsync.WeightSyncError, match="registered weights lack version 2"):
            sender.send()
        assert weights_of(workers[0]) == [4, 4]


def test_the_first_update_may_be_sent_again_in_another_form_after_there_was_no_memory_for_it() -> None:
    size, loaded = 2**18, list[torch.Tensor]()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT) as sender:
        sender.init_on_sender("policy", num_workers=1)
        worker = make_worker(sender, 0, load=lambda pairs: loaded.extend(tensor.clone() for _, tensor in pairs))
        with worker:
            connect(sender.connect, worker)
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (6 * size, hard)
            )  # of two slots of 4 * size bytes, the first fits
            try:
                with pytest.raises(wsync.WeightSyncError, match="no shared memory left"):
                    sender.send({"weight": torch.ones(size)})
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            for value in (2, 3, 4):
                sender.send({"weight": torch.full((size,), value, dtype=torch.bfloat16)})
                assert (loaded[-1] == value).all() and loaded[-1].dtype is torch.bfloat16


def test_disconnect_ends_a_call_that_waits_for_the_worker_to_connect() -> None:
    with wsync.SharedMemWeightSyncScheme(timeout=None) as sender, ThreadPoolExecutor() as pool, ExitStack() as stack:
        sender.init_on_sender("policy", model=model_of(1), num_workers=2)

        def ends(call: Callable[[], object]) -> None:
            waiting = pool.submit(call)
            while not waiting.done():  # at first, the call may not have begun
                sender.disconnect(1)
            with pytest.raises(wsync.WorkerDied, match=r"worker\(s\) 1: disconnect\(\) was called"):
                waiting.result()

        ends(sender.connect)
        workers = [stack.enter_context(make_worker(sender, index)) for index in range(2)]
        connect(sender.connect, *workers)
        workers[1].shutdown()
        ends(partial(sender.readmit, 1))
        workers[1] = stack.enter_context(make_worker(sender, 1))
        connect(partial(sender.readmit, 1), workers[1])
        sender.send(model_of(2))
        assert [weights_of(worker) for worker in workers] == [[2, 2], [2, 2]]
