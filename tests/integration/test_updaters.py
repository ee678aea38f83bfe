"""The older API's weight updaters: their hooks decide which worker gets what, and the collectors' schemes carry it."""

import os
import signal
from functools import partial
from multiprocessing.connection import wait

import collecting
import pytest
from collecting import chosen
from tensordict import TensorDict

import wsync
from collectors import (
    Collector,
    GymEnv,
    MultiProcessedWeightUpdater,
    MultiSyncCollector,
    RayWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from collectors.distributed import DistributedWeightUpdater, RPCWeightUpdater

pytestmark = pytest.mark.filterwarnings("ignore:.*of the older API:DeprecationWarning")
policy = partial(collecting.policy, critic=False)
READY_MADE = [
    *(VanillaWeightUpdater, MultiProcessedWeightUpdater, RayWeightUpdater),
    *(RPCWeightUpdater, DistributedWeightUpdater),
]


def weights(sign: float) -> TensorDict:
    return TensorDict.from_module(policy(sign)).data.clone()


def single(updater, trained=None, scheme=None, **options) -> Collector:
    if scheme is not None:
        options["weight_sync_schemes"] = {"policy": wsync.WeightSyncScheme.from_backend(scheme)}
    trained = policy() if trained is None else trained
    return Collector(lambda: GymEnv("CartPole-v1"), trained, frames_per_batch=4, weight_updater=updater, **options)


def multi(updater, cls=MultiSyncCollector, **options):
    makers = [lambda: GymEnv("CartPole-v1")] * 2
    return cls(makers, options.pop("trained", policy()), frames_per_batch=8, weight_updater=updater, **options)


def versions(batch) -> list[int]:
    return batch["policy_version"].unique().tolist()


class Mirrored(WeightUpdaterBase):
    """Worker 1 gets the weights with the opposite sign; note that it does not call ``super().__init__()``."""

    def __init__(self):
        self.synced = []

    def all_worker_ids(self):
        return [0, 1]

    def _sync_weights_with_worker(self, *, worker_id, server_weights):
        self.synced.append(worker_id)
        own = -server_weights if worker_id == 1 else server_weights
        super()._sync_weights_with_worker(worker_id=worker_id, server_weights=own)


@pytest.mark.parametrize("cls", [WeightUpdaterBase, Mirrored, *READY_MADE])
def test_each_warns_where_it_is_made(cls):
    with pytest.warns(DeprecationWarning, match=f"^{cls.__name__} is of the older API: .*weight_sync_schemes") as seen:
        cls()
    assert [warning.filename for warning in seen] == [__file__]


def test_a_class_that_a_collector_makes_warns_where_the_collector_is_made():
    with pytest.warns(DeprecationWarning, match="VanillaWeightUpdater") as seen, single(VanillaWeightUpdater):
        pass
    assert [warning.filename for warning in seen] == [__file__]


def test_a_users_own_updater_chooses_the_weights_of_each_worker_in_one_version():
    hooked = []
    with multi(Mirrored, cat_results="stack", on_worker_failure="drop") as collector:
        updater = collector.weight_updater
        updater.register_post_hook(lambda: hooked.append(len(updater.synced)))
        collector.update_policy_weights_(policy(1.0))
        batch = next(collector)
        assert [chosen(batch[0]), chosen(batch[1])] == [1.0, 0.0] and versions(batch) == [2]
        collector.update_policy_weights_(policy(-1.0).state_dict(), worker_ids=1)
        batch = next(collector)
        assert [chosen(batch[0]), chosen(batch[1])] == [1.0, 1.0] and versions(batch) == [2, 3]
        assert updater.synced == [0, 1, 1] and hooked == [2, 3]
        with pytest.raises(ValueError, match=r"unknown worker_ids \[7\]"):
            updater.push_weights(worker_ids=[7])
        victim = collector.remote_workers[0]
        os.kill(victim.process.pid, signal.SIGKILL)
        assert wait([victim.sentinel], 20)
        updater(policy(1.0))  # for all: the other one has it
        batch = next(collector)
        assert versions(batch) == [4] and chosen(batch) == 0.0 and collector.failures.dropped == {0: 1}


class Hooked(WeightUpdaterBase):
    skip = False

    def _get_server_weights(self):
        return weights(-1.0)

    def _maybe_map_weights(self, server_weights):
        assert isinstance(server_weights, TensorDict)
        return -server_weights

    def _skip_update(self, worker_id):
        return self.skip


def test_every_other_hook_is_asked():
    with single(updater := Hooked()) as collector:
        assert updater.collector is collector
        collector.update_policy_weights_()
        batch = next(collector)
        assert chosen(batch) == 1.0 and versions(batch) == [2]  # without either hook it would be 0
        collector.update_policy_weights_(policy(1.0), model_id="policy")
        assert chosen(next(collector)) == 0.0
        updater.skip = True
        collector.update_policy_weights_(policy(-1.0))
        assert versions(next(collector)) == [3]
        updater._sync_weights_with_worker(server_weights=weights(1.0))  # by itself: at once
        assert chosen(next(collector)) == 1.0


def test_ray_leaves_workers_out_for_max_interval_pushes():
    with single(RayWeightUpdater(weights(-1.0), [object()], max_interval=2), scheme="distributed") as collector:
        seen = []
        for _ in range(6):
            collector.update_policy_weights_()
            seen += versions(next(collector))
        assert seen == [1, 1, 2, 2, 2, 3] and chosen(next(collector)) == 0.0
    with pytest.raises(ValueError, match="max_interval is at least 0"):
        RayWeightUpdater(max_interval=-1)
