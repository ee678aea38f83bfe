"""Collectors that reach their workers over TCP, RPC or Ray: what every one of them promises, and what is its own."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import cloudpickle
import collecting
import gymnasium
import numpy as np
import pytest
import ray
import stepping
import torch
from collecting import cartpole, check_calling_conventions, chosen, policy, telling, update
from ray_workers import START_TIMEOUT
from stepping import Quiet
from stopping import descendants, ends
from tensordict import TensorDict
from torch import nn

import wsync
from collectors import MultiSyncCollector
from collectors.distributed import (
    DistributedCollector,
    DistributedWeightUpdater,
    RayCollector,
    RPCCollector,
    RPCWeightUpdater,
)

ROOT = Path(__file__).parents[2]
for module in (sys.modules[__name__], collecting, stepping):
    cloudpickle.register_pickle_by_value(module)  # no worker has these files in its path

FAMILIES = {"tcp": DistributedCollector, "rpc": RPCCollector, "ray": RayCollector}
every_family = pytest.mark.parametrize("family", FAMILIES)
every_family_ray_slow = pytest.mark.parametrize("family", ["tcp", "rpc", pytest.param("ray", marks=pytest.mark.slow)])
"""Each test with Ray starts actors, which takes seconds: ``make test`` has those that kill and update them."""


def collect_with(family, *, workers=2, trained=None, env=cartpole, **options):
    options.setdefault("frames_per_batch", 16)
    if family == "ray":
        options.setdefault("timeout", START_TIMEOUT)
    kind = FAMILIES[family] if isinstance(family, str) else family
    return kind([env] * workers, policy() if trained is None else trained, **options)


class Pids(Quiet):
    """Observes the process that it is in."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float64)

    def _observe(self):
        return np.full(4, os.getpid(), np.float64)


def pids_of(batch) -> set[int]:
    return {int(pid) for pid in batch["observation"].unique().tolist()}


@every_family
def test_every_calling_convention_reaches_every_worker(family):
    trained, critic = policy(1.0), nn.Linear(4, 1)
    schemes = {name: wsync.WeightSyncScheme.from_backend("distributed") for name in ("policy", "module.critic")}
    with collect_with(family, trained=trained, weight_sync_schemes=schemes, cat_results="stack") as collector:
        check_calling_conventions(collector, trained, **{"module.critic": critic})
        with pytest.raises(wsync.LayoutMismatch, match="bias"):
            collector.update_policy_weights_(weights_dict={"policy": policy(1.0), "module.critic": nn.Linear(4, 7)})
        assert chosen(next(collector)) == 0.0, "the good half of a refused update was applied"
        collector.update_policy_weights_(policy(1.0), worker_ids=1)
        batch = next(collector)
        assert batch.batch_size == (2, 2, 4)
        assert chosen(batch[0]) == 0.0 and chosen(batch[1]) == 1.0


@pytest.mark.parametrize(
    ("family", "scheme", "first"), [("rpc", "rpc", 0), ("tcp", "multiprocess", 1), ("tcp", "none", 0)]
)
def test_other_schemes_that_it_carries(family, scheme, first):
    schemes = {"policy": wsync.WeightSyncScheme.from_backend(scheme)}
    with collect_with(family, weight_sync_schemes=schemes) as collector:
        before = next(collector)
        collector.update_policy_weights_(policy(-1.0))
        after = next(collector)
    assert before["policy_version"].unique().tolist() == [first] and chosen(before) == 1.0
    updated = scheme != "none"
    assert after["policy_version"].unique().tolist() == [first + updated] and chosen(after) == float(not updated)


@every_family_ray_slow
def test_asynchronous_collection_until_a_worker_is_killed(family):
    """No version goes back, no batch is written again, and the death ends a wait."""
    with collect_with(family, sync=False, frames_per_batch=64, env=Pids) as collector:
        newest, kept = {}, []
        for _ in range(20):
            batch = next(collector)
            assert batch.batch_size == (64,)
            kept.append((batch, batch.clone()))
            (worker,) = pids_of(batch)
            versions = torch.cat([torch.tensor([newest.get(worker, 0)]), batch["policy_version"]])
            assert (versions.diff() >= 0).all()
            newest[worker] = int(versions[-1])
            collector.update_policy_weights_()
        assert max(newest.values()) > 5
        assert all((batch == copy).all() for batch, copy in kept)
        threading.Timer(0.2, os.kill, (next(iter(newest)), signal.SIGKILL)).start()
        with pytest.raises(wsync.WorkerDied, match=r"worker [01] \("):
            while True:
                next(collector)
    assert collector.closed and all(ends(pid) for pid in newest)


@every_family_ray_slow
def test_the_same_seed_collects_what_worker_processes_collect_until_ctrl_c(family):
    """The terminal sends Ctrl-C to all of them; it is the trainer that ends the workers."""

    def begin(kind):
        collector = collect_with(kind, workers=2, frames_per_batch=32)
        assert collector.set_seed(7) == 11
        return collector

    with begin(MultiSyncCollector) as collector:
        expected = torch.cat([next(collector) for _ in range(2)], -1)
    with pytest.raises(KeyboardInterrupt), begin(family) as collector:
        batches = torch.cat([next(collector) for _ in range(2)], -1)
        assert batches.batch_size == (2, 2, 16) and (batches == expected).all()
        assert collector.remote_workers[1].worker_idx == 1
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            next(collector)
    assert collector.closed


@every_family_ray_slow
def test_a_killed_worker_is_named_by_the_update_and_no_other_one_is_left(family):
    with collect_with(family, env=Pids, cat_results="stack") as collector:
        workers = pids_of(next(collector))
        for pid in workers:
            os.kill(pid, signal.SIGINT)  # which none of them minds
        victim = pids_of(next(collector)[1]).pop()
        os.kill(victim, signal.SIGKILL)
        assert ends(victim)
        with pytest.raises(wsync.WorkerDied, match="worker 1"):
            collector.update_policy_weights_()
        assert collector.closed
    assert all(ends(pid) for pid in workers)


def by_worker(batch) -> list[int]:
    """The processes of a synchronous batch, by worker."""
    return [int(pid) for pid in batch["observation"].flatten().unique_consecutive().tolist()]


def until_both(collector, gone) -> list[int]:
    for _ in range(20_000):
        found = by_worker(next(collector))
        assert gone not in found or not collector.failures
        if len(found) == 2 and gone not in found:
            return found
    raise AssertionError("the worker did not come back")


@pytest.mark.parametrize(("family", "victims"), [("tcp", (1, 0)), pytest.param("ray", (1,), marks=pytest.mark.slow)])
def test_a_worker_comes_back_with_the_newest_weights(family, victims):
    with collect_with(family, trained=telling(), env=Pids, on_worker_failure="restart") as collector:
        first = by_worker(next(collector))
        for victim in victims:
            os.kill(first[victim], signal.SIGKILL)
            update(collector, 3)
            second = until_both(collector, first[victim])
            assert second[1 - victim] == first[1 - victim]
            assert next(collector)["told"][..., :3].unique().tolist() == [3]
            update(collector, 4 + victim)
            assert next(collector)["told"][..., :3].unique().tolist() == [4 + victim]
            first = second
        assert collector.failures.failed == collector.failures.restarted == dict.fromkeys(victims, 1)


def test_restart_of_workers_that_cannot_be_restarted_is_refused():
    with pytest.raises(ValueError, match="does not take a member back"):
        collect_with("rpc", on_worker_failure="restart")
    with pytest.raises(ValueError, match="workers that join"):
        collect_with("tcp", on_worker_failure="restart", launcher="join")


SCRIPT = """
import os, sys, torch
import wsync
from collectors import GymEnv
from collectors import distributed
from tensordict.nn import TensorDictModule

class Scores(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

def main():
    if distributed.is_worker():
        sys.exit(distributed.join_trainer())
    assert "ray" not in sys.modules and "collectors.distributed.rpc" not in sys.modules, "imported for nothing"
    collector = distributed.{kind}(
        [lambda: GymEnv("CartPole-v1", 2)] * {workers}, TensorDictModule(Scores(), ["observation"], ["action"]),
        frames_per_batch=16, {options})
    print("versions", next(collector)["policy_version"].unique().tolist(), flush=True)
    collector.update_policy_weights_()
    print("versions", next(collector)["policy_version"].unique().tolist(), flush=True)
    {end}

main()
"""


def script(tmp_path, family, *, workers=2, options="", end="") -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(kind=FAMILIES[family].__name__, workers=workers, options=options, end=end))
    return [str(path)]


def environment(**more) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "family"), [("is killed", "tcp"), ("forgets to shut down", "rpc"), ("is killed", "ray")]
)
def test_workers_end_with_a_trainer_that(how, family, tmp_path, short_path):
    end = "" if how != "is killed" else "for batch in collector: pass"
    with subprocess.Popen(
        [sys.executable, *script(tmp_path, family, workers=1 if family == "ray" else 2, end=end)],
        env=environment(TMPDIR=short_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as trainer:  # fmt: skip
        assert trainer.stdout is not None and trainer.stderr is not None
        assert [trainer.stdout.readline() for _ in range(2)] == ["versions [1]\n", "versions [2]\n"]
        workers = descendants(trainer.pid) if how == "is killed" else {}
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in workers}
        if how == "is killed":
            trainer.kill()
        errors = trainer.stderr.read()
        status = trainer.wait(20)
    assert (status, errors) == (-signal.SIGKILL if how == "is killed" else 0, "")
    # Ray's own, and those that clean up behind them, too
    assert [commands[pid] for pid in workers if not ends(pid, 120.0)] == []
    # A killed process leaves the folder of multiprocessing's fork server.
    assert [name for name in os.listdir(short_path) if not name.startswith("pymp-")] == []


class Starter(logging.Handler):
    """Starts workers, and one with a wrong key, as soon as the trainer says where it listens."""

    COMMAND = (sys.executable, "-c", "from collectors import distributed as d; raise SystemExit(d.join_trainer())")

    def __init__(self):
        super().__init__(logging.INFO)
        self.workers: list[subprocess.Popen] = []
        self.strangers: list[socket.socket] = []

    def emit(self, record):
        address = record.getMessage().split()[2]
        host, port = address.split(":")
        with socket.create_connection((host, int(port))):
            pass  # a stranger, which leaves
        self.strangers = [socket.create_connection((host, int(port))) for _ in range(6)]  # which stay, and say nothing
        env = environment(WSYNC_TRAINER=address)
        stranger = {**env, "WSYNC_AUTHKEY": "guessed"}
        self.refused = subprocess.Popen(self.COMMAND, env=stranger, stderr=subprocess.PIPE, text=True)
        self.workers = [subprocess.Popen(self.COMMAND, env=env) for _ in range(2)]

    def __enter__(self):
        logging.getLogger("collectors").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("collectors").removeHandler(self)
        for worker in (*self.workers, self.refused):
            worker.kill()
            worker.wait()
        for stranger in self.strangers:
            stranger.close()


def test_workers_that_others_start_join(caplog, monkeypatch):
    monkeypatch.setenv("WSYNC_AUTHKEY", "a secret of ours")
    with caplog.at_level("INFO", "collectors"), Starter() as starter:
        with collect_with("tcp", launcher="join", timeout=120) as collector:
            assert chosen(next(collector)) == 1.0
            collector.update_policy_weights_(policy(-1.0))
            batch = next(collector)
            assert chosen(batch) == 0.0 and batch["policy_version"].unique().tolist() == [2]
        assert [worker.wait(10) for worker in starter.workers] == [0, 0]
        assert "key" in starter.refused.communicate(timeout=60)[1] and starter.refused.returncode


@pytest.mark.timeout(30)
def test_a_cluster_that_is_not_there_is_an_error_within_seconds(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConnectionError, match=f"at 127.0.0.1:{port}"):
        collect_with("ray", address=f"127.0.0.1:{port}")


UPDATERS = {
    "tcp": lambda source: DistributedWeightUpdater(None, source, 2, sync=False),
    "rpc": lambda source: RPCWeightUpdater([0, 1], None, [0, 1], source, num_workers=2),
}


@pytest.mark.parametrize("family", UPDATERS)
def test_the_older_apis_updater_pushes_the_weights_that_it_was_made_with(family):
    source = TensorDict.from_module(policy(-1.0)).data
    with pytest.warns(DeprecationWarning, match="older API"):
        updater = UPDATERS[family](source)
    with collect_with(family, weight_updater=updater) as collector:
        assert chosen(next(collector)) == 1.0
        collector.update_policy_weights_()
        report = collector.weight_sync_schemes["policy"].wait_async()
        assert (report is not None) == (family == "tcp"), "a push waits itself, or leaves that to others"
        batch = next(collector)
        assert chosen(batch) == 0.0 and batch["policy_version"].unique().tolist() == [2]
