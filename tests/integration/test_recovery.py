"""Workers that die, stall, raise and come back, in collectors with worker processes: real kills, real processes."""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import signal
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn

import wsync
from collectors import GymEnv, MultiAsyncCollector, MultiSyncCollector
from wsync.sending.transactions import Transaction
from wsync.testing.shutdowns import shared_memory_files
from wsync.testing.workers import stop_process

KINDS = {"sync": MultiSyncCollector, "async": MultiAsyncCollector}
every_kind = pytest.mark.parametrize("kind", KINDS)


class Telling(nn.Module):
    """Its action is 0; it writes down the version that its weight, buffer and extra state are of, and its process."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("mark", torch.zeros(1))
        self.note = 0
        self.critic = nn.Linear(4, 1)

    def become(self, value: int) -> Telling:
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.fill_(value)
        self.note = value
        return self

    def get_extra_state(self) -> int:
        return self.note

    def set_extra_state(self, state: int) -> None:
        if state == -13:
            raise ArithmeticError("-13 is refused")
        self.note = state

    def forward(self, observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        size = observation.shape[:-1]
        told = torch.tensor([self.weight.item(), self.mark.item(), self.note, os.getpid()], dtype=torch.float64)
        return torch.zeros(size, dtype=torch.int64), told.expand(*size, 4)


def policy() -> TensorDictModule:
    return TensorDictModule(Telling().become(1), in_keys=["observation"], out_keys=["action", "told"])


class Still(gymnasium.Env):
    """Nothing happens, until a file says what: each line but the last is taken by one worker, once.

    ``raise`` raises, ``die`` kills its process, ``stop`` stops it.
    """

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        return np.full(4, -1 if seed is None else seed, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        what = take(self.folder)
        if what == "raise":
            raise ArithmeticError("the cart fell off the table")
        if what:
            os.kill(os.getpid(), {"die": signal.SIGKILL, "stop": signal.SIGSTOP}[what])
        return np.zeros(4, np.float32), 0.0, False, False, {}


def take(folder: Path) -> str:
    """What is to happen, if anything is: no other caller gets the same."""
    for name in os.listdir(folder):
        try:
            os.rename(folder / name, folder.with_suffix(f".{name}.{os.getpid()}"))
        except FileNotFoundError:
            continue  # another worker was faster
        return name.partition("-")[0]
    return ""


@pytest.fixture
def events(tmp_path: Path) -> Path:
    folder = tmp_path / "events"
    folder.mkdir()
    return folder


def collect(kind: str, events: Path, failure: str = "restart", *, workers: int = 2, **options: Any) -> Any:
    options.setdefault("frames_per_batch", 16)
    maker = options.pop("maker", lambda: GymEnv(Still(events)))
    return KINDS[kind]([maker] * workers, policy(), on_worker_failure=failure, **options)


def told(batch: TensorDictBase, what: str) -> set[int]:
    index = ("weight", "mark", "note", "pid").index(what)
    return set(batch["told"][..., index].flatten().int().tolist())


def kill(collector: Any, worker_idx: int, how: signal.Signals = signal.SIGKILL) -> int:
    """Kill a worker; its process."""
    (victim,) = [worker.process for worker in collector.remote_workers if worker.worker_idx == worker_idx]
    pid = victim.pid
    if how is signal.SIGSTOP:
        stop_process(pid)
        return pid
    end = os.pidfd_open(pid)  # other code may close the process object
    try:
        os.kill(pid, how)
        if how is signal.SIGKILL:
            assert wait([end], 10)
    finally:
        os.close(end)
    return pid


def update(collector: Any, value: int) -> None:
    collector.policy.module.become(value)
    collector.update_policy_weights_()


def next_without(gone: set[int], collector: Any) -> Any:
    """The next batch in which none of these processes has acted; two that each had finished may come before it."""
    for _ in range(2 * len(gone)):
        if not told(batch := next(collector), "pid") & gone:
            return batch
    return next(collector)


def until_there(collector: Any, workers: int, sync: bool, versions: dict[int, int] | None = None) -> Any:
    """Batches, until so many workers are there, and each has delivered: in one batch, or one after the other."""
    seen: set[int] = set()
    for _ in range(3000):
        batch = next(collector)
        note(batch, {} if versions is None else versions)
        seen = told(batch, "pid") if sync else seen | told(batch, "pid")
        pids = {worker.process.pid for worker in collector.remote_workers}
        if len(pids) == workers and pids <= seen:
            return batch
    raise AssertionError(f"there are still only {seen}")


def note(batch: TensorDictBase, newest: dict[int, int]) -> None:
    """Check the versions of a batch, by process: they never go back."""
    rows = torch.stack([batch["told"][..., 3].flatten(), batch["policy_version"].flatten().double()], 1)
    for pid in rows[:, 0].unique().tolist():
        mine = rows[rows[:, 0] == pid, 1]
        assert mine.diff().ge(0).all() and mine[0] >= newest.get(int(pid), 0)
        newest[int(pid)] = int(mine[-1])


@every_kind
def test_raise_is_what_it_was(kind, events):
    with collect(kind, events, "raise") as collector:
        next(collector)
        kill(collector, 1)
        with pytest.raises(wsync.WorkerDied, match="worker 1"):
            for _ in range(9):
                next(collector)
        assert collector.closed and collector.failures.failed == {1: 1}


@every_kind
def test_drop_continues_until_no_worker_is_left(kind, events, caplog):
    with collect(kind, events, "drop", total_frames=400) as collector:
        next(collector)
        pid = kill(collector, 0)
        update(collector, 2)
        batches = [next_without({pid}, collector), *(next(collector) for _ in range(2))]
        assert [batch.numel() for batch in batches] == [8 if kind == "sync" else 16] * 3
        assert told(batches[-1], "weight") == {2}
        assert collector.failures.as_dict() == {"failed": {"0": 1}, "dropped": {"0": 1}, "restarted": {}}
        with pytest.raises(wsync.WorkerDied, match="dropped"):
            collector.update_policy_weights_(worker_ids=0)
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "worker 0" in caplog.text and "dropped" in caplog.text
        total = collector.frames
        rest = list(collector)
        assert collector.frames == total + sum(batch.numel() for batch in rest) >= 400
        collector.total_frames = -1
        kill(collector, 1)
        with pytest.raises(wsync.WorkerDied, match="no worker is left"):
            for _ in range(4):
                next(collector)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("index", [int, np.int64, torch.tensor])
def test_weights_of_its_own_reach_each_worker_that_is_left(index, several, events):
    schemes = {name: wsync.SharedMemWeightSyncScheme() for name in ("policy", "module.critic")[: 1 + several]}
    with collect("sync", events, "drop", weight_sync_schemes=schemes) as collector:
        next(collector)
        for value in (2, 3):  # the first finds worker 1 dead, the second knows it
            if value == 2:
                kill(collector, 1)
            mine = policy()
            mine.module.become(value)
            weights = {index(0): mine, index(1): policy()}
            if several:
                critics = {index(worker): nn.Linear(4, 1) for worker in (0, 1)}
                both = {"policy": weights, "module.critic": critics}
                collector.update_policy_weights_(weights_dict=both, worker_ids=[0, 1])
            else:
                collector.update_policy_weights_(weights, worker_ids=[0, 1])
            assert told(next(collector), "weight") == {value}
        assert collector.failures.dropped == {1: 1}


@pytest.mark.parametrize(("workers", "acting"), [(2, [{2}, {2}]), (3, [{2}, {2}, {1}])])
def test_an_update_that_names_a_worker_that_is_being_restarted_reaches_its_replacement(workers, acting, events):
    with collect("sync", events, workers=workers, frames_per_batch=24) as collector:
        next(collector)
        kill(collector, 1)
        while not collector.failures:
            next(collector)
        collector.policy.module.become(2)
        collector.update_policy_weights_(worker_ids=[0, 1])
        batch = until_there(collector, workers, sync=True)
        assert [told(one, "weight") for one in batch.unbind(0)] == acting


@every_kind
@pytest.mark.parametrize("what", ["die", "raise"])
def test_a_worker_that_fails_within_a_batch_comes_back(kind, what, events, caplog):
    with collect(kind, events) as collector:
        first = until_there(collector, 2, kind == "sync")
        before = collector.frames
        update(collector, 2)
        (events / what).touch()
        frames = 0
        while not collector.failures:
            batch = next(collector)
            frames += batch.numel()
        update(collector, 3)
        batch = until_there(collector, 2, kind == "sync")
        assert told(batch, "pid") != told(first, "pid") or kind == "async"
        for name in ("weight", "mark", "note"):
            assert told(batch, name) == {3}
        assert collector.failures.failed.total() == collector.failures.restarted.total() == 1
        assert collector.frames > before + frames
        assert ("the cart fell off the table" in caplog.text) == (what == "raise")


class Doomed(Still):
    """Looks into the folder at its 25th step only."""

    steps = 0

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return super().step(action) if self.steps == 25 else (np.zeros(4, np.float32), 0.0, False, False, {})


@pytest.mark.parametrize("failure", ["raise", "drop", "restart"])
def test_an_update_that_comes_upon_a_worker_that_raised_tells_what_it_raised(failure, events, caplog):
    (events / "raise").touch()
    (quiet := events.with_name("quiet")).mkdir()
    makers = [lambda: GymEnv(Doomed(events)), lambda: GymEnv(Still(quiet))]
    with MultiAsyncCollector(makers, policy(), frames_per_batch=10, on_worker_failure=failure) as collector:
        (victim, _) = collector.remote_workers
        pid = victim.process.pid
        while told(next(collector), "pid") != {pid}:
            pass
        assert wait([victim.sentinel], 10)  # it has finished another batch, and raised in the next one
        if failure == "raise":
            with pytest.raises(wsync.WorkerFailed, match="the cart fell off the table"):
                update(collector, 2)
            assert collector.closed
        else:
            update(collector, 2)
            assert "the cart fell off the table" in caplog.text
            assert [told(next(collector), "pid") for _ in range(4)].count({pid}) == 1
        assert collector.failures.failed == {0: 1}


class Costly(Still):
    """Says when it is closed, which takes a while: a simulator is to be ended, say."""

    def close(self) -> None:
        time.sleep(0.2)  # longer than it takes the trainer to let a worker go
        self.folder.with_name("closed").touch()


@every_kind
@pytest.mark.parametrize("failure", ["drop", "restart"])
def test_the_environment_of_a_worker_that_raised_is_closed(kind, failure, events):
    (events / "raise").touch()
    (quiet := events.with_name("quiet")).mkdir()
    makers = [lambda: GymEnv(Costly(events)), lambda: GymEnv(Still(quiet))]
    with KINDS[kind](makers, policy(), frames_per_batch=16, on_worker_failure=failure) as collector:
        while not collector.failures:
            next(collector)
        assert events.with_name("closed").exists()


class Stuck(Still):
    """Raises, and then closing it takes for ever."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        try:
            return super().step(action)
        except ArithmeticError:
            self.close = threading.Event().wait
            raise


@every_kind
def test_what_a_worker_raised_is_told_before_anything_is_closed(kind, events, caplog, monkeypatch):
    monkeypatch.setattr("collectors.workers.processes.SHUTDOWN_GRACE", 0.5)  # it waits that long for the end
    (events / "raise").touch()
    with collect(kind, events, "drop", maker=lambda: GymEnv(Stuck(events)), worker_timeout=20.0) as collector:
        while not collector.failures:
            next(collector)
        assert "the cart fell off the table" in caplog.text


@every_kind
def test_a_successor_has_every_model_from_its_first_frame_on(kind, events):
    schemes = {name: wsync.SharedMemWeightSyncScheme() for name in ("policy", "module.critic")}
    with collect(kind, events, weight_sync_schemes=schemes) as collector:
        until_there(collector, 2, kind == "sync")
        for value in (2, 3):
            collector.policy.module.become(value)
            both = {"policy": collector.policy, "module.critic": nn.Linear(4, 1)}
            collector.update_policy_weights_(weights_dict=both)
        known = {kill(collector, 1)}
        collector.policy.module.become(4)
        collector.update_policy_weights_(weights_dict=both)  # undone by the death, and done again with the other
        known |= {worker.process.pid for worker in collector.remote_workers}
        while (batch := next(collector)) is not None and not told(batch, "pid") - known:
            assert collector.frames < 10**5
        theirs = batch["told"][batch["told"][..., 3] == max(told(batch, "pid") - known)]
        assert theirs[:, :3].unique().tolist() == [4]
        assert collector.failures.restarted == {1: 1}


def test_an_update_that_was_decided_is_not_reported_as_undone(events, monkeypatch):
    """The worker dies between its yes and the switch: the others have the update, and the call returns."""
    schemes = {name: wsync.SharedMemWeightSyncScheme() for name in ("policy", "module.critic")}
    with collect("sync", events, weight_sync_schemes=schemes) as collector:
        next(collector)

        commit, killed = Transaction.commit, list[int]()

        def die_first(transaction: Transaction) -> None:
            if not killed:
                killed.append(kill(collector, 1))
            commit(transaction)

        monkeypatch.setattr(Transaction, "commit", die_first)  # where the death comes, nothing else
        collector.policy.module.become(5)
        collector.update_policy_weights_(weights_dict={"policy": collector.policy, "module.critic": nn.Linear(4, 1)})
        assert collector.failures.failed == {1: 1}
        assert told(next(collector), "weight") == {5}
        assert told(until_there(collector, 2, True), "weight") == {5}
        assert [scheme.version for scheme in schemes.values()] == [2, 2]


@every_kind
def test_a_stopped_worker_is_ended_and_replaced(kind, events):
    with collect(kind, events, worker_timeout=3.0) as collector:
        until_there(collector, 2, kind == "sync")
        (events / "stop").touch()
        while not collector.failures:
            next(collector)
        until_there(collector, 2, kind == "sync")
        assert collector.failures.failed.total() == 1


def test_a_stopped_worker_is_an_error_in_the_end(events, monkeypatch):
    monkeypatch.setattr("collectors.workers.processes.SHUTDOWN_GRACE", 0.5)  # a stopped worker does not end within it
    (events / "stop").touch()
    with collect("sync", events, "raise", worker_timeout=2.0) as collector:
        with pytest.raises(wsync.SyncTimeout, match="did not answer within 2 s"):
            next(collector)
        assert collector.closed


class Wide(Still):
    """A batch of 16 frames is 64 MiB, more than sockets hold."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (1 << 19,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(1 << 19, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(1 << 19, np.float32), 0.0, False, False, {}


def test_a_stopped_worker_does_not_hold_up_an_update_for_ever(events):
    scheme = wsync.SharedMemWeightSyncScheme(timeout=3.0)  # waits until the weights are installed
    with collect("sync", events, weight_sync_schemes={"policy": scheme}) as collector:
        next(collector)
        kill(collector, 0, signal.SIGSTOP)
        update(collector, 2)
        assert collector.failures.failed == {0: 1}
        assert told(next(collector), "weight") == {2}
        assert told(until_there(collector, 2, True), "weight") == {2}


@pytest.mark.parametrize("failure", ["drop", "raise"])
def test_an_update_without_a_stopped_worker_ends_while_the_death_of_another_one_is_not_handled(failure, events):
    scheme = wsync.SharedMemWeightSyncScheme(timeout=3.0)
    with collect("sync", events, failure, workers=3, weight_sync_schemes={"policy": scheme}) as collector:
        next(collector)
        kill(collector, 0, signal.SIGSTOP)
        kill(collector, 1)
        if failure == "raise":
            with pytest.raises(wsync.WeightSyncError, match="worker"):
                update(collector, 2)
        else:
            update(collector, 2)
            assert told(next(collector), "weight") == {2}
        assert collector.failures.failed == {0: 1, 1: 1}


@pytest.mark.parametrize("failure", ["drop", "raise"])
def test_an_interrupted_update_ends_the_collector(failure, events):
    def interrupt() -> int:
        raise KeyboardInterrupt

    with collect("sync", events, failure) as collector:
        next(collector)
        collector.policy.module.get_extra_state = interrupt
        with pytest.raises(KeyboardInterrupt):
            collector.update_policy_weights_()
        assert collector.closed


def test_a_replacement_may_have_a_sentinel_that_is_equal_to_the_id_of_a_child(events, monkeypatch):
    with collect("sync", events) as collector:
        next(collector)
        monkeypatch.setattr("wsync.control.processes._is_child", lambda number: True)  # ids are small in a container
        kill(collector, 1)
        until_there(collector, 2, True)
        assert collector.failures.restarted == {1: 1}


def test_refused_weights_are_an_error_whatever_the_policy(events):
    scheme = wsync.SharedMemWeightSyncScheme()
    with collect("sync", events, weight_sync_schemes={"policy": scheme}) as collector:
        next(collector)
        with pytest.raises(wsync.WorkerFailed, match="-13 is refused"):
            update(collector, -13)
        assert not collector.failures and not collector.closed
        update(collector, 14)
        assert told(next(collector), "note") == {14}


def fails_at(folder: Path, builds: set[int]):
    """Makes an environment, but not at these builds (counted over all workers)."""

    def make() -> GymEnv:
        for number in range(99):
            try:
                os.close(os.open(folder.with_suffix(f".build{number}"), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            if number in builds:
                raise ArithmeticError(f"no such table ({number})")
            return GymEnv(Still(folder))
        raise AssertionError("built 99 times")

    return make


@pytest.mark.parametrize("failure", ["raise", "restart"])
def test_weights_that_are_sent_without_waiting_and_refused_are_an_error(failure, events):
    schemes = {"policy": wsync.SharedMemWeightSyncScheme(sync=False)}
    with collect("sync", events, failure, weight_sync_schemes=schemes) as collector:
        next(collector)
        with pytest.raises(wsync.WorkerFailed, match="-13 is refused"):
            for _ in range(10):  # each batch ends after an answer to the update before it
                update(collector, -13)
                next(collector)


def test_a_worker_that_dies_after_an_update_that_is_not_waited_for_is_replaced(events):
    schemes = {"policy": wsync.SharedMemWeightSyncScheme(sync=False)}
    with collect("sync", events, weight_sync_schemes=schemes) as collector:
        next(collector)
        update(collector, 2)
        gone = kill(collector, 0)
        update(collector, 3)
        update(collector, 4)
        batch = until_there(collector, 2, sync=True)
        assert gone not in told(batch, "pid") and collector.failures.failed == {0: 1}
        assert schemes["policy"].metrics.updates > 0


def test_one_that_cannot_be_built_is_tried_again(events):
    with collect("sync", events, maker=fails_at(events, {2, 3})) as collector:
        next(collector)
        kill(collector, 1)
        assert told(until_there(collector, 2, True), "weight") == {1}
        assert (collector.failures.failed, collector.failures.restarted) == ({1: 3}, {1: 1})  # one has joined


def test_a_worker_that_is_restarted_while_a_state_is_loaded_repeats_no_random_frames(events):
    line = events.with_suffix(".line")
    os.mkfifo(line)
    make, third = fails_at(events, set()), events.with_suffix(".build2")

    def maker() -> GymEnv:
        env = make()
        if third.exists():
            line.read_text()  # until the state is loaded
        return env

    with collect("sync", events, maker=maker, init_random_frames=10**6) as collector:
        next(collector)
        kill(collector, 1)
        while not third.exists():
            next(collector)
        collector.load_state_dict({"frames": 2 * 10**6})
        line.write_text("loaded")
        assert (until_there(collector, 2, True)["policy_version"] >= 0).all()


def test_one_that_fails_too_often_is_an_error_with_the_last_cause(events):
    options = {"max_restarts": 2, "restart_window": 30.0, "maker": fails_at(events, set(range(2, 99)))}
    with collect("async", events, **options) as collector:
        next(collector)
        kill(collector, 1)
        with pytest.raises(wsync.WorkerFailed, match=r"(?s)more than 2 times within 30 s or .*no such table \(3\)"):
            for _ in range(10**6):
                next(collector)
        assert collector.closed and not collector.failures.restarted  # none has joined


@every_kind
def test_with_all_workers_dead_the_first_restarted_one_is_waited_for(kind, events):
    with collect(kind, events) as collector:
        next(collector)
        gone = {kill(collector, worker) for worker in (0, 1)}
        update(collector, 7)
        assert told(next_without(gone, collector), "weight") == {7}
        until_there(collector, 2, kind == "sync")
        assert collector.failures.restarted == {0: 1, 1: 1}


def test_seeds_are_never_used_twice(events):
    class Seeds(Still):
        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
            halves = (-1, -1) if seed is None else divmod(seed, 2**16)  # float32 has no numbers of 31 bits
            return np.array([*halves, 0, 0], np.float32), {}

        def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
            return np.zeros(4, np.float32), 0.0, True, False, {}

    def seeds(batch: TensorDictBase) -> set[int]:
        return {high * 2**16 + low for high, low in batch["observation"][..., :2].flatten(0, -2).int().tolist()} - {
            -(2**16) - 1
        }

    with collect("sync", events, maker=lambda: GymEnv(Seeds(events))) as collector:
        assert collector.set_seed(100) == 102
        used = seeds(next(collector))
        kill(collector, 1)
        used |= seeds(until_there(collector, 2, True))
        assert sorted(used) == list(range(min(used), min(used) + 3))


def test_interrupt_ends_a_wait_for_workers_that_do_not_come_back(events):
    with collect("sync", events, maker=fails_at(events, set(range(2, 99))), max_restarts=98) as collector:
        next(collector)
        for worker in (0, 1):
            kill(collector, worker)
        timer = threading.Timer(0.5, collector.interrupt)
        timer.start()
        with pytest.raises(wsync.SyncTimeout, match="asked to stop"):
            next(collector)
        assert collector.closed
        timer.join()


@every_kind
def test_a_collector_that_got_its_batch_after_an_interrupt_may_continue(kind, events, monkeypatch):
    monkeypatch.setattr("collectors.workers.group._STOP_GRACE", 0.5)
    with collect(kind, events) as collector:
        collector.interrupt()
        next(collector)
        over = time.monotonic() + 1.0
        while time.monotonic() < over:
            next(collector)


def descriptors() -> int:
    """Those that are open, but for the arena's: it may have one slot more than before."""
    kept = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            kept += not re.search("memfd:wsync-[0-9a-f]{32} ", os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:
            continue  # the one by which they were listed
    return kept


@pytest.mark.slow
@every_kind
def test_many_kills_leave_nothing_and_versions_never_go_back(kind, events, caplog):
    def count() -> tuple[int, int, int, set[str]]:
        gc.collect()  # a memory map keeps a descriptor
        with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
            children = len(file.read().split())
        return threading.active_count(), descriptors(), children, shared_memory_files()

    dice, versions = random.Random(3), {}
    caplog.set_level(logging.ERROR)
    with collect(kind, events) as collector:
        until_there(collector, 2, kind == "sync")
        before = count()
        for number in range(10):
            kill(collector, dice.randrange(2))
            while collector.failures.restarted.total() <= number:
                update(collector, collector.weight_sync_schemes["policy"].version + 1)
                note(next(collector), versions)
            batch = until_there(collector, 2, kind == "sync", versions)
            assert torch.equal(batch["told"][..., 0], batch["policy_version"].double())
        assert collector.failures.failed.total() == collector.failures.restarted.total() == 10
        assert count() == before


@pytest.mark.slow
@every_kind
def test_a_learner_in_another_thread_updates_while_workers_die(kind, events, caplog):
    versions, over = {}, threading.Event()
    caplog.set_level(logging.ERROR)
    errors: list[BaseException] = []

    def learn(collector: Any) -> None:
        try:
            while not over.is_set():
                update(collector, collector.weight_sync_schemes["policy"].version + 1)
        except BaseException as error:
            errors.append(error)
            raise

    with collect(kind, events) as collector:
        learner = threading.Thread(target=learn, args=[collector])
        learner.start()
        try:
            for number in range(3):
                for pid in [worker.process.pid for worker in collector.remote_workers]:
                    os.kill(pid, signal.SIGKILL)  # all: then both threads wait for a successor
                while collector.failures.restarted.total() < 2 * number + 2 and not errors:
                    note(next(collector), versions)
                until_there(collector, 2, kind == "sync", versions)
        finally:
            over.set()
            learner.join()
        assert not errors
        version = collector.weight_sync_schemes["policy"].version
        update(collector, version + 1)
        for _ in range(8):  # workers with older batches have two at the most
            note(next(collector), versions)
        assert {versions[worker.process.pid] for worker in collector.remote_workers} == {version + 1}


def test_nonsense_is_refused(events):
    for options, message in (
        ({"failure": "ignore"}, "raise, drop, restart"),
        ({"worker_timeout": 0}, "worker_timeout"),
        ({"max_restarts": -1}, "max_restarts"),
    ):
        with pytest.raises(ValueError, match=message):
            collect("sync", events, **options)


def test_weights_per_worker_reach_the_remaining_workers(events):
    with collect("sync", events, "drop", workers=3) as collector:
        next(collector)
        kill(collector, 0)
        weights = {w: TensorDict.from_module(policy()).data.clone().apply_(lambda t, w=w: t.fill_(w)) for w in range(3)}
        collector.update_policy_weights_(weights)
        collector.update_policy_weights_(weights)
        assert told(next(collector), "weight") == {1, 2}
