"""The policies that a collector takes: factories, bare modules, what is no policy; and schemes as they are given."""

import numpy as np
import pytest
import torch
from collecting import Scores, cartpole, chosen, policy
from tensordict import TensorDict

import wsync
from collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from collectors.distributed import DistributedCollector, RPCCollector

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


# --- factories ---


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


# --- updates of some workers ---


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


# --- bare modules ---


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
