"""A module in a Ray actor inside environments, here and in worker processes; what is updated, dies, and is left."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from small_models import Scaled, scaled
from stepping import policy
from tensordict import TensorDict
from torch import nn

import wsync
from collectors import Collector, GymEnv, MultiAsyncCollector, MultiSyncCollector, RayModuleTransform
from collectors.distributed import DistributedCollector
from collectors.environments.transforms import Key
from wsync.testing.models import fill

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
REWARD: list[Key] = [("next", "reward")]


@pytest.fixture(scope="module")
def rewards(cluster: None) -> Iterator[RayModuleTransform]:
    """Actors take seconds to start: the tests that do not harm this one share it."""
    with RayModuleTransform(Scaled, REWARD, REWARD) as transform:
        yield transform


def reward_of(env: GymEnv) -> list[float]:
    """Of one step of CartPole, in which the environment's own is 1."""
    return env.step(TensorDict({"action": torch.zeros(2, dtype=torch.int64)}, [2]))["next", "reward"][:, 0].tolist()


def scheme_for(transform: RayModuleTransform, model: nn.Module) -> wsync.RayModuleTransformScheme:
    scheme = wsync.RayModuleTransformScheme()
    scheme.init_on_sender("module", context=transform, model=model)
    scheme.connect()
    return scheme


def test_an_update_is_seen_by_the_next_step(rewards: RayModuleTransform) -> None:
    env = GymEnv("CartPole-v1", 2, transforms=[rewards])
    copy = GymEnv("CartPole-v1", 2, transforms=[cloudpickle.loads(cloudpickle.dumps(rewards))])
    ours = scaled(2.0)
    assert reward_of(env) == [1, 1]
    with scheme_for(rewards, ours) as scheme:
        assert reward_of(env) == [2, 2]  # the first weights came with connect
        for value in range(3, 20):
            fill(ours, value)
            report = scheme.send()
            assert report is not None and report.workers == {0: scheme.version}
            assert scheme.version == value - 1
            assert reward_of(env) == reward_of(copy) == [value, value]
    assert reward_of(env) == [19, 19]  # the module keeps what it has


def collector_with(cls: Any, path: str, transforms: list[Any], **options: Any) -> Any:
    """A collector that synchronises its policy and what is in the actor of each worker's transform."""
    schemes = {"policy": wsync.WeightSyncScheme.from_backend(options.pop("scheme", "shared_mem"))}
    schemes[path] = wsync.RayModuleTransformScheme()
    makers = [partial(GymEnv, "CartPole-v1", 2, transforms=[transform]) for transform in transforms]
    return cls(makers, policy(), frames_per_batch=16, weight_sync_schemes=schemes, **options)


def rewards_of(collector: Any) -> list[float]:
    """The rewards of a batch that was begun after this call."""
    batches = [next(collector) for _ in range(5 if isinstance(collector, MultiAsyncCollector) else 1)]
    return batches[-1]["next", "reward"].unique().tolist()


@pytest.mark.parametrize(
    ("cls", "path"),
    [
        (Collector, "env.transform[0].module"),
        (Collector, "transform[0].module"),
        (MultiSyncCollector, "env.transform[0].module"),
        pytest.param(MultiAsyncCollector, "env.transform[0].module", marks=pytest.mark.slow),
        pytest.param(DistributedCollector, "env.transform[0].module", marks=pytest.mark.slow),
    ],
)
def test_a_collector_connects_and_updates_the_module(rewards: RayModuleTransform, cls: Any, path: str) -> None:
    with scheme_for(rewards, scaled(1.0)):
        pass  # what a test before this one has sent
    workers = 1 if cls is Collector else 2
    with collector_with(cls, path, [rewards] * workers) as collector:
        assert rewards_of(collector) == [1.0], "nothing was sent yet"
        collector.update_policy_weights_(weights=scaled(2.0), model_id=path)
        assert rewards_of(collector) == [2.0]
        collector.update_policy_weights_(weights_dict={"policy": policy(), path: scaled(3.0)})
        assert rewards_of(collector) == [3.0] and collector.policy_version == 2
        with pytest.raises(wsync.LayoutMismatch, match="weight"):
            collector.update_policy_weights_(weights_dict={"policy": policy(), path: nn.Linear(2, 2)})
        assert rewards_of(collector) == [3.0] and next(collector)["policy_version"].max() == 2
        collector.update_policy_weights_()
        assert rewards_of(collector) == [3.0]
        with pytest.raises(ValueError, match="worker_ids would mean workers of one model"):
            collector.update_policy_weights_(weights_dict={"policy": policy(), path: scaled(4.0)}, worker_ids=[0])
        assert collector.stats()["weight_sync"][path]["updates"] == 2
    assert reward_of(GymEnv("CartPole-v1", 2, transforms=[rewards])) == [3, 3]  # the actor is not the collector's
