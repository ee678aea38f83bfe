"""The gate: re-entrant, open again whatever happens, and no part of the module."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from stores import trainer
from torch import nn
from torch.nn.utils import parametrize
from workers_here import TIMEOUT, both_ends, connect, in_process, make_worker, model_of, weights_of

import wsync
from wsync.testing.models import fill


def sending(scheme: wsync.WeightSyncScheme, weights: Any) -> threading.Thread:
    """A thread that sends."""
    thread = threading.Thread(target=scheme.send, args=(weights,), daemon=True)
    thread.start()
    return thread


def test_an_update_waits_for_the_end_of_the_outermost_block() -> None:
    model = fill(nn.Linear(2, 1), 0)
    with in_process(model) as scheme:
        with wsync.gate():
            with wsync.gate():
                trainer = sending(scheme, fill(nn.Linear(2, 1), 1))
            assert model(torch.ones(2)).item() == 0
            trainer.join(0.1)
            assert trainer.is_alive() and model.weight.unique().item() == 0
        trainer.join(20.0)
        assert not trainer.is_alive() and model(torch.ones(2)).item() == 3


class Raises(nn.Linear):
    def __init__(self, error: BaseException) -> None:
        super().__init__(2, 1)
        self.error = error

    def forward(self, input: Any = None) -> None:
        raise self.error


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(1)])
def test_open_again_whatever_the_forward_raised(error: BaseException) -> None:
    model = Raises(error)
    with in_process(model) as scheme:
        for value in (1, 2):
            with pytest.raises(type(error)):
                model()
            with pytest.raises(type(error)), wsync.gate():
                model()
            trainer = sending(scheme, fill(nn.Linear(2, 1), value))
            trainer.join(20.0)
            assert not trainer.is_alive() and model.weight.unique().item() == value


async def act_later() -> None: ...


def generate_later() -> Iterator[None]:
    yield


@pytest.mark.parametrize("function", [act_later, generate_later])
def test_what_would_run_after_the_gate_was_left_is_refused(function: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"gate\(\)"):
        wsync.gated(function)


def test_a_gated_function_keeps_its_name_and_arguments() -> None:
    act = wsync.gated(sending)
    assert (act.__name__, act.__doc__) == ("sending", "A thread that sends.")
    assert wsync.gated(lambda observation, *, scale=2: observation * scale)(3, scale=4) == 12


def test_copies_are_ungated_and_of_the_original_class() -> None:
    model = nn.Linear(2, 2)
    with in_process(model):
        assert isinstance(model, nn.Linear) and type(model).__name__ == "Linear"
        for twin in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
            assert type(twin) is nn.Linear
            assert torch.equal(twin.weight, model.weight)
    assert type(model) is nn.Linear


class Registering(nn.Linear):
    """Each subclass is registered under a key that it must give."""

    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, key: str) -> None:
        Registering.known[key] = cls


class Registered(Registering, key="this one"):
    pass


class Slotted(nn.Linear):
    __slots__ = ("kept",)


@pytest.mark.parametrize("kind", [Registered, Slotted])
def test_a_class_with_rules_of_its_own_is_gated(kind: type[nn.Module]) -> None:
    model = kind(2, 2)
    with in_process(model):
        assert isinstance(model, kind) and model(torch.ones(2)).shape == (2,)
        assert type(pickle.loads(pickle.dumps(model))) is type(copy.deepcopy(model)) is kind
    assert type(model) is kind and Registering.known == {"this one": Registered}


def test_classes_are_let_go_with_their_last_model() -> None:
    """A parametrised module has a class of its own; so has its gated self."""
    model = parametrize.register_parametrization(nn.Linear(2, 2), "weight", nn.Identity())
    with in_process(model):
        classes = [weakref.ref(kind) for kind in type(model).__mro__[:2]]
    assert model(torch.ones(2)).shape == (2,)
    del model
    gc.collect()
    assert [kind() for kind in classes] == [None] * 2


class Pair(nn.Module):
    """An actor and a critic; the output is one weight of each."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.actor, self.critic = (fill(nn.Linear(64, 64), value) for _ in range(2))

    def forward(self) -> tuple[float, float]:
        return self.actor.weight[0, 0].item(), self.critic.weight[0, 0].item()


def test_no_forward_sees_one_model_new_and_the_other_old() -> None:
    acting, ended, forwards = Pair(), threading.Event(), list[tuple[float, float]]()
    with in_process(acting.actor) as actor, in_process(acting.critic, model_id="critic") as critic:

        def update() -> None:
            for value in range(1, 300):
                new = Pair(value)
                wsync.synchronize({actor: new.actor, critic: new.critic})
            ended.set()

        seen = wsync.gated(acting)
        trainer = threading.Thread(target=update)
        trainer.start()
        while not ended.is_set():
            forwards.append(seen())
        trainer.join()
        assert seen() == (299.0, 299.0)
    assert [pair for pair in forwards if pair[0] != pair[1]] == []


# --- a load function that fails half-way leaves weights of two versions: no forward may use them ---


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
    with (
        trainer(tmp_path, model_of(1)) as sender,
        wsync.StoreWeightSyncScheme(str(tmp_path), initiator="receiver") as reader,
    ):
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
    with both_ends(sent, kind=kind, near=False, model=model) as (sender, _):
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
