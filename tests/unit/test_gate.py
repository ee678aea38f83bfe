"""The gate: re-entrant, open again whatever happens, and no part of the module."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import wsync
from wsync.testing.models import fill


@contextmanager
def gated(model: nn.Module, name: str = "policy") -> Iterator[wsync.WeightSyncScheme]:
    """A scheme whose sender and only worker, with this model, are in this process."""
    with wsync.SharedMemWeightSyncScheme(timeout=20.0) as scheme:
        scheme.init_in_process(name, model)
        yield scheme


def sending(scheme: wsync.WeightSyncScheme, weights: Any) -> threading.Thread:
    """A thread that sends."""
    thread = threading.Thread(target=scheme.send, args=(weights,), daemon=True)
    thread.start()
    return thread


def test_an_update_waits_for_the_end_of_the_outermost_block() -> None:
    model = fill(nn.Linear(2, 1), 0)
    with gated(model) as scheme:
        with wsync.gate():
            with wsync.gate():
                trainer = sending(scheme, fill(nn.Linear(2, 1), 1))
            assert model(torch.ones(2)).item() == 0
            trainer.join(0.1)
            assert trainer.is_alive() and model.weight.unique().item() == 0
        trainer.join(20.0)
        assert not trainer.is_alive() and model(torch.ones(2)).item() == 3


class Raises(nn.Linear):
    """Raises ``error`` in each forward."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(2, 1)
        self.error = error

    def forward(self, input: Any = None) -> None:
        raise self.error


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(1)])
def test_open_again_whatever_the_forward_raised(error: BaseException) -> None:
    model = Raises(error)
    with gated(model) as scheme:
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
    with gated(model):
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
    with gated(model):
        assert isinstance(model, kind) and model(torch.ones(2)).shape == (2,)
        assert type(pickle.loads(pickle.dumps(model))) is type(copy.deepcopy(model)) is kind
    assert type(model) is kind and Registering.known == {"this one": Registered}


def test_classes_are_let_go_with_their_last_model() -> None:
    """A parametrised module has a class of its own; so has its gated self."""
    model = parametrize.register_parametrization(nn.Linear(2, 2), "weight", nn.Identity())
    with gated(model):
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
    with gated(acting.actor) as actor, gated(acting.critic, "critic") as critic:

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
