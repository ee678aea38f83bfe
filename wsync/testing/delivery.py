"""The contract, part 1: what is sent arrives whole, in every calling form, and only at the workers it was sent to."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import wsync
import wsync.testing.commands as commands
from wsync.testing.commands import WorkerState
from wsync.testing.hooks import TIMEOUT, BackendHooks
from wsync.testing.models import EveryTensorKind, OtherName, Small, digest, double, fill, longer, scramble, ties_hold
from wsync.testing.models import strides as strides_of
from wsync.testing.workers import WorkerError


def _structure(state: WorkerState) -> tuple[dict[str, tuple[int, ...]], bool]:
    model = state.models["policy"]
    return strides_of(model), ties_hold(model)


def _plus_worker_idx(worker_idx: int, weights: Any) -> Any:
    return {name: value + worker_idx for name, value in weights.items()}


class Delivery(BackendHooks):
    """Delivery of weights."""

    def test_the_first_weights_arrive(self) -> None:
        """With ``connect``, or with the first ``send`` where the backend delivers them so."""
        with self.connected() as session:
            assert session.versions() == [1, 1]
            assert session.outputs() == [1, 1]

    @pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
    def test_every_calling_form_delivers_every_kind_of_tensor(self, strategy: str) -> None:
        """Bit for bit, with strides, ties and extra state, buffers included."""
        with self.connected(make=EveryTensorKind, strategy=strategy) as session:
            scheme, model = session.scheme, session.model
            scramble(model, 1)
            scheme.send()
            assert session.digests() == [digest(model)] * 2
            assert session.workers.call(_structure) == [(strides_of(model), True)] * 2

            other = scramble(EveryTensorKind(), 2)
            scheme.send(other)
            assert session.digests() == [digest(other)] * 2

            scramble(other, 3)
            before = digest(model)["scratch"]
            scheme.send(other.state_dict())  # without the buffer that is not persistent, which is the model's then
            assert session.digests() == [digest(other) | {"scratch": before}] * 2

            extra_state = digest(other)["tail._extra_state"]
            scramble(other, 4)
            weights: Any = TensorDict.from_module(other)
            scheme.send(weights.clone())  # without the extra state, which stays
            assert session.digests() == [digest(other) | {"tail._extra_state": extra_state}] * 2

            scheme.send(scheme.strategy.extract_weights(other))
            assert session.digests() == [digest(other)] * 2
            assert session.workers.call(_structure) == [(strides_of(model), True)] * 2

    def test_first_weights_can_be_given_to_connect(self) -> None:
        with self.workers(1) as workers, self.make_scheme(timeout=TIMEOUT) as scheme:
            scheme.init_on_sender("policy", num_workers=1)
            workers[0].start(commands.join, scheme, Small, 0, "policy")
            scheme.connect(weights=fill(Small(), 7))
            workers[0].result()
            assert workers[0].call(commands.output)[0] == 7

    def test_without_a_model_the_first_weights_sent_define_the_layout(self) -> None:
        with self.connected(init={}) as session:
            assert session.versions() == [0, 0]
            with pytest.raises(wsync.NotConnected):
                session.scheme.send()
            session.workers.start(commands.receive, 20.0)
            session.scheme.send(fill(Small(), 5))
            assert all(session.workers.results())
            assert session.outputs() == [5, 5]
            with pytest.raises(wsync.LayoutMismatch, match=r"weight.*7"):
                session.scheme.send(longer())
            session.scheme.send(fill(Small(), 6).state_dict())
            assert session.outputs() == [6, 6]

    @pytest.mark.parametrize(("strategy", "kind"), [("tensordict", "TensorDict"), ("state_dict", "dict")])
    def test_receive_returns_the_format_of_the_strategy(self, strategy: str, kind: str) -> None:
        with self.connected(1, strategy=strategy) as session:
            worker = session.workers[0]
            assert worker.call(commands.receive, 0.0) is None  # the first weights count as seen
            worker.start(commands.receive, 20.0)
            session.scheme.send()
            assert worker.result() == (kind, ["weight"])
            assert worker.call(commands.receive, 0.0) is None

    def test_worker_ids_select_workers(self) -> None:
        with self.connected(3) as session:
            session.send(2, worker_ids=1)
            assert session.outputs() == [1, 2, 1]
            session.send(3, worker_ids=[0, 2])
            assert session.outputs() == [3, 2, 3] and session.versions() == [3, 2, 3]
            session.send(4, worker_ids=torch.tensor([2, 1]))
            assert session.outputs() == [3, 4, 4]
            for wrong in (3, -1, [0, 7], 1.0, [[0]], [True, False], []):
                with pytest.raises(ValueError, match="worker_ids"):
                    session.scheme.send(worker_ids=wrong)  # pyright: ignore[reportArgumentType]
            report = session.send(5)
            assert report is not None and dict(report.workers) == {0: 5, 1: 5, 2: 5}
            assert session.outputs() == [5, 5, 5]

    def test_weights_can_differ_between_workers(self) -> None:
        live = {0: fill(Small(), 1), 1: fill(Small(), 2)}
        with self.connected(init={"params_map": live}) as session:
            scheme = session.scheme
            assert session.outputs() == [1, 2]
            for value in range(3, 6):
                scheme.send({0: fill(Small(), value), 1: fill(Small(), -value).state_dict()})
                assert session.outputs() == [value, -value]
            for worker_idx, model in live.items():
                fill(model, 7 + worker_idx)
            scheme.send(worker_ids=1)
            assert session.outputs() == [5, 8]
            scheme.send()
            assert session.outputs() == [7, 8]
            session.send(9)
            assert session.outputs() == [9, 9]
            with pytest.raises(ValueError, match="per worker"):
                scheme.send({0: Small()})

    def test_device_map_fn_maps_the_weights_of_each_worker(self) -> None:
        model = fill(Small(), 10)
        init: dict[str, Any] = {"model": model, "device_map_fn": _plus_worker_idx}
        with self.connected(init=init, strategy="state_dict") as session:
            assert session.outputs() == [10, 11]
            fill(model, 20)
            session.scheme.send()
            assert session.outputs() == [20, 21] and model.weight[0] == 20

    def test_live_weights_are_read_at_each_send(self) -> None:
        live = TensorDict({"weight": torch.ones(4)})
        with self.connected(1, init={"weights": live}) as session:
            live.fill_("weight", 3)
            assert session.outputs() == [1]
            session.scheme.send()
            assert session.outputs() == [3]

    def test_training_does_not_reach_workers_before_a_send(self) -> None:
        with self.connected() as session:
            model, before = session.model, session.digests()
            model().sum().backward()
            with torch.no_grad():
                model.weight.sub_(model.weight.grad)
            assert session.digests() == before
            session.scheme.send()
            assert session.digests() == [digest(model)] * 2
            assert not model.weight.is_shared()

    @pytest.mark.parametrize(
        ("make", "problem"),
        [(OtherName, "weight.*bias|bias.*weight"), (longer, r"'weight'.*\[7\]"), (double, "'weight'.*float64")],
    )
    def test_weights_that_do_not_fit_are_refused_by_name(self, make: Any, problem: str) -> None:
        with self.connected(1) as session:
            with pytest.raises(wsync.LayoutMismatch, match=problem):
                session.scheme.send(make())
            with pytest.raises(TypeError):
                session.scheme.send(3.0)
            assert session.outputs() == [1]
            session.send(2)
            assert session.outputs() == [2]

    @pytest.mark.parametrize(("make", "problem"), [(longer, r"\[7\]"), (double, "float64"), (OtherName, "weight")])
    def test_a_worker_with_a_model_that_does_not_fit_is_named(self, make: Any, problem: str) -> None:
        with self.workers(2) as workers, self.make_scheme(timeout=TIMEOUT) as scheme:
            scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=2)
            workers[0].start(commands.join, scheme, Small, 0, "policy")
            workers[1].start(commands.join, scheme, make, 1, "policy")
            with pytest.raises(wsync.WorkerFailed, match=rf"(?s)worker 1.*LayoutMismatch.*{problem}") as failed:
                scheme.connect()
                scheme.send()  # where the first weights come with it
            assert set(failed.value.workers) == {1}
            workers[0].result()
            assert workers[0].call(commands.output)[0] == self.first_weights_at_connect  # else `send` was not reached
            with pytest.raises(WorkerError, match=problem) as remote:
                workers[1].result()
            assert "LayoutMismatch" in remote.value.kinds

    def test_a_pickled_scheme_holds_no_weights(self) -> None:
        with self.make_scheme(timeout=TIMEOUT) as scheme:
            scheme.init_on_sender("policy", model=nn.Linear(512, 512), num_workers=1)
            pickled = pickle.dumps(scheme)
            assert len(pickled) < 2**16
            assert pickle.loads(pickled).model is None
