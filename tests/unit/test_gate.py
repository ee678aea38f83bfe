"""The gate: re-entrant, open again whatever happens, and no part of the module."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import ClassVar

import pytest
import torch
from implementations import KINDS, choose, implementation
from striking import struck_at
from torch import nn
from torch.nn.utils import parametrize

import wsync
from wsync.gate import Gate, gate_model, process_gate, ungate_model


class News:
    """A hook that counts."""

    def __init__(self) -> None:
        self.entered = self.left = 0

    def poll_update(self) -> bool:
        self.entered += 1
        return False

    def leaving_gate(self) -> None:
        self.left += 1


@pytest.fixture(params=KINDS, autouse=True)
def gate_state(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either kind of gate, as the one of this process."""
    classes = implementation(request.param)
    choose(classes, monkeypatch.setattr)
    monkeypatch.setattr(sys.modules["wsync.gate"], "_gate", Gate())  # ``wsync.gate`` is the function
    assert type(process_gate().gate_state) is classes.GateState


class Raises(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self) -> None:
        raise self.error


def test_only_the_outermost_asks_for_news() -> None:
    gate, news = Gate(), News()
    gate.attach(news)
    with gate.hold():
        with gate.hold():
            assert gate.call(lambda: 3) == 3
        assert (news.entered, news.left) == (1, 0)
    assert (news.entered, news.left) == (1, 1)
    gate.detach(news)
    with gate.hold():
        pass
    assert news.entered == 1


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(1)])
def test_open_again_whatever_the_forward_raised(error: BaseException) -> None:
    model, news = Raises(error), News()
    gate_model(model)
    process_gate().attach(news)
    try:
        for _ in range(2):
            with pytest.raises(type(error)):
                model()
            with pytest.raises(type(error)), wsync.gate():
                model()
        assert (news.entered, news.left) == (4, 4)
    finally:
        process_gate().detach(news)


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
@pytest.mark.parametrize("where", ["poll_update", "leaving_gate"])
def test_open_again_whatever_a_hook_raised(where: str, error: BaseException) -> None:
    gate, news = Gate(), News()

    def fail() -> bool:
        raise error

    setattr(news, where, fail)
    gate.attach(news)
    for within in (gate.hold, lambda: gate.call(nullcontext)):
        with pytest.raises(type(error)), within():
            pass
        assert (gate.gate_state.depth, gate.held_here) == (0, False)
    asked = (news.entered, news.left)
    assert asked == ((0, 2) if where == "poll_update" else (2, 0))


def test_blocks_of_two_coroutines_need_not_be_nested() -> None:
    gate, news = Gate(), News()
    gate.attach(news)
    first, second = gate.hold(), gate.hold()
    for block in (first, second):
        block.__enter__()
    first.__exit__(None, None, None)
    assert (news.entered, news.left) == (1, 0) and gate.held_here
    second.__exit__(None, None, None)
    assert (news.entered, news.left) == (1, 1) and not gate.held_here
    with gate.hold():
        assert (news.entered, news.left) == (2, 1)


def test_blocks_of_two_coroutines_inside_a_gated_call_leave_its_gate_closed() -> None:
    gate, news = Gate(), News()
    gate.attach(news)

    def overlap() -> None:
        first, second = gate.hold(), gate.hold()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        assert (news.entered, news.left) == (1, 0) and gate.held_here

    for _ in range(2):
        gate.call(overlap)
        assert (news.entered, news.left) == (1, 1) and not gate.held_here
        news.entered = news.left = 0


async def act_later() -> None: ...


def generate_later() -> Iterator[None]:
    yield


@pytest.mark.parametrize("function", [act_later, generate_later])
def test_what_would_run_after_the_gate_was_left_is_refused(function: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"use gate\(\) inside"):
        wsync.gated(function)


def test_all_hooks_are_left_if_one_raises() -> None:
    gate, news, other = Gate(), News(), News()

    def fail() -> None:
        raise ValueError

    def fail_later() -> None:
        other.left += 1
        raise KeyError

    news.leaving_gate, other.leaving_gate = fail, fail_later  # type: ignore[method-assign]
    last = News()
    for hook in (news, other, last):
        gate.attach(hook)
    for within in (gate.hold, lambda: gate.call(nullcontext)):
        with pytest.raises(KeyError), within():
            pass
    assert (other.left, last.left) == (2, 2)


def hold_briefly(gate: Gate) -> None:
    with gate.hold():
        pass


@pytest.mark.parametrize(
    "passing",
    [
        lambda gate: gate.call(bool),
        hold_briefly,
        lambda gate: gate.call_with_deadline(None, None, bool),
        lambda gate: gate.call_with_deadline(time.perf_counter() + 20.0, None, bool),
        lambda gate: gate.held_here,
    ],
    ids=["call", "hold", "call_with_deadline", "call_with_deadline a deadline", "held_here"],
)
def test_open_again_wherever_a_signal_strikes(passing: Callable[[Gate], object]) -> None:
    gate, seen = Gate(), []
    gate.attach(News())
    for point in count(1):
        finished = struck_at(point, partial(passing, gate))
        other = threading.Thread(target=lambda: gate.call(lambda: seen.append(gate.gate_state.depth)), daemon=True)
        other.start()
        other.join(20.0)
        assert seen == [1] * point and gate.gate_state.depth == 0, f"struck at point {point}"
        if finished:
            break


def test_a_hook_that_decides_for_others_has_all_called_again() -> None:
    gate, news, decisions = Gate(), News(), [True, True, False]
    decider = News()
    decider.poll_update = lambda: decisions.pop(0)
    gate.attach(news)
    gate.attach(decider)
    assert gate.call(dict, [("a", 1)], b=2) == {"a": 1, "b": 2}
    assert (decisions, news.entered, news.left) == ([], 3, 1)


def test_held_here_is_true_in_the_holding_thread_only() -> None:
    gate, seen = Gate(), []
    other = threading.Thread(target=lambda: seen.append(gate.held_here))
    assert not gate.held_here
    with gate.hold():
        assert gate.held_here
        other.start()
        other.join()
    assert (seen, gate.held_here) == ([False], False)


def test_copies_are_ungated_and_of_the_original_class() -> None:
    model = nn.Linear(2, 2)
    gate_model(model)
    assert type(model) is not nn.Linear and isinstance(model, nn.Linear)
    assert type(model).__name__ == "Linear"
    for twin in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is nn.Linear
        assert torch.equal(twin.weight, model.weight)
    assert type(model) is not nn.Linear
    ungate_model(model)
    assert type(model) is nn.Linear


class MadeByKeywords(nn.Linear):
    """Unpickling calls ``__new__`` with a keyword argument."""

    def __new__(cls, *_: int, bias: bool = True) -> MadeByKeywords:
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[int, ...], dict[str, bool]]:
        return (2, 2), {"bias": True}


def test_a_gated_model_with_arguments_of_its_own_for_unpickling() -> None:
    model = MadeByKeywords(2, 2)
    gate_model(model)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert type(twin) is MadeByKeywords
        assert torch.equal(twin.weight, model.weight)


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
def test_a_class_with_rules_for_its_subclasses_is_gated(kind: type[nn.Module]) -> None:
    model = kind(2, 2)
    gate_model(model)
    assert type(model) is not kind and isinstance(model, kind)
    assert model(torch.ones(2)).shape == (2,)
    assert Registering.known == {"this one": Registered}
    ungate_model(model)
    assert type(model) is kind


def test_a_gated_function_runs_inside_and_keeps_its_name() -> None:
    news = News()

    @wsync.gated
    def act(observation: int, *, scale: int = 2) -> tuple[int, bool]:
        """Act."""
        return observation * scale, process_gate().held_here

    process_gate().attach(news)
    try:
        assert act(3, scale=4) == (12, True)
        assert (act.__name__, act.__doc__, news.entered, news.left) == ("act", "Act.", 1, 1)
    finally:
        process_gate().detach(news)
    assert not process_gate().held_here


def test_classes_are_let_go_with_their_last_model() -> None:
    """A parametrised module has a class of its own; so has its gated self."""
    models = [parametrize.register_parametrization(nn.Linear(2, 2), "weight", nn.Identity()) for _ in range(3)]
    for model in models:
        gate_model(model)
    classes = [weakref.ref(kind) for model in models for kind in (type(model), type(model).__mro__[1])]
    ungate_model(models[0])
    assert models[0](torch.ones(2)).shape == (2,)
    models.clear()
    del model
    gc.collect()
    assert [kind() for kind in classes] == [None] * 6
