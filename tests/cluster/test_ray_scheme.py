"""Ray actors of the user's own: the sender has them join, on one node or several, and says what is wrong."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray_workers import START_TIMEOUT
from torch import nn

import wsync

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_cluster")]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Three raylets."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(2):
        nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, logging_level="error", log_to_driver=False)
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def actors(count: int, *, restarts: int = 0) -> list[Any]:
    class Worker:
        """A user's actor; it knows nothing of wsync."""

        def __init__(self) -> None:
            self.nets = {"policy": nn.Linear(3, 2)}
            self.broken = "no module"

        def act(self) -> list[float]:
            return self.nets["policy"](torch.zeros(3)).tolist()

        def where(self) -> tuple[str, int, bool]:
            return ray.get_runtime_context().get_node_id(), os.getpid(), type(self.nets["policy"]) is nn.Linear

    remote = ray.remote(Worker).options(num_cpus=1, max_restarts=restarts)
    made = [remote.remote() for _ in range(count)]
    ray.get([actor.where.remote() for actor in made], timeout=START_TIMEOUT)  # no timeout of a test is for imports
    return made


@pytest.fixture(scope="module")
def three(cluster: Cluster) -> list[Any]:
    """One actor on each node, until ``test_several_nodes`` ends them: the actors of the tests below need the place."""
    return actors(3)


def test_before_ray_is_initialised() -> None:
    assert not ray.is_initialized(), "this test comes first"
    with pytest.raises(wsync.NotConnected, match=r"ray\.init"):
        wsync.RayWeightSyncScheme().init_on_sender("policy", model=nn.Linear(1, 1), num_workers=1)


def test_process_groups_carry_the_weights_where_there_is_no_shared_memory(three: list[Any]) -> None:
    model = nn.Linear(3, 2)
    with wsync.RayWeightSyncScheme(timeout=60.0, shared_memory=False, inline_bytes=0) as scheme:
        scheme.init_on_sender("nets['policy']", model=model, actors=three)
        scheme.connect()
        assert ray.get([actor.act.remote() for actor in three]) == [pytest.approx(model.bias.tolist())] * 3
        for value in range(2, 6):
            nn.init.constant_(model.bias, value)
            scheme.send()
            assert ray.get([actor.act.remote() for actor in three]) == [[value, value]] * 3


def test_a_second_connect_leaves_connected_actors_alone(three: list[Any]) -> None:
    model = nn.Linear(3, 2)
    with wsync.RayWeightSyncScheme(timeout=None) as scheme:
        scheme.init_on_sender("nets['policy']", model=model, actors=three)
        scheme.connect()
        nn.init.constant_(model.bias, 5)
        scheme.connect()
        assert ray.get([actor.act.remote() for actor in three], timeout=30) == [[5, 5]] * 3


def test_an_actor_that_cannot_join_says_why_at_once(three: list[Any]) -> None:
    with wsync.RayWeightSyncScheme(timeout=60.0) as scheme:
        scheme.init_on_sender("broken", model=nn.Linear(3, 2), actors=three)
        began = time.monotonic()
        with pytest.raises(wsync.WorkerFailed, match=r"(?s)the join failed on worker.*'broken'"):
            scheme.connect()
        assert time.monotonic() - began < 30


def test_several_nodes(three: list[Any]) -> None:
    model = nn.Linear(3, 2)
    path = "nets['policy']"
    with wsync.RayWeightSyncScheme(timeout=60.0) as scheme:
        scheme.init_on_sender(path, model=model, actors=three)
        scheme.connect()
        assert len({node for node, _, _ in ray.get([actor.where.remote() for actor in three])}) == 3
        expected = pytest.approx(model.bias.tolist())
        assert ray.get([actor.act.remote() for actor in three]) == [expected] * 3
        for version in range(2, 30):
            nn.init.constant_(model.bias, version)
            report = scheme.send()
            assert report is not None and dict(report.workers) == dict.fromkeys(range(3), version)
            assert ray.get([actor.act.remote() for actor in three]) == [[version, version]] * 3
        os.kill(ray.get(three[1].where.remote())[1], 9)
        with pytest.raises(wsync.WorkerDied, match="worker 1"):
            for _ in range(100):  # Ray may take a moment to have it killed
                scheme.send()
        nn.init.constant_(model.bias, -1)
        scheme.send()
        assert ray.get([three[0].act.remote(), three[2].act.remote()]) == [[-1, -1]] * 2
    assert ray.get(three[0].where.remote())[2], "the actor's model is its own again"
    for actor in three:
        ray.kill(actor)


def test_an_actor_that_ray_has_started_anew(cluster: Cluster) -> None:
    made = actors(2, restarts=1)
    model = nn.Linear(3, 2)
    with wsync.RayWeightSyncScheme(timeout=60.0) as scheme:
        scheme.init_on_sender("nets['policy']", model=model, actors=made)
        scheme.connect()
        os.kill(ray.get(made[1].where.remote())[1], 9)
        with pytest.raises(wsync.WorkerDied, match="worker 1"):
            for _ in range(100):  # Ray may take a moment to have it killed
                scheme.send()
        nn.init.constant_(model.bias, 5)
        scheme.send()
        with pytest.raises(ValueError, match="process="):
            scheme.readmit(1, multiprocessing.current_process())  # pyright: ignore[reportArgumentType]
        for index in (-1, 2):
            with pytest.raises(ValueError, match="there are workers 0 to 1"):
                scheme.readmit(index)
        scheme.readmit(1)
        assert ray.get(made[1].act.remote()) == [5, 5], "it has what was sent while it was away"
        nn.init.constant_(model.bias, 6)
        report = scheme.send()
        assert report is not None and set(report.workers) == {0, 1}
        assert ray.get([actor.act.remote() for actor in made]) == [[6, 6]] * 2
    for actor in made:
        ray.kill(actor)
