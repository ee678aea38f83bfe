"""Schemes by name, their options, and one family of errors."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any

import pytest
import torch
from striking import struck_at
from tensordict import TensorDict
from torch import nn

import wsync
from wsync.testing.models import Small


def test_one_family() -> None:
    for kind in (wsync.LayoutMismatch, wsync.NotConnected, wsync.SyncTimeout, wsync.WorkerDied, wsync.WorkerFailed):
        assert issubclass(kind, wsync.WeightSyncError)
        error = pickle.loads(pickle.dumps(kind("the cause")))
        assert (error.workers, str(error)) == ({}, "the cause")
    assert issubclass(wsync.SyncTimeout, TimeoutError)


def test_worker_errors_cross_processes() -> None:
    error = pickle.loads(pickle.dumps(wsync.WorkerDied("worker 1 died", {1: "killed"}, 3)))
    assert (error.workers, error.version, str(error)) == ({1: "killed"}, 3, "worker 1 died")


@pytest.mark.parametrize("name", ["shared_mem", "multiprocess", "distributed", "rpc", "ray", "none"])
def test_from_backend(name: str) -> None:
    scheme = wsync.WeightSyncScheme.from_backend(name, strategy="state_dict", timeout=3.0)
    assert scheme.name == name and scheme.timeout == 3.0 and scheme.strategy.extract_as == "state_dict"
    scheme.shutdown()
    scheme.shutdown()


def test_a_scheme_is_printed_with_its_state() -> None:
    with wsync.SharedMemWeightSyncScheme() as scheme:
        assert repr(scheme) == "<SharedMemWeightSyncScheme: not initialised>"
        scheme.init_on_sender("policy", model=Small(), num_workers=2)
        assert repr(scheme) == "<SharedMemWeightSyncScheme: sender to 2 worker(s), model 'policy', version 0>"
        with pickle.loads(pickle.dumps(scheme)) as worker:
            worker.init_on_receiver("policy", model=Small(), worker_idx=1)
            assert repr(worker) == "<SharedMemWeightSyncScheme: worker 1, model 'policy', version 0>"


class WithFolder(wsync.NoWeightSyncScheme):
    """A user's scheme, which passes its other options on."""

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(**options)
        self.folder = folder


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: WithFolder(foldr="/x"), "WithFolder has no argument 'foldr': did you mean 'folder'?"),
        (lambda: WithFolder("/x", tiemout=3), "WithFolder has no argument 'tiemout': did you mean 'timeout'?"),
        (
            lambda: wsync.WeightSyncScheme.from_backend("shared_mem", acknowlege="published"),
            "SharedMemWeightSyncScheme has no argument 'acknowlege': did you mean 'acknowledge'?",
        ),
        (
            lambda: wsync.WeightSyncScheme.from_backend("store", xyz=1),
            "StoreWeightSyncScheme has no argument 'xyz': there are url, strategy, ",
        ),
    ],
)
def test_an_unknown_option_names_the_class_that_was_called(make: Callable[[], object], said: str) -> None:
    with pytest.raises(TypeError) as caught:
        make()
    assert str(caught.value).startswith(said)


def test_bad_options() -> None:
    with pytest.raises(ValueError, match=r"distributed, http, multiprocess, none, ray, .*rpc, shared_mem"):
        wsync.WeightSyncScheme.from_backend("carrier_pigeon")
    with pytest.raises(ValueError, match="timeout"):
        wsync.SharedMemWeightSyncScheme(timeout=0)
    with pytest.raises(ValueError, match="installed"):
        wsync.SharedMemWeightSyncScheme(acknowledge="maybe")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="strategy"):
        wsync.MultiProcessWeightSyncScheme("json")


def test_a_gpu_without_an_index_is_that_of_the_thread() -> None:
    initialised = torch.cuda.is_initialized()
    scheme = wsync.CudaWeightSyncScheme(device="cuda")
    assert scheme.device == torch.device("cuda", torch.cuda.current_device() if initialised else 0)
    assert torch.cuda.is_initialized() == initialised


def test_a_timeout_that_is_set_on_the_sender_is_not_that_of_a_replacement() -> None:
    with wsync.SharedMemWeightSyncScheme(timeout=30.0) as scheme:
        scheme.init_on_sender("policy", model=Small(), num_workers=1)
        scheme.timeout = 1.0
        assert scheme.timeout == 1.0 and pickle.loads(pickle.dumps(scheme)).timeout == 30.0


@pytest.mark.parametrize("model", [None, Small()])
def test_none_carries_nothing(model: Any) -> None:
    scheme = wsync.NoWeightSyncScheme()
    scheme.init_on_sender("policy", model=model)
    scheme.connect()
    scheme.continue_from(7)
    assert scheme.send() is None and scheme.version == 0
    assert scheme.receive() is None
    assert wsync.synchronize({scheme: nn.Linear(1, 1)}) == {}
    with wsync.NoWeightSyncScheme() as receiver:
        receiver.init_on_receiver("policy", model=Small())
        assert receiver.pull() == 0


@pytest.mark.parametrize(
    "ask",
    [
        *(methodcaller(name) for name in ("send", "send_async", "wait_async", "shutdown")),
        *(
            attrgetter(name)
            for name in ("version", "num_workers", "worker_idx", "weights", "sender", "shared_transport")
        ),
        lambda scheme: setattr(scheme, "timeout", 0.1),
    ],
)
def test_a_scheme_that_another_thread_shuts_down_at_any_point_is_not_connected(ask: Callable[[Any], object]) -> None:
    for point in range(1, 30):
        with wsync.SharedMemWeightSyncScheme(timeout=0.1) as scheme:
            scheme.init_on_sender("policy", weights={"weight": torch.ones(2)})
            with suppress(wsync.NotConnected):
                struck_at(point, partial(ask, scheme), scheme.shutdown)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"initiator": "both"}, "'sender' or 'receiver'"),
        ({"max_staleness": 2}, "needs initiator='receiver'"),
        ({"initiator": "receiver", "max_staleness": -1}, "0 or more"),
        ({"initiator": "receiver", "policy_weights": {"policy": TensorDict({})}}, "workers pull: they cannot share"),
    ],
)
def test_options_of_workers_that_fetch(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wsync.SharedMemWeightSyncScheme(**options)


def test_without_a_name_a_scheme_is_called_by_its_class_in_reports() -> None:
    class Postal(wsync.WeightSyncScheme):
        def create_transport(self, worker_idx: int | None = None) -> wsync.TransportBackend:
            return wsync.SharedMemTransport()

    assert Postal().metrics.scheme == "Postal"
