"""Collectors that reach their workers over TCP, RPC or Ray: what every one of them promises, and what is its own."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import cloudpickle
import collecting
import gymnasium
import numpy as np
import pytest
import ray
import torch
from collecting import cartpole, check_calling_conventions, chosen, policy
from forking import fork_idle_child, idle_child
from listening import LOOPBACK_6, listening
from ray_workers import START_TIMEOUT
from stopping import ends
from tensordict import TensorDict
from torch import nn
from torch.distributed import rpc

import wsync
from collectors import GymEnv, MultiSyncCollector
from collectors.distributed import (
    DistributedCollector,
    DistributedWeightUpdater,
    RayCollector,
    RPCCollector,
    RPCWeightUpdater,
    tcp_worker,
)
from collectors.workers.connections import Address
from collectors.workers.processes import SHUTDOWN_GRACE
from wsync import listen_on
from wsync.testing.workers import stop_process

ROOT = Path(__file__).parents[2]
for module in (sys.modules[__name__], collecting):
    cloudpickle.register_pickle_by_value(module)  # no worker has these files in its path

FAMILIES = {"tcp": DistributedCollector, "rpc": RPCCollector, "ray": RayCollector}
every_family = pytest.mark.parametrize("family", FAMILIES)
every_family_ray_slow = pytest.mark.parametrize("family", ["tcp", "rpc", pytest.param("ray", marks=pytest.mark.slow)])
"""Each test with Ray starts actors, which takes seconds: ``make test`` has those that kill and update them."""


def collect_with(family, *, workers=2, workers_of=None, trained=None, env=cartpole, **options):
    if workers_of is not None:
        options["workers"] = workers_of
    options.setdefault("frames_per_batch", 16)
    if family == "ray":
        options.setdefault("timeout", START_TIMEOUT)
    kind = FAMILIES[family] if isinstance(family, str) else family
    return kind([env] * workers, policy() if trained is None else trained, **options)


@every_family_ray_slow
def test_workers_end_when_their_collector_is_garbage_collected(family):
    collector = collect_with(family)
    next(collector)
    left = weakref.ref(collector)
    del collector
    gc.collect()
    assert left() is None and not multiprocessing.active_children()


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


@every_family
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
def test_an_environment_that_raises_is_an_error_with_its_traceback(family):
    with collect_with(family, env=lambda: Pids(fails_after=12), sync=False) as collector:
        workers = set()
        with pytest.raises(wsync.WorkerFailed, match=r"worker [01] failed:(.|\n)*the cart fell off the table"):
            while True:
                workers |= pids_of(next(collector))
        assert collector.closed and all(ends(pid) for pid in workers)
        with pytest.raises(RuntimeError, match="shut down"):
            next(collector)


def explode():
    raise ArithmeticError("no such table")


@every_family_ray_slow
def test_a_worker_that_cannot_be_built_is_an_error_and_nothing_is_left(family):
    with pytest.raises(TypeError, match="policy cannot be sent to a worker"):
        collect_with(family, trained=threading.Lock().acquire)
    with pytest.raises(wsync.WorkerFailed, match=r"worker 0 failed:(.|\n)*no such table"):
        collect_with(family, env=explode, workers=1)


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


@pytest.mark.slow
@every_family
def test_rounds_of_start_and_stop_leave_nothing(family):
    def count():
        gc.collect()
        children = len(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())
        return threading.active_count(), len(os.listdir("/proc/self/fd")), children

    def round_of(sync):
        with collect_with(family, env=Pids, workers=1, sync=sync) as collector:
            workers = pids_of(next(collector))
            collector.update_policy_weights_()
            next(collector)
        collector.shutdown()
        assert all(ends(pid, 5) for pid in workers)

    round_of(sync=True)
    before = count()
    for sync in (False,) if family == "ray" else (True, False):  # with an actor a round takes seconds
        round_of(sync)
    assert count() == before


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


def descendants(pid: int) -> set[int]:
    found = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found |= {child} | descendants(child)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "family"),
    [("is killed", "tcp"), ("forgets to shut down", "rpc"), ("is killed", "ray")],
)
def test_workers_end_with_a_trainer_that(how, family, tmp_path, short_path):
    end = "" if how != "is killed" else "for batch in collector: pass"
    with subprocess.Popen(
        [sys.executable, *script(tmp_path, family, workers=1 if family == "ray" else 2, end=end)],
        env=environment(TMPDIR=short_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None and trainer.stderr is not None
        assert [trainer.stdout.readline() for _ in range(2)] == ["versions [1]\n", "versions [2]\n"]
        workers = descendants(trainer.pid) if how == "is killed" else set()
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in workers}
        if how == "is killed":
            trainer.kill()
        errors = trainer.stderr.read()
        status = trainer.wait(20)
    assert (status, errors) == (-signal.SIGKILL if how == "is killed" else 0, "")
    # Ray's own, and those that clean up behind them, too
    assert [commands[pid] for pid in workers if not ends(pid, 120.0)] == []
    assert how == "is killed" or os.listdir(short_path) == []


# --- TCP ---


class Starter(logging.Handler):
    """Starts workers, and one with a wrong key, as soon as the trainer says where it listens."""

    COMMAND = (sys.executable, "-c", "from collectors import distributed as d; raise SystemExit(d.join_trainer())")

    def __init__(self):
        super().__init__(logging.INFO)
        self.workers: list[subprocess.Popen] = []
        self.strangers: list[socket.socket] = []
        self.refusals = ThreadPoolExecutor(1)

    def emit(self, record):
        address = record.getMessage().split()[2]
        host, port = address.split(":")
        with socket.create_connection((host, int(port))):
            pass  # a stranger, which leaves
        self.strangers = [socket.create_connection((host, int(port))) for _ in range(6)]  # which stay, and say nothing
        self.refused = self.refusals.submit(tcp_worker.join, Address(host, int(port), b"guessed"), -1, 5.0)
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
        for stranger in self.strangers:
            stranger.close()
        self.refusals.shutdown()


@pytest.mark.parametrize("family", ["tcp", "rpc"])
@pytest.mark.parametrize("host", ["127.0.0.7", "::1"])
def test_other_addresses(family, host):
    try:
        listen_on(host).close()
    except wsync.NotConnected as error:
        pytest.skip(f"this machine has no {host}: {error}")
    before = listening()
    with collect_with(family, host=host) as collector:
        assert all(place.endswith("7F") or place == LOOPBACK_6 for place in listening() - before)
        next(collector)
        collector.update_policy_weights_(policy(-1.0))
        assert chosen(next(collector)) == 0.0


def test_workers_that_others_start_join(caplog, monkeypatch):
    monkeypatch.setenv("WSYNC_AUTHKEY", "a secret of ours")
    with caplog.at_level("INFO", "collectors"), Starter() as starter:
        with collect_with("tcp", launcher="join", timeout=120) as collector:
            assert chosen(next(collector)) == 1.0
            collector.update_policy_weights_(policy(-1.0))
            batch = next(collector)
            assert chosen(batch) == 0.0 and batch["policy_version"].unique().tolist() == [2]
        assert [worker.wait(10) for worker in starter.workers] == [0, 0]
        with pytest.raises(wsync.NotConnected, match="another key"):
            starter.refused.result(10)


class Joiner(logging.Handler):
    """Starts one worker, as another program would, as soon as the trainer says where it listens."""

    def __init__(self):
        super().__init__(logging.INFO)

    def emit(self, record):
        host, port = record.getMessage().split()[2].split(":")
        address = Address(host, int(port), os.environ["WSYNC_AUTHKEY"].encode())
        context = multiprocessing.get_context("forkserver")
        self.worker = context.Process(target=tcp_worker.join, args=(address, -1, 60.0))
        self.worker.start()


def collect_by_joining(env):
    """A collector and its worker, which has joined it."""
    logger, joiner = logging.getLogger("collectors"), Joiner()
    logger.setLevel("INFO")
    logger.addHandler(joiner)
    try:
        return collect_with("tcp", workers=1, launcher="join", env=env, worker_timeout=20.0), joiner.worker
    finally:
        logger.removeHandler(joiner)
        logger.setLevel("NOTSET")


class Forking(Pids):
    """Its first observation is the process that it has forked, which stays."""

    def __init__(self):
        super().__init__()
        self.child = fork_idle_child()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.full(4, self.child, np.float64), {}


class Unending(Pids):
    def close(self):
        threading.Event().wait()


def test_a_worker_that_has_joined_and_does_not_end_in_time_after_a_shutdown_has_not_failed(monkeypatch):
    monkeypatch.setenv("WSYNC_AUTHKEY", "a secret of ours")
    monkeypatch.setattr("collectors.workers.processes.SHUTDOWN_GRACE", 0.1)
    collector, worker = collect_by_joining(Unending)
    collector.shutdown()
    worker.join(20)
    assert worker.exitcode == 0


def test_a_worker_that_has_joined_and_dies_is_noticed_while_its_forked_child_lives(monkeypatch):
    monkeypatch.setenv("WSYNC_AUTHKEY", "a secret of ours")
    monkeypatch.setattr("collectors.workers.processes.SHUTDOWN_GRACE", 0.5)  # for messages that are on their way
    collector, worker = collect_by_joining(Forking)
    with collector:
        children = pids_of(next(collector)) - {worker.pid}
        try:
            worker.kill()
            with pytest.raises(wsync.WorkerDied, match=rf"process {worker.pid} .*is gone"):
                next(collector)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)


@every_family
def test_a_timeout_may_be_weeks(family):
    with collect_with(family, workers=1, worker_timeout=3e6, timeout=3e6) as collector:
        next(collector)


def test_a_worker_that_dies_is_noticed_at_once_while_its_forked_child_lives(monkeypatch):
    monkeypatch.setattr("collectors.workers.processes.SHUTDOWN_GRACE", 600.0)
    with MultiSyncCollector([lambda: GymEnv(Forking())], policy(), frames_per_batch=16) as collector:
        (victim,) = [worker.process for worker in collector.remote_workers]
        children = pids_of(next(collector)) - {victim.pid}
        try:
            victim.kill()
            with pytest.raises(wsync.WorkerDied, match="died with exit code -9"):
                next(collector)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)


def trainer_that_is_killed(pids):
    """A trainer that is killed while a forked child of it goes on running."""
    os.environ["WSYNC_AUTHKEY"] = "a secret of ours"
    collector, worker = collect_by_joining(cartpole)
    next(collector)
    pids.send((worker.pid, fork_idle_child()))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_has_joined_ends_with_its_trainer_while_the_trainers_forked_child_lives():
    reading, writing = multiprocessing.Pipe()
    trainer = multiprocessing.get_context("forkserver").Process(target=trainer_that_is_killed, args=(writing,))
    trainer.start()
    pids = worker, _ = reading.recv()
    try:
        trainer.join()
        assert ends(worker)
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_workers_that_do_not_join_are_named(monkeypatch):
    monkeypatch.setenv("WSYNC_AUTHKEY", "a secret of ours")
    with pytest.raises(wsync.SyncTimeout, match=r"worker\(s\) 0, 1 did not join within 0.2 s"):
        collect_with("tcp", launcher="join", timeout=0.2)
    monkeypatch.delenv("WSYNC_AUTHKEY")
    with pytest.raises(ValueError, match="WSYNC_AUTHKEY"):
        collect_with("tcp", launcher="join", timeout=0.2)


@pytest.mark.parametrize("family", ["tcp", "rpc"])
@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("192.0.2.1", r"cannot listen on host=192\.0\.2\.1"),
        ("", "host is empty"),
        ("0.0.0.0", r"host=0\.0\.0\.0 is every interface"),
        ("::", "host=:: is every interface"),
    ],
)
def test_listening_on_every_interface_or_a_missing_one_is_refused(family, host, said):
    with pytest.raises(wsync.NotConnected, match=said):
        collect_with(family, host=host, timeout=20.0, weight_sync_schemes={})  # no scheme to refuse it


class Dripper(logging.Handler):
    """A stranger that says half a word, and never ends."""

    def emit(self, record):
        host, port = record.getMessage().split()[2].split(":")
        self.stranger = socket.create_connection((host, int(port)))
        self.stranger.sendall(b"\0\0\0\xff")  # so many bytes are to follow
        threading.Thread(target=self.drip, daemon=True).start()

    def drip(self):
        pause = threading.Event()
        with suppress(OSError), self.stranger:  # until it is hung up on
            while not pause.wait(0.3):
                self.stranger.sendall(b"x")


def test_a_stranger_does_not_put_the_deadline_off(caplog, monkeypatch):
    monkeypatch.setenv("WSYNC_AUTHKEY", "a secret of ours")
    dripper, log = Dripper(logging.INFO), logging.getLogger("collectors")
    log.addHandler(dripper)
    try:
        with caplog.at_level("INFO", "collectors"), pytest.raises(wsync.SyncTimeout, match="did not join within 1 s"):
            collect_with("tcp", launcher="join", timeout=1)
    finally:
        log.removeHandler(dripper)


@pytest.mark.slow
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


def test_a_rank_0_that_is_not_there_is_an_error_that_says_where(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as released:
        port = released.getsockname()[1]
    said = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(wsync.NotConnected, match=rf"rank 1: the store at 127\.0\.0\.1 port {port}"):
        tcp_worker.look_up(0.5)


# --- RPC ---


def test_workers_end_at_once_while_a_forked_child_of_their_trainer_lives():
    collector = collect_with("rpc")
    with idle_child():
        began = time.monotonic()
        collector.shutdown()
        assert time.monotonic() - began < SHUTDOWN_GRACE


def member(rank, path):
    """A process of the user's own, in an RPC group of the user's own."""
    os.environ |= {"TP_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", rpc_timeout=30)
    rpc.init_rpc(f"mine{rank}", rank=rank, world_size=3, rpc_backend_options=options)
    if rank:
        threading.Event().wait()


def still_at_work() -> int:
    """Threads that are a collector's worker, and do not end."""
    threads = [thread for thread in threading.enumerate() if thread.name == "collector-worker"]
    for thread in threads:
        while not join(thread, 5.0):
            os.sched_yield()
    return sum(thread.is_alive() for thread in threads)


def join(thread: threading.Thread, timeout: float) -> bool:
    """Join a thread; False if it is listed but not started yet (``ident`` is set before ``join`` is allowed)."""
    try:
        thread.join(timeout)
    except RuntimeError:
        return False
    return True


@pytest.mark.filterwarnings("ignore:You are using a Backend")
def test_workers_of_a_group_that_there_is_already(tmp_path, monkeypatch):
    for name in ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "lo")
    monkeypatch.setattr(rpc, "_init_counter", 0)  # torch puts it into every key, and the others have counted nothing
    with pytest.raises(RuntimeError, match=r"init_rpc\(\) first"):
        collect_with("rpc", workers_of=["mine1", "mine2"])
    context = multiprocessing.get_context("forkserver")
    others = [context.Process(target=member, args=(rank, tmp_path / "group"), daemon=True) for rank in (1, 2)]
    for other in others:
        other.start()
    member(0, tmp_path / "group")
    try:
        gc.collect()  # closes what earlier tests have left
        descriptors = len(os.listdir("/proc/self/fd"))
        with pytest.raises(RuntimeError, match="belongs to an RPC group already"):
            collect_with("rpc")
        assert len(os.listdir("/proc/self/fd")) == descriptors
        with pytest.raises(RuntimeError, match="absent"):
            collect_with("rpc", workers_of=["mine1", "absent"])
        with pytest.raises(ValueError, match="one twice: mine1, mine1"):
            collect_with("rpc", workers_of=["mine1", "mine1"])
        assert rpc.rpc_sync("mine1", still_at_work) == 0, "a graceful rpc.shutdown() would wait for it for ever"
        stop_process(others[1].pid)
        with pytest.raises(wsync.SyncTimeout, match=r"^worker 1 \('mine2' of the RPC group\): did not answer") as late:
            collect_with("rpc", workers_of=["mine1", "mine2"], timeout=0.5)
        assert set(late.value.workers) == {1}
        os.kill(others[1].pid, signal.SIGCONT)
        assert [rpc.rpc_sync(name, still_at_work) for name in ("mine1", "mine2")] == [0, 0]
        for _ in range(2):
            with collect_with("rpc", workers_of=["mine1", "mine2"], env=Pids) as collector:
                assert pids_of(next(collector)) == {other.pid for other in others}
                collector.update_policy_weights_()
                assert next(collector)["policy_version"].unique().tolist() == [2]
        breaking = [Pids, partial(Pids, 10)]
        names = ["mine1", "mine2"]
        with RPCCollector(breaking, policy(), frames_per_batch=8, workers=names, on_worker_failure="drop") as collector:
            while not collector.failures:
                next(collector)
            assert rpc.rpc_sync("mine2", still_at_work) == 0, "it is dropped, and keeps no rpc.shutdown() waiting"
        assert all(other.is_alive() for other in others), "they are not ours to end"
        with collect_with("rpc", workers_of=["mine1", "mine2"], sync=False) as collector:
            next(collector)
            others[1].kill()
            with pytest.raises(wsync.WorkerDied, match=r"worker 1 \('mine2'"):
                while True:
                    next(collector)
        with pytest.raises(wsync.WorkerDied, match=r"^worker 1 \('mine2' of the RPC group\)"):
            collect_with("rpc", workers_of=["mine1", "mine2"])
    finally:
        for other in others:
            other.kill()
            other.join()
        rpc.shutdown(graceful=False)


# --- Ray ---


@pytest.mark.timeout(30)
def test_a_cluster_that_is_not_there_is_an_error_within_seconds(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConnectionError, match=f"at 127.0.0.1:{port}"):
        collect_with("ray", address=f"127.0.0.1:{port}")


def test_actors_that_have_no_place_are_named(cluster):
    with pytest.raises(wsync.SyncTimeout, match=r"worker\(s\) 0, 1 had no place.*'num_cpus': 64"):
        collect_with("ray", resources={"num_cpus": 64}, timeout=0.5)
    with pytest.raises(ConnectionError, match=r"connected to the Ray cluster at .*, not at 10\.0\.0\.1:6379"):
        collect_with("ray", address="10.0.0.1:6379")


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
