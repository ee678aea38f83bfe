"""Transports, as the reference documents describe them: see ``tests/api_rows.md``."""

import multiprocessing
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from backends import BuiltIn
from small_models import linear
from tensordict import TensorDict
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from workers_here import model_of

import wsync
from wsync import MPTransport, MultiProcessWeightSyncScheme, SyncTimeout, WeightStrategy, WorkerFailed
from wsync.testing.commands import WorkerState
from wsync.testing.models import Small, fill


def receive_nothing(state: WorkerState) -> list[Any]:
    transport = state.schemes["policy"].receiver_transport
    assert isinstance(transport, wsync.TransportBackend)
    return [transport.receive_weights(timeout=0.02, strategy=wsync.WeightStrategy()) for _ in range(3)]


def receive(state: WorkerState) -> tuple[float, float, type[Any]]:
    """Receive the next version, without a limit of time, into a model and a buffer of its own."""
    transport, model, buffer = state.schemes["policy"].receiver_transport, Small(), TensorDict(weight=torch.zeros(4))
    assert transport is not None
    got = transport.receive_weights(None, weights=buffer, model=model, strategy=wsync.WeightStrategy("state_dict"))
    return model.weight[0].item(), buffer["weight"][0].item(), type(got)


def test_a_transport_of_a_scheme_returns_none_at_its_timeout(backend: BuiltIn) -> None:
    with backend.connected() as session:
        session.scheme.sender_transports[1].send_weights(fill(Small(), 5))
        assert session.outputs() == [1, 5]
        assert session.workers[0].call(receive_nothing) == [None] * 3
        for value in (2, 3):
            session.workers[0].start(receive)
            transport = session.scheme.shared_transport
            assert transport is not None
            transport.setup_connection_and_weights_on_sender()  # it is connected
            transport.send_weights(fill(Small(), value))
            assert session.workers[0].result() == (value, value, dict)


def test_transports_meet_in_a_store_as_their_schemes_do() -> None:
    """The worker's knows which worker this is."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ExitStack() as stack:
        ours, theirs = (
            stack.enter_context(wsync.DistributedWeightSyncScheme(store=one, timeout=20.0))
            for one in (store, TCPStore("127.0.0.1", store.port))
        )
        ours.init_on_sender("policy", model=model_of(4), num_workers=1)
        theirs.init_on_receiver("policy", model=model_of(0))
        worker: Any = theirs.receiver_transport
        setting_up = stack.enter_context(ThreadPoolExecutor(1)).submit(
            worker.setup_connection_and_weights_on_receiver, worker_idx=0
        )
        ours.sender_transports[0].setup_connection_and_weights_on_sender()
        assert setting_up.result(20.0)["bias"].tolist() == [4.0]


def test_a_transport_keeps_no_model_and_no_strategy() -> None:
    weights, transport = nn.Linear(4, 2), wsync.MPTransport(queue.Queue())
    first, second = nn.Linear(4, 2), nn.Linear(4, 2)
    received = []
    for model, strategy in ((first, wsync.WeightStrategy("tensordict")), (second, wsync.WeightStrategy("state_dict"))):
        nn.init.normal_(weights.weight)
        transport.send_weights(weights)
        received.append(transport.receive_weights(0.0, model=model, strategy=strategy))
        assert torch.equal(model.weight, weights.weight)
    assert [type(given) for given in received] == [TensorDict, dict]
    assert not torch.equal(first.weight, second.weight)


# --- weights through queues of the user's own ---


def work(weights: Any, answers: Any, said: Any) -> None:
    """A worker: takes weights until it is given those of another model."""
    model, line = nn.Linear(2, 2), MPTransport(weights, answers)
    buffer = TensorDict.from_module(linear(0.0)).data
    strategy = WeightStrategy("tensordict")
    line.setup_connection_and_weights_on_receiver(worker_idx=0, weights=buffer, model=model, strategy=strategy)
    said.put([one.sum().item() for one in (model.weight, buffer["weight"])])
    received = line.receive_weights(60.0, model=model)
    said.put(None if received is None else received["bias"].tolist())
    try:
        line.receive_weights(60.0, model=model)
    except ValueError as error:
        said.put(f"{type(error).__name__}, and still {model.weight.sum().item()}")


def test_a_worker_answers_what_it_has_applied() -> None:
    context = multiprocessing.get_context("forkserver")
    weights, answers, said = context.Queue(), context.Queue(), context.Queue()
    worker = context.Process(target=work, args=(weights, answers, said))
    worker.start()
    try:
        line = MPTransport(weights, answers, timeout=60.0)
        line.setup_connection_and_weights_on_sender()
        line.send_weights(linear(1.0))
        assert said.get(timeout=60.0) == [4.0, 4.0]
        line.send_weights(linear(2.0).state_dict())
        assert said.get(timeout=60.0) == [2.0, 2.0]
        with pytest.raises(WorkerFailed, match="LayoutMismatch"):
            line.send_weights(nn.Linear(3, 2))
        assert said.get(timeout=60.0) == "LayoutMismatch, and still 8.0"
    finally:
        worker.join(60.0)
        worker.kill()
    assert worker.exitcode == 0


def test_a_scheme_makes_a_line_over_queues() -> None:
    weights = queue.Queue()
    line = MultiProcessWeightSyncScheme(timeout=0.05).create_transport(weight_queue=weights, ack_queue=queue.Queue())
    assert isinstance(line, MPTransport)
    with pytest.raises(SyncTimeout, match=r"within 0\.05 s"):
        line.send_weights(linear(1.0))
    assert torch.equal(weights.get(timeout=1.0)[1]["bias"], torch.ones(2))
    scheme, copy = MultiProcessWeightSyncScheme(), nn.Linear(2, 2)
    scheme.create_transport(weight_queue=weights).send_weights(linear(2.0))
    assert scheme.create_transport(weight_queue=weights).receive_weights(timeout=1.0, model=copy) is not None
    assert torch.equal(copy.weight, linear(2.0).weight)


def test_a_receive_without_a_timeout_waits_until_weights_arrive() -> None:
    line = MPTransport(queue.Queue())
    assert line.receive_weights(0.0) is None and line.receive_weights(0.15) is None
    threading.Timer(0.25, line.send_weights, [{"w": torch.ones(2)}]).start()
    received = line.receive_weights(timeout=None)
    assert received is not None and received["w"].tolist() == [1.0, 1.0]


def test_close_ends_a_receive() -> None:
    line = MPTransport(queue.Queue())
    threading.Timer(0.05, line.close).start()
    with pytest.raises(ConnectionError, match="closed"):
        line.receive_weights(timeout=None)
