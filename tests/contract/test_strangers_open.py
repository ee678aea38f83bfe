"""What strangers hit in ``wsync`` and is open: points of issues 57 and 59, by their inputs, expected to fail."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import torch
from backends import BuiltIn, SharedMemoryPublished
from tensordict import TensorDict
from test_strangers import act, joined
from torch import nn
from workers_here import connect, make_worker, model_of

import wsync
from wsync.testing import WorkerError, WorkerPool
from wsync.testing.commands import WorkerState
from wsync.testing.models import fill


def issue(number: str) -> pytest.MarkDecorator:
    """An expected failure, until the rebuilt core takes it."""
    return pytest.mark.xfail(strict=False, reason=f"issue {number}")


class Agent(nn.Module):
    """As CleanRL's: no ``forward``, and an actor and a critic that one method calls."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def get_action_and_value(self, x: torch.Tensor) -> tuple[float, float]:
        """The first weight of each part, as the outputs have them."""
        return self.actor(x)[0].item(), self.critic(x)[0].item()


def pass_many(state: WorkerState, passes: int) -> tuple[int, int]:
    """How many passes mixed two versions, and how many versions were seen."""
    agent, x, seen, torn = state.models["policy"], torch.eye(64)[0], set[float](), 0
    for _ in range(passes):
        action, value = agent.get_action_and_value(x)
        torn += action != value
        seen.add(action)
    return torn, len(seen)


def test_1_every_public_method_of_a_model_enters_the_gate(backend: BuiltIn) -> None:
    with backend.connected(2, make=Agent) as session:
        for worker in session.workers:
            worker.start(pass_many, 10_000)
        over, sent = threading.Event(), [1]

        def send() -> None:
            while not over.is_set():
                sent[0] += 1
                session.send(sent[0])

        trainer = threading.Thread(target=send)
        trainer.start()
        try:
            for torn, versions in session.workers.results():
                assert torn == 0 and versions > 5
        finally:
            over.set()
            trainer.join()


def export_while_pending(state: WorkerState) -> list[float]:
    """Export the model when an update is pending; return its output."""
    model: Any = state.models["policy"]
    torch.export.export(model, (torch.ones(2),))
    return model(torch.ones(2)).tolist()


def linear() -> nn.Module:
    return nn.Linear(2, 2)


@issue("57.5")
def test_5_an_update_is_not_installed_inside_a_foreign_mode(pool: WorkerPool) -> None:
    SharedMemoryPublished.pool = pool
    source = fill(nn.Linear(2, 2), 1)
    with joined(SharedMemoryPublished(), source, linear) as (scheme, (worker,)):
        scheme.send(fill(source, 2))
        assert worker.call(export_while_pending) == [6.0, 6.0]
        scheme.send(fill(source, 3))
        assert worker.call(act) == [9.0, 9.0]


@issue("57.15")
def test_15_both_ends_may_connect_on_first_use() -> None:
    with wsync.SharedMemWeightSyncScheme(timeout=20.0) as sender:
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        sender.connect(wait=False)  # type: ignore[call-arg]
        with make_worker(sender, 0) as worker:
            worker.connect(wait=False)  # type: ignore[call-arg]
            sender.send(model_of(2))
            assert worker.model(torch.ones(2)).item() == 6


@issue("57.18")
def test_18_the_transport_of_shared_memory_is_one_object_with_the_registered_buffers() -> None:
    weights = TensorDict({"weight": torch.ones(2)})
    with wsync.SharedMemWeightSyncScheme({"policy": weights}) as scheme:
        transport: Any = scheme.create_transport(None)
        assert scheme.create_transport(None) is transport
        assert [one["weight"].tolist() for one in transport.unique_weights] == [[1.0, 1.0]]


@issue("57.19")
def test_19_a_lazy_policy_is_initialised_by_an_observation() -> None:
    from collectors import Collector, GymEnv

    policy = nn.LazyLinear(2)
    with Collector(lambda: GymEnv("CartPole-v1"), policy, frames_per_batch=4) as collector:
        collector.update_policy_weights_()
        assert next(collector).numel() == 4 and policy.in_features == 4


@issue("57.20")
def test_20_the_newest_pages_order_and_what_exists_before_init() -> None:
    by_position: Any = wsync.SharedMemWeightSyncScheme
    assert by_position("state_dict", False).strategy == "state_dict"
    with pytest.raises(RuntimeError, match="init_on_sender"):
        wsync.NoWeightSyncScheme().get_sender()


def receive_under_signals(state: WorkerState, last: int) -> int:
    """Receive until version ``last``, while a handler raises every two milliseconds; how often it did."""
    struck = 0

    def strike(*_: object) -> None:
        raise TimeoutError("struck")

    signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        while True:
            try:
                while state.schemes["policy"].version < last:
                    state.schemes["policy"].receive(1.0)
                    with wsync.gate():
                        pass
                break
            except (TimeoutError, wsync.SyncTimeout):
                struck += 1
    finally:
        while True:
            with suppress(TimeoutError):
                signal.setitimer(signal.ITIMER_REAL, 0)
                break
    return struck


@issue("59.8")
def test_8_an_answer_that_a_signal_swallowed_is_made_up_for(backend: BuiltIn) -> None:
    with backend.connected(1, timeout=1.0) as session:
        session.workers[0].start(receive_under_signals, 151)
        for value in range(2, 152):
            session.update(value)
        assert session.workers[0].result() > 0 and session.outputs() == [151]


def test_9_a_send_inside_the_gate_of_its_own_worker_says_so() -> None:
    with wsync.SharedMemWeightSyncScheme(timeout=1.0) as sender:
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        with make_worker(sender, 0) as worker:
            connect(sender.connect, worker)
            started = time.monotonic()
            with wsync.gate(), pytest.raises(RuntimeError, match="forward"):
                sender.send(model_of(2))
            assert time.monotonic() - started < 0.5


class Overlapping(nn.Module):
    """A buffer whose rows have two values in common."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(6).as_strided((2, 4), (2, 1)))

    def forward(self) -> torch.Tensor:
        return self.rows


class Apart(Overlapping):
    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.zeros(2, 4)


def test_11_a_tensor_that_overlaps_itself_is_refused_by_name(backend: BuiltIn) -> None:
    with pytest.raises(wsync.WeightSyncError, match="'rows'"), joined(backend, Apart(), Overlapping, timeout=60.0):
        pass
    with suppress(WorkerError):
        backend.pool.close()
