"""Collectors whose workers are reached over TCP, RPC or Ray: what every one of them promises, and what is its own."""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import wsync
from collectors import GymEnv, MultiSyncCollector
from collectors.distributed import DistributedCollector
from collectors.distributed.tcp_worker import join

ROOT = Path(__file__).parents[2]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # no worker has this file in its path

FAMILIES = {"tcp": DistributedCollector}
every_family = pytest.mark.parametrize("family", FAMILIES)


class Scores(nn.Module):
    """Chooses action 1 always, or 0 always, by the sign of one weight."""

    def __init__(self, sign: float = 1.0):
        super().__init__()
        self.bias = nn.Parameter(torch.tensor([0.0, sign]))
        self.critic = nn.Linear(4, 1)

    def forward(self, observation):
        return self.bias.expand(*observation.shape[:-1], 2)


def policy(sign: float = 1.0) -> TensorDictModule:
    return TensorDictModule(Scores(sign), in_keys=["observation"], out_keys=["action"])


def cartpole():
    return GymEnv("CartPole-v1", 2)


def collect_with(family, *, workers=2, scheme="shared_mem", trained=None, env=cartpole, **options):
    options.setdefault("weight_sync_schemes", {"policy": wsync.WeightSyncScheme.from_backend(scheme)})
    options.setdefault("frames_per_batch", 16)
    kind = FAMILIES[family] if isinstance(family, str) else family
    return kind([env] * workers, policy() if trained is None else trained, **options)


def chosen(batch) -> float:
    return batch["action"].float().argmax(-1).float().mean().item()


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie has)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def ends(pid: int, timeout: float = 15.0) -> bool:
    """Whether the process ends in time: waits for its end, not for a while."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(timeout * 1000))
    finally:
        os.close(descriptor)


class Pids(gymnasium.Env):
    """Observes the process that it is in, and raises when it is told to."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fails_after: int = 10**9) -> None:
        self.left = fails_after

    def _observe(self):
        return np.full(4, os.getpid(), np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(), {}

    def step(self, action):
        self.left -= 1
        if self.left < 0:
            raise ArithmeticError("the cart fell off the table")
        return self._observe(), 0.0, False, False, {}


def pids_of(batch) -> set[int]:
    return {int(pid) for pid in batch["observation"].unique().tolist()}


@every_family
def test_every_calling_convention_reaches_every_worker(family):
    trained = policy(1.0)
    with collect_with(family, trained=trained) as collector:
        assert chosen(next(collector)) == 1.0
        calls = [
            lambda: collector.update_policy_weights_(),
            lambda: collector.update_policy_weights_(trained),
            lambda: collector.update_policy_weights_(TensorDict.from_module(trained)),
            lambda: collector.update_policy_weights_(policy=trained),
            lambda: collector.update_policy_weights_(weights=trained.state_dict(), model_id="policy"),
            lambda: collector.update_policy_weights_(weights_dict={"policy": trained}),
        ]
        for number, call in enumerate(calls, start=2):
            with torch.no_grad():
                trained.module.bias.neg_()
            before = next(collector)
            assert chosen(before) == float(number % 2 == 0), "training alone must reach nobody"
            call()
            after = next(collector)
            assert chosen(after) == float(number % 2 == 1)
            assert after["policy_version"].unique().tolist() == [number]


@every_family
def test_workers_and_models_apart_and_together(family):
    schemes = {name: wsync.WeightSyncScheme.from_backend("multiprocess") for name in ("policy", "module.critic")}
    with collect_with(family, weight_sync_schemes=schemes, cat_results="stack") as collector:
        collector.update_policy_weights_(policy(-1.0), model_id="policy", worker_ids=1)
        batch = next(collector)
        assert batch.batch_size == (2, 2, 4)
        assert chosen(batch[0]) == 1.0 and chosen(batch[1]) == 0.0
        assert batch["policy_version"][:, 0, 0].tolist() == [1, 2]
        with pytest.raises(wsync.LayoutMismatch, match="bias"):
            collector.update_policy_weights_(weights_dict={"policy": policy(1.0), "module.critic": nn.Linear(4, 7)})
        assert chosen(next(collector)[1]) == 0.0, "the good half of a refused update was applied"


@every_family
def test_asynchronous_collection_never_goes_back_in_version_and_never_writes_a_batch_again(family):
    with collect_with(family, sync=False, frames_per_batch=64) as collector:
        newest, kept = 0, []
        for _ in range(20):
            batch = next(collector)
            assert batch.batch_size == (2, 32)
            kept.append((batch, batch.clone()))
            assert (batch["policy_version"].diff(dim=-1) >= 0).all()
            newest = max(newest, int(batch["policy_version"].max()))
            collector.update_policy_weights_()
        assert newest > 5
        assert all((batch == copy).all() for batch, copy in kept)


@every_family
def test_the_same_seed_collects_what_worker_processes_collect(family):
    def run(kind):
        with collect_with(kind, total_frames=64) as collector:
            assert collector.set_seed(7) == 11
            return torch.cat(list(collector), -1)

    expected, batches = run(MultiSyncCollector), run(family)
    assert batches.batch_size == (4, 16)
    assert (batches == expected).all()


@every_family
def test_an_environment_that_raises_is_an_error_with_its_traceback(family):
    collector = collect_with(family, env=lambda: Pids(fails_after=12), sync=False)
    workers = set()
    with pytest.raises(wsync.WorkerFailed, match=r"worker [01] failed:(.|\n)*the cart fell off the table"):
        while True:
            workers |= pids_of(next(collector))
    assert collector.closed and all(ends(pid) for pid in workers)
    with pytest.raises(RuntimeError, match="shut down"):
        next(collector)


def explode():
    raise ArithmeticError("no such table")


@every_family
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(env=explode), wsync.WorkerFailed, "no such table"),
        (dict(trained=threading.Lock()), TypeError, "policy cannot be sent to a worker"),
        (dict(weight_sync_schemes={"polcy": wsync.SharedMemWeightSyncScheme()}), wsync.WorkerFailed, "polcy"),
    ],
)
def test_bad_arguments_are_clear_errors_and_leave_nothing(family, arguments, error, message):
    started = time.monotonic()
    with pytest.raises(error, match=message):
        collect_with(family, **arguments)
    assert time.monotonic() - started < 20
    with collect_with(family) as collector:  # and the next one works
        assert next(collector).numel() == 16


@every_family
def test_a_killed_worker_is_named_by_the_update_and_by_the_batch(family):
    with collect_with(family, env=Pids, cat_results="stack") as collector:
        victim = pids_of(next(collector)[1]).pop()
        os.kill(victim, signal.SIGKILL)
        assert ends(victim)
        with pytest.raises(wsync.WorkerDied, match="worker 1"):
            collector.update_policy_weights_()
        collector.update_policy_weights_()  # the other one goes on
        started = time.monotonic()
        with pytest.raises(wsync.WorkerDied, match="worker 1"):
            next(collector)
        assert time.monotonic() - started < 10


@every_family
def test_a_worker_killed_in_the_middle_ends_the_wait(family):
    with collect_with(family, env=Pids, sync=False, frames_per_batch=512) as collector:
        victim = pids_of(next(collector)).pop()
        threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
        with pytest.raises(wsync.WorkerDied, match=r"worker [01]"):
            while True:
                next(collector)


@every_family
def test_rounds_of_start_and_stop_leave_nothing(family):
    def count():
        gc.collect()
        with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
            children = len(file.read().split())
        return threading.active_count(), len(os.listdir("/proc/self/fd")), children, len(os.listdir("/dev/shm"))

    def round_of(sync):
        with collect_with(family, env=Pids, sync=sync) as collector:
            workers = pids_of(next(collector))
            collector.update_policy_weights_()
            next(collector)
        collector.shutdown()
        assert all(ends(pid, 5) for pid in workers)

    round_of(sync=True)
    before = count()
    for sync in (True, False, True):
        round_of(sync)
    assert count() == before


@every_family
def test_ctrl_c_ends_the_trainers_wait_and_then_the_workers(family):
    """The terminal sends it to all of them; it is the trainer that ends the workers."""
    with pytest.raises(KeyboardInterrupt), collect_with(family, env=Pids, frames_per_batch=4096) as collector:
        workers = pids_of(next(collector))
        for pid in workers:
            os.kill(pid, signal.SIGINT)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        while True:
            next(collector)
    assert collector.closed and all(ends(pid) for pid in workers)


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
    collector = distributed.{kind}(
        [lambda: GymEnv("CartPole-v1", 2)] * 2, TensorDictModule(Scores(), ["observation"], ["action"]),
        frames_per_batch=16, {options})
    print("versions", next(collector)["policy_version"].unique().tolist(), flush=True)
    collector.update_policy_weights_()
    print("versions", next(collector)["policy_version"].unique().tolist(), flush=True)
    {end}

main()
"""


def script(tmp_path, family, *, options="", end="") -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(kind=FAMILIES[family].__name__, options=options, end=end))
    return [str(path)]


def environment(**more) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def descendants(pid: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found |= {child} | descendants(child)
    return found


@every_family
@pytest.mark.parametrize("how", ["forgets to shut down", "is killed"])
def test_workers_end_with_a_trainer_that(how, family, tmp_path):
    if family == "tcp" and how != "is killed":
        pytest.skip("test_torchrun_… does")
    end = "" if how != "is killed" else "for batch in collector: pass"
    with subprocess.Popen(
        [sys.executable, *script(tmp_path, family, end=end)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None and trainer.stderr is not None
        assert [trainer.stdout.readline() for _ in range(2)] == ["versions [1]\n", "versions [2]\n"]
        workers = descendants(trainer.pid) if how == "is killed" else set()
        if how == "is killed":
            trainer.kill()
        errors = trainer.stderr.read()
        status = trainer.wait(20)
    assert (status, errors) == (-signal.SIGKILL if how == "is killed" else 0, "")
    assert all(ends(pid) for pid in workers)


# --- TCP ---


class Starter(logging.Handler):
    """Starts workers, and one with a wrong key, as soon as the trainer says where it listens."""

    COMMAND = (sys.executable, "-c", "from collectors import distributed as d; raise SystemExit(d.join_trainer())")

    def __init__(self):
        super().__init__(logging.INFO)
        self.workers: list[subprocess.Popen] = []
        self.refusals = ThreadPoolExecutor(1)

    def emit(self, record):
        address = record.getMessage().split()[2]
        host, port = address.split(":")
        with socket.create_connection((host, int(port))):
            pass  # a stranger, who says nothing
        self.refused = self.refusals.submit(join, (host, int(port)), b"guessed", -1, 5.0)
        env = environment(WSYNC_TRAINER=address)
        self.workers = [subprocess.Popen(self.COMMAND, env=env) for _ in range(2)]

    def __enter__(self):
        logging.getLogger("collectors").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("collectors").removeHandler(self)
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.refusals.shutdown()


def test_workers_that_others_start_join(caplog, monkeypatch):
    monkeypatch.setenv("WSYNC_AUTHKEY", "a secret of ours")
    with caplog.at_level("INFO", "collectors"), Starter() as starter:
        with collect_with("tcp", launcher="join", timeout=40) as collector:
            assert chosen(next(collector)) == 1.0
            collector.update_policy_weights_(policy(-1.0))
            batch = next(collector)
            assert chosen(batch) == 0.0 and batch["policy_version"].unique().tolist() == [2]
        assert [worker.wait(10) for worker in starter.workers] == [0, 0]
        with pytest.raises(wsync.NotConnected, match="another key"):
            starter.refused.result(10)


def test_who_does_not_join_is_named(monkeypatch):
    monkeypatch.setenv("WSYNC_AUTHKEY", "a secret of ours")
    with pytest.raises(wsync.SyncTimeout, match=r"worker\(s\) 0, 1 did not join within 0.2 s"):
        collect_with("tcp", launcher="join", timeout=0.2)
    monkeypatch.delenv("WSYNC_AUTHKEY")
    with pytest.raises(ValueError, match="WSYNC_AUTHKEY"):
        collect_with("tcp", launcher="join", timeout=0.2)
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:0"):
        collect_with("tcp", host="192.0.2.1")


def test_torchrun_makes_a_trainer_and_its_workers(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*command, *script(tmp_path, "tcp", options="launcher='join'")],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["versions [1]", "versions [2]"]
