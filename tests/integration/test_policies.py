"""The policies that a collector takes: factories, bare modules, what is no policy; and schemes as they are given."""

import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
from collecting import Scores, cartpole, chosen, policy
from tensordict import TensorDict
from tensordict.nn import InteractionType, ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import nn

import wsync
from collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from collectors.distributed import DistributedCollector, RPCCollector
from learning import make_policy

EVERY = [Collector, MultiSyncCollector, MultiAsyncCollector]


class OfTensorDict(Scores):
    """The same as a function of a TensorDict, which it declares by a name."""

    def forward(self, td):
        return td.set("action", super().forward(td["observation"]))


def collect_with(cls, acting=None, *, workers=2, **options):
    makers = [cartpole] * (1 if cls is Collector else workers)
    return cls(makers, acting, frames_per_batch=8 * len(makers), **options)


def when(collector, version: int):
    """The first batch that is of ``version`` alone."""
    return next(batch for batch in collector if (batch["policy_version"] == version).all())


@pytest.mark.parametrize("cls", [MultiSyncCollector, DistributedCollector, RPCCollector])
def test_one_factory_for_each_worker(cls):
    with collect_with(cls, policy_factory=[lambda: policy(1.0), lambda: policy(-1.0)]) as collector:
        batch = next(collector)
        assert [chosen(batch[0]), chosen(batch[1])] == [1.0, 0.0]
        assert (batch["policy_version"] == 0).all()
        with pytest.raises(wsync.NotConnected, match="no model or weights were given"):
            collector.update_policy_weights_()
        collector.update_policy_weights_(policy(-1.0))
        batch = next(collector)
        assert chosen(batch) == 0.0 and (batch["policy_version"] == 1).all()


@pytest.mark.parametrize("scheme", ["shared_mem", "multiprocess", "distributed"])
@pytest.mark.parametrize("on_worker_failure", ["raise", "drop"])
def test_weights_for_some_workers_go_to_these(scheme, on_worker_failure):
    schemes = {"policy": wsync.WeightSyncScheme.from_backend(scheme)}
    options = dict(weight_sync_schemes=schemes, on_worker_failure=on_worker_failure)
    with collect_with(MultiSyncCollector, policy(1.0), **options) as collector:
        collector.update_policy_weights_({0: policy(-1.0)})
        batch = next(collector)
        assert [chosen(batch[0]), chosen(batch[1])] == [0.0, 1.0]
        assert batch["policy_version"][:, 0, 0].tolist() == [2, 1]
        collector.update_policy_weights_(weights={1: TensorDict.from_module(policy(-1.0)).data}, model_id="policy")
        assert next(collector)["policy_version"][:, 0, 0].tolist() == [2, 3]
        collector.update_policy_weights_({0: policy(1.0), 1: policy(-1.0)})
        batch = next(collector)
        assert [chosen(batch[0]), chosen(batch[1])] == [1.0, 0.0] and (batch["policy_version"] == 4).all()
        collector.update_policy_weights_(weights_dict={"policy": {1: policy(1.0)}})
        batch = next(collector)
        assert chosen(batch) == 1.0 and batch["policy_version"][:, 0, 0].tolist() == [4, 5]
        for wrong in ({7: policy()}, {0: policy(), 7: policy()}, {0: policy(), 1: policy(), 7: policy()}):
            with pytest.raises(ValueError, match="7"):
                collector.update_policy_weights_(wrong)
        with pytest.raises(ValueError, match=r"weights for worker\(s\) \[0\] in an update of worker\(s\) \[1\]"):
            collector.update_policy_weights_({0: policy()}, worker_ids=np.int64(1))
        with pytest.raises(ValueError, match=r"unknown worker_ids \[5\]"):
            collector.update_policy_weights_(worker_ids=[0, 5])
        assert next(collector)["policy_version"][:, 0, 0].tolist() == [4, 5]


@pytest.mark.parametrize("bare", [Scores, OfTensorDict])
@pytest.mark.parametrize("cls", [*EVERY, DistributedCollector])
def test_a_bare_module_acts(cls, bare):
    trained = bare(1.0)
    with collect_with(cls, trained) as collector:
        batch = next(collector)
        assert chosen(batch) == 1.0 and batch["action"].shape == (*batch.shape, 2)
        with torch.no_grad():
            trained.bias.neg_()
        for update in (
            collector.update_policy_weights_,
            lambda: collector.update_policy_weights_(trained),
            lambda: collector.update_policy_weights_(trained.state_dict()),
        ):
            update()
            version = collector.policy_version
            assert chosen(when(collector, version)) == 0.0
        assert version == 4 and collector.get_model("policy") is trained


# --- what strangers hit in collectors: points of issue 57, each by its input ---


BOTH = [Collector, MultiSyncCollector]


def actor() -> TensorDictSequential:
    """What TorchRL's ``ProbabilisticActor`` is: logits, and a distribution that samples if it is asked to."""
    logits = TensorDictModule(Scores(), in_keys=["observation"], out_keys=["logits"])
    drawn = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=torch.distributions.Categorical)
    parts: Any = (logits, drawn)
    return TensorDictSequential(*parts)


@pytest.mark.parametrize("cls", BOTH)
def test_57_2_a_policy_with_a_distribution_samples_unless_told_otherwise(cls: Any) -> None:
    makers: list[Any] = [cartpole]
    with cls(makers, actor(), frames_per_batch=128) as collector:
        assert next(collector)["action"].unique().numel() == 2
    with cls(makers, actor(), frames_per_batch=128, exploration_type=InteractionType.DETERMINISTIC) as collector:
        assert next(collector)["action"].unique().tolist() == [1]


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("given", ["policy", "policy_factory"])
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_57_19_a_lazy_policy_is_initialised_by_an_observation(cls: Any, given: str) -> None:
    options: dict[str, Any] = {given: nn.LazyLinear(2) if given == "policy" else lambda: nn.LazyLinear(2)}
    with cls([cartpole], frames_per_batch=4, **options) as collector:
        collector.update_policy_weights_(nn.Linear(4, 2))
        assert next(collector)["policy_version"].min() >= 1


class Refusing(Scores):
    """Cannot take another state than its first one, and cannot go back."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.refused = 0, False

    def get_extra_state(self) -> int:
        return self.state

    def set_extra_state(self, state: int) -> None:
        self.refused |= bool(state)
        if self.refused:
            raise ArithmeticError("no")


@pytest.mark.parametrize("closed", [False, True])
def test_57_8_a_policy_that_cannot_be_used_concerns_no_other_collector(closed: bool) -> None:
    policy = Refusing()
    with Collector(cartpole, policy, frames_per_batch=4) as broken:
        policy.state = 1
        with pytest.raises(wsync.WeightSyncError, match="ArithmeticError"):
            broken.update_policy_weights_()
        with pytest.raises(wsync.WeightSyncError, match="two versions"):
            next(broken)
        if closed:
            broken.shutdown()
        for acting in (Scores(), make_policy(broken.env.observation_spec["observation"], broken.env.action_spec)):
            with Collector(cartpole, acting, frames_per_batch=4) as healthy:
                healthy.update_policy_weights_()
                assert (next(healthy)["policy_version"] == 2).all()


def test_57_10_a_collector_in_a_daemonic_process_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(multiprocessing.current_process())["_config"], "daemon", True)
    with pytest.raises(RuntimeError, match="daemon=False"):
        MultiSyncCollector([cartpole], Scores(), frames_per_batch=4)


def test_57_21_a_replay_buffer_gets_the_frames_as_they_come() -> None:
    class Buffer(list[Any]):
        """What is asked of a buffer: ``extend`` with a TensorDict of frames, as TorchRL's."""

    buffer = Buffer()
    with MultiSyncCollector(
        [cartpole] * 2, Scores(), frames_per_batch=16, total_frames=32, replay_buffer=buffer
    ) as collector:
        assert list(collector) == [None, None]
    assert len(buffer) == 32 and {*buffer[0].keys()} >= {"observation", "action", "next"}


def test_57_13_the_metrics_and_a_report_are_printed_in_a_line() -> None:
    with MultiSyncCollector([cartpole], Scores(), frames_per_batch=16) as collector:
        metrics = collector.weight_sync_schemes["policy"].metrics
        for _ in range(3):
            report = collector.update_policy_weights_()
        assert report.phases["transfer"] == 0.0  # shared memory: nothing is moved
        next(collector)
        for text in (repr(metrics), str(report)):
            assert text.isascii() and "\n" not in text and len(text) < 200
        metrics.observe([0, 2])  # in a loop of one's own: versions that acted
        summary = metrics.summary()
        assert summary["age"] == pytest.approx((4 + 2) / 18) and 0 < summary["share"] < 1
        assert summary["seconds"] == metrics.seconds > 0
