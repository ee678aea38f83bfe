"""Collectors with real worker processes: weights in every form, failures with names, nothing left behind."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from collecting import check_calling_conventions, chosen, policy
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import collectors
import wsync
from collectors import (
    Collector,
    GymEnv,
    MultiAsyncCollector,
    MultiCollector,
    MultiSyncCollector,
    WeightUpdaterBase,
)
from collectors.distributed import DistributedCollector
from collectors.worker import WorkerOptions, WorkerSpec
from collectors.workers import group, processes
from collectors.workers.connections import Listener
from collectors.workers.pool import work
from collectors.workers.processes import hidden_main, join_or_kill, kill, start
from wsync.gate import process_gate
from wsync.testing.faults import in_forked_child
from wsync.testing.shutdowns import shared_memory_files

SCHEMES = ["shared_mem", "multiprocess"]
SCORED = ["action", "action_log_prob"]


def cartpole(num_envs: int = 2):
    return lambda: GymEnv("CartPole-v1", num_envs)


def acrobot():
    return GymEnv("Acrobot-v1", 2)


def scored_policy():
    return TensorDictModule(lambda x: (x[..., :2], x[..., 0]), in_keys=["observation"], out_keys=SCORED)


def multi(cls=MultiSyncCollector, *, workers=2, scheme="shared_mem", trained=None, **options):
    options.setdefault("weight_sync_schemes", {"policy": wsync.WeightSyncScheme.from_backend(scheme)})
    options.setdefault("frames_per_batch", 16)
    return cls([cartpole()] * workers, policy() if trained is None else trained, **options)


def flipped(trained) -> TensorDict:
    return TensorDict.from_module(policy(-1.0)).data.clone()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_calling_convention_reaches_every_worker(scheme):
    trained = policy(1.0)
    with multi(scheme=scheme, trained=trained) as collector:
        check_calling_conventions(collector, trained)


@pytest.mark.filterwarnings("ignore:.*of the older API:DeprecationWarning")
@pytest.mark.parametrize("updater", [None, WeightUpdaterBase])
@pytest.mark.parametrize("on_worker_failure", ["raise", "drop"])
def test_worker_ids_may_be_integers_of_any_type(updater, on_worker_failure):
    with multi(cat_results="stack", weight_updater=updater, on_worker_failure=on_worker_failure) as collector:
        for worker_ids in (np.array([1]), np.array(1), torch.tensor([1]), torch.tensor(1), [torch.tensor(1)]):
            collector.update_policy_weights_(policy(-1.0), worker_ids=worker_ids)
        assert next(collector)["policy_version"][:, 0, 0].tolist() == [1, 6]
        with pytest.raises(ValueError, match="unknown worker_ids"):
            collector.update_policy_weights_(policy(-1.0), worker_ids=[0, 1.0])
        assert next(collector)["policy_version"][:, 0, 0].tolist() == [1, 6] and not collector.failures


def test_worker_ids_update_some_workers_only():
    with multi(cat_results="stack") as collector:
        collector.update_policy_weights_(policy(-1.0), worker_ids=np.int64(1))
        batch = next(collector)
        assert chosen(batch[0]) == 1.0 and chosen(batch[1]) == 0.0
        assert batch["policy_version"][:, 0, 0].tolist() == [1, 2]
        with pytest.raises(ValueError, match=r"unknown worker_ids \[5\]"):
            collector.update_policy_weights_(worker_ids=[0, 5])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_dict_is_all_or_nothing(scheme):
    trained = policy()
    schemes = {name: wsync.WeightSyncScheme.from_backend(scheme) for name in ("policy", "module.critic")}
    with multi(trained=trained, weight_sync_schemes=schemes) as collector:
        good = {"policy": policy(-1.0), "module.critic": nn.Linear(4, 1)}
        collector.update_policy_weights_(weights_dict=good)
        assert chosen(next(collector)) == 0.0
        with pytest.raises(wsync.LayoutMismatch, match="bias"):
            collector.update_policy_weights_(weights_dict={"policy": policy(1.0), "module.critic": nn.Linear(4, 7)})
        assert chosen(next(collector)) == 0.0, "the good half of a refused update was applied"
        with pytest.raises(KeyError, match="unheard_of"):
            collector.update_policy_weights_(weights_dict={"policy": policy(1.0), "unheard_of": nn.Linear(4, 1)})
        collector.update_policy_weights_(weights_dict={**good, "policy": policy(1.0)})
        assert chosen(next(collector)) == 1.0


@pytest.mark.filterwarnings("ignore:.*of the older API:DeprecationWarning")
@pytest.mark.parametrize("updater", [None, WeightUpdaterBase])
def test_an_update_that_cannot_be_is_said_in_the_collectors_words(updater):
    with Collector(cartpole(), policy(), frames_per_batch=4, weight_updater=updater) as collector:
        for wrong in ([policy(-1.0)], TensorDict(policy=flipped(None)), policy(-1.0)):
            with pytest.raises(TypeError, match=f"{{model_id: weights}}, not a {type(wrong).__name__}"):
                collector.update_policy_weights_(weights_dict=wrong)
        assert chosen(next(collector)) == 1.0
    for update in (collector.update_policy_weights_, collector.send_weights):
        with pytest.raises(wsync.NotConnected, match="this collector has been shut down"):
            update(policy(-1.0))


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_a_refused_update_keeps_no_frame_of_its_caller_alive(cls):
    with cls([cartpole()] if cls is MultiSyncCollector else cartpole(), policy(), frames_per_batch=4) as collector:

        def ask(update):
            batch = torch.zeros(1 << 20)
            with suppress(wsync.LayoutMismatch):
                update({"odd": torch.zeros(1)})
            return weakref.ref(batch)

        gc.disable()  # it may be long until it runs
        try:
            asked = [ask(update) for update in (collector.update_policy_weights_, collector.send_weights)]
            assert [batch() for batch in asked] == [None, None]
        finally:
            gc.enable()


@pytest.mark.parametrize("name", ["shared_mem", "multiprocess", "none"])
def test_one_process_takes_every_scheme(name):
    trained = policy()
    scheme = wsync.WeightSyncScheme.from_backend(name)
    with Collector(cartpole(), trained, frames_per_batch=8, weight_sync_schemes={"policy": scheme}) as collector:
        with torch.no_grad():
            trained.module.bias.neg_()
        assert chosen(next(collector)) == 1.0
        collector.update_policy_weights_()
        assert chosen(next(collector)) == float(name == "none")


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_policy_that_only_the_workers_make_is_given_to_the_sender(cls, scheme):
    """It acts with what its factory made (version 0) until it is sent weights for the first time."""
    trained, schemes = policy(-1.0), {"policy": wsync.WeightSyncScheme.from_backend(scheme)}
    makers = cartpole() if cls is Collector else [cartpole()] * 2
    options = dict(policy_factory=lambda: policy(1.0), frames_per_batch=16, weight_sync_schemes=schemes)
    with cls(makers, **options) as collector:
        batch = next(collector)
        assert chosen(batch) == 1.0 and batch["policy_version"].unique().tolist() == [0]
        with pytest.raises(wsync.NotConnected, match="no model or weights were given"):
            collector.update_policy_weights_()
        collector.update_policy_weights_(trained)
        batch = next(collector)
        assert chosen(batch) == 0.0 and batch["policy_version"].unique().tolist() == [1]


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_buffers_of_the_user_are_the_policy_s(cls):
    buffers = TensorDict.from_module(policy(-1.0)).data.clone()
    scheme = wsync.SharedMemWeightSyncScheme(auto_register=False)
    scheme.register_shared_weights("policy", buffers)
    makers = cartpole() if cls is Collector else [cartpole()]
    options = dict(policy_factory=lambda: policy(1.0), frames_per_batch=8, weight_sync_schemes={"policy": scheme})
    with cls(makers, **options) as collector:
        assert chosen(next(collector)) == 0.0
        buffers["module", "bias"].neg_()
        collector.update_policy_weights_()
        assert chosen(next(collector)) == 1.0
        collector.update_policy_weights_(policy(-1.0))
        assert chosen(next(collector)) == 0.0 and torch.equal(buffers["module", "bias"], policy(-1.0).module.bias)


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_buffers_that_have_to_be_registered_are(cls):
    scheme = wsync.SharedMemWeightSyncScheme(auto_register=False)
    makers = cartpole() if cls is Collector else [cartpole()]
    with pytest.raises(wsync.NotConnected, match="register_shared_weights"):
        cls(makers, policy(), frames_per_batch=8, weight_sync_schemes={"policy": scheme})


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_a_module_without_weights_is_a_policy_like_any_other(cls):
    rule = TensorDictModule(lambda seen: (seen[..., 2] > 0).long(), in_keys=["observation"], out_keys=["action"])
    with cls(cartpole(), rule, frames_per_batch=8) as collector:
        batch = next(collector)
        assert (batch["action"] == (batch["observation"][..., 2] > 0)).all()
        with pytest.raises(KeyError, match="no weight sync scheme for model 'policy'"):
            collector.update_policy_weights_()


def test_no_scheme_means_no_update_ever():
    trained = policy()
    with multi(scheme="none", trained=trained) as collector:
        with torch.no_grad():
            trained.module.bias.neg_()
        collector.update_policy_weights_()
        batch = next(collector)
        assert chosen(batch) == 1.0 and batch["policy_version"].unique().tolist() == [0]


def test_batches_have_the_shape_that_was_asked_for():
    with multi(frames_per_batch=24) as collector:
        assert next(collector).batch_size == (2, 2, 6)
    with multi(cat_results=0, frames_per_batch=24, total_frames=48, track_policy_version=False) as collector:
        batches = list(collector)
        assert [batch.batch_size for batch in batches] == [(4, 6)] * 2
        assert batches[0].get("policy_version", None) is None


def test_a_batch_is_never_written_again():
    with multi() as collector:
        first = next(collector)
        copy = first.clone()
        next(collector)
        assert (first == copy).all()


@pytest.mark.parametrize(
    ("cls", "workers", "said"),
    [(MultiSyncCollector, 2, "2 × 10 = 20"), (MultiAsyncCollector, 2, "18"), (Collector, 1, "18")],
)
def test_a_share_is_rounded_up_with_a_warning(cls, workers, said):
    with pytest.warns(UserWarning) as warned, multi(cls, workers=workers, frames_per_batch=17) as collector:
        assert next(collector).numel() == int(said.split()[-1])
    (only,) = warned
    assert f"frames_per_batch=17 is rounded up to {said}: " in str(only.message) and only.filename == __file__


def test_asynchronous_collection_never_goes_back_in_version():
    trained = policy()
    with multi(MultiAsyncCollector, trained=trained) as collector:
        newest = 0
        for _ in range(30):
            batch = next(collector)
            versions = batch["policy_version"]
            assert (versions.diff(dim=-1) >= 0).all()
            newest = max(newest, int(versions.max()))
            collector.update_policy_weights_()
        assert newest > 10


def test_seeds_make_collection_reproducible():
    def run():
        with multi() as collector:
            collector.set_seed(7)
            return next(collector)["observation"]

    assert torch.equal(run(), run())


def drawn(observation):
    """A policy that acts by torch's numbers, and tells NumPy's."""
    observation["numpy"] = torch.from_numpy(np.random.random(observation.shape))
    return observation.set("action", torch.rand(*observation.shape, 2))


def test_workers_draw_different_numbers_and_a_seed_repeats_them_but_the_next_seed_shares_none():
    def run(seed=None):
        with MultiSyncCollector([cartpole(1)] * 2, drawn, frames_per_batch=16) as collector:
            if seed is not None:
                collector.set_seed(seed)
            return next(collector)

    unseeded, seven, again, eight = run(), run(7), run(7), run(8)
    for key in ("action", "numpy", "observation"):
        first, second = unseeded[key]
        assert not torch.equal(first, second), f"two workers drew the same numbers for {key}"
        assert torch.equal(seven[key], again[key])
        assert not torch.equal(seven[key][1], eight[key][0])


def test_copies_of_one_environment_draw_different_numbers_and_a_seed_repeats_them():
    def run(envs, seed=None):
        with MultiSyncCollector(envs, frames_per_batch=16) as collector:
            if seed is not None:
                collector.set_seed(seed)
            return next(collector)

    env = GymEnv("CartPole-v1", seed=3)
    env.reset()
    unseeded, seven = run([env] * 2), run([env] * 2, 7)
    expected = run([cartpole(1)] * 2, 7)
    for key in ("action", "observation"):
        assert not torch.equal(*unseeded[key]), f"two workers drew the same numbers for {key}"
        assert torch.equal(seven[key], expected[key])


class Recalls(GymEnv):
    """Is only made where the trainer's environment is."""

    def __init__(self) -> None:
        super().__init__("CartPole-v1")
        assert os.environ["WSYNC_TEST_MEMORY"] == "what was said last"
        assert "WSYNC_TEST_FORGOTTEN" not in os.environ


def test_workers_have_the_environment_that_the_trainer_has_when_it_starts_them(monkeypatch):
    """Ray, for one, says there whether it asks for a token; the fork server may be older."""
    monkeypatch.setenv("WSYNC_TEST_FORGOTTEN", "x")
    with multi(workers=1) as collector:
        next(collector)
    monkeypatch.delenv("WSYNC_TEST_FORGOTTEN")
    monkeypatch.setenv("WSYNC_TEST_MEMORY", "what was said last")
    with MultiSyncCollector([Recalls], policy(), frames_per_batch=16) as collector:
        next(collector)


def test_older_names_and_the_choosing_class():
    assert collectors.SyncDataCollector is Collector
    assert collectors.MultiSyncDataCollector is MultiSyncCollector
    assert collectors.MultiaSyncDataCollector is MultiAsyncCollector
    for sync, cls in ((False, MultiAsyncCollector), (True, MultiSyncCollector)):
        with multi(MultiCollector, sync=sync) as collector:
            assert type(collector) is cls
    with pytest.raises(TypeError, match="sync"):
        multi(MultiCollector)


def single(**options):
    return Collector(cartpole(), policy(), frames_per_batch=16, **options)


class ClosedLater(GymEnv):
    """Cannot be closed at once."""

    attempts = 0

    def close(self) -> None:
        self.attempts += 1
        if self.attempts == 1:
            raise OSError("still in use")
        super().close()


def test_a_collector_that_could_not_be_shut_down_can_be_shut_down_later():
    env = ClosedLater("CartPole-v1")
    collector = Collector(env, policy(), frames_per_batch=16)
    collector.update_policy_weights_()
    version = collector.policy_version
    with pytest.raises(OSError, match="still in use"):
        collector.shutdown()
    collector.shutdown()
    collector.shutdown()
    assert env.attempts == 2 and collector.closed and collector.policy_version == version > 0


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_a_scheme_that_cannot_be_shut_down_leaves_no_other_one_open(cls, monkeypatch):
    schemes = {name: wsync.SharedMemWeightSyncScheme() for name in ("policy", "module.critic")}
    collector = cls([cartpole()], policy(), frames_per_batch=16, weight_sync_schemes=schemes)
    asked: list[str] = []

    def fail(name):
        asked.append(name)
        raise OSError(f"{name} is still in use")

    for name, scheme in schemes.items():
        monkeypatch.setattr(scheme, "shutdown", partial(fail, name))
    with pytest.raises(OSError, match="is still in use"):
        collector.shutdown()
    assert sorted(asked) == sorted(schemes)
    monkeypatch.undo()
    collector.shutdown()


def middle(make, scheme, line):
    """A worker of the trainer's that has a collector of its own."""
    with make() as inner:
        scheme.init_on_receiver("policy", context=inner, worker_idx=0)
        scheme.connect()
        line.send(chosen(next(inner)))
        line.recv()
        line.send(chosen(next(inner)))
        scheme.shutdown()


@pytest.mark.parametrize("make", [multi, single])
def test_an_update_cascades_to_the_workers_of_a_worker(make):
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe()
    with wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", model=policy(-1.0), num_workers=1)
        process = context.Process(target=middle, args=(make, scheme, theirs))
        process.start()
        scheme.connect()
        assert mine.recv() == 0.0, "the first weights went down to the bottom"
        scheme.send(policy(1.0))
        mine.send("go on")
        assert mine.recv() == 1.0
        process.join(20)
        assert process.exitcode == 0


class Broken(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self.steps += 1
        if self.steps > 3:
            raise ArithmeticError("the cart fell off the table")
        return np.zeros(4, np.float32), 0.0, False, False, {}


def explode():
    raise ArithmeticError("no such table")


def children() -> set[int]:
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        return {int(pid) for pid in file.read().split()}


def test_an_environment_that_raises_is_an_error_with_its_traceback():
    collector = MultiSyncCollector([lambda: Broken()] * 2, policy(), frames_per_batch=16)
    pids = [worker.process.pid for worker in collector.remote_workers]
    with pytest.raises(wsync.WorkerFailed, match="the cart fell off the table"):
        next(collector)
    assert collector.closed and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


class Exiting(Broken):
    """Ends its process where others raise an error, as some simulators do without a licence."""

    def step(self, action):
        sys.exit("no licence")


def test_an_environment_that_exits_is_an_error_with_its_traceback():
    collector = MultiAsyncCollector([lambda: GymEnv(Exiting())], frames_per_batch=8)
    with pytest.raises(wsync.WorkerFailed, match=r"worker 0 failed:(.|\n)*SystemExit: no licence"):
        next(collector)


class Judged(Broken):
    """Its rewards are a model's."""

    def __init__(self):
        self.value_net = nn.Linear(1, 1)

    def step(self, action):
        return np.zeros(4, np.float32), self.value_net.weight.item(), False, False, {}


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_a_model_of_a_gymnasium_environment_is_updated_by_its_path(cls):
    name, ours = "env.value_net", nn.Linear(1, 1)
    nn.init.constant_(ours.weight, 7.0)
    schemes = {"policy": wsync.SharedMemWeightSyncScheme(), name: wsync.SharedMemWeightSyncScheme()}
    maker = gymnasium.wrappers.TimeLimit
    makers = [lambda: GymEnv(maker(Judged(), 9))] * (1 if cls is Collector else 2)
    with cls(makers, policy(), frames_per_batch=16, weight_sync_schemes=schemes) as collector:
        next(collector)
        collector.update_policy_weights_(weights=ours, model_id=name)
        assert next(collector)["next", "reward"].unique().tolist() == [7.0]


def judged_by_the_trainer(scheme, line):
    """A worker of the trainer's; its collector has a model in its environment."""
    maker = gymnasium.wrappers.TimeLimit
    with Collector(lambda: GymEnv(maker(Judged(), 9)), policy(), frames_per_batch=16) as inner:
        scheme.init_on_receiver("env.value_net", context=inner, worker_idx=0)
        scheme.connect()
        line.send(next(inner)["next", "reward"].unique().tolist())
        scheme.shutdown()


def test_a_model_in_the_environment_of_a_workers_collector_is_updated_by_its_path():
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe()
    ours = nn.Linear(1, 1)
    nn.init.constant_(ours.weight, 7.0)
    with wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender("env.value_net", model=ours, num_workers=1)
        process = context.Process(target=judged_by_the_trainer, args=(scheme, theirs))
        process.start()
        scheme.connect()
        assert mine.recv() == [7.0]
        process.join(20)
        assert process.exitcode == 0


def test_a_path_that_leads_nowhere_in_an_environment_says_how_far_it_leads():
    schemes = {"env.value_nut": wsync.SharedMemWeightSyncScheme()}
    with pytest.raises(LookupError, match="env has no value_nut"):
        Collector(lambda: GymEnv(Judged()), policy(), frames_per_batch=16, weight_sync_schemes=schemes)


def test_a_policy_that_is_too_large_for_a_message_is_an_error_that_says_so(monkeypatch):
    monkeypatch.setattr("wsync.control.connection._MAX_PAYLOAD", 100_000)
    large = TensorDictModule(nn.Linear(4, 10_000), in_keys=["observation"], out_keys=["action"])
    before = {*multiprocessing.active_children()}
    with pytest.raises(ValueError, match=r"policy .* too large .* \(\d{6} bytes, 1 GiB at most\): give"):
        multi(trained=large)
    assert {*multiprocessing.active_children()} <= before


class Disconnected(Broken):
    def step(self, action):
        raise ConnectionResetError("the simulator hung up")


@pytest.mark.parametrize("collector", [MultiSyncCollector, DistributedCollector])
def test_a_connection_that_an_environment_loses_is_its_own_failure_and_not_the_trainers_end(collector):
    with (
        collector([lambda: Disconnected()], policy(), frames_per_batch=16) as gathering,
        pytest.raises(wsync.WorkerFailed, match="the simulator hung up"),
    ):
        next(gathering)


class Unclosable(Broken):
    def close(self):
        raise OSError("the recording could not be written")


@pytest.mark.parametrize(
    ("spec", "printed"),
    [(b"not a pickle", ""), (cloudpickle.dumps(WorkerSpec(Unclosable, None, None, {})), "could not be written\n")],
)
def test_after_the_trainer_has_hung_up_a_worker_prints_only_an_error_of_closing(spec, printed, capfd):
    listener = Listener()
    worker = multiprocessing.get_context("fork").Process(target=work, args=(listener.address, 0, b"key"))
    worker.start()
    accepted = listener.accept(time.monotonic() + 20)
    assert accepted is not None
    connection, _ = accepted
    connection.send("build", (spec, WorkerOptions(0, 1, 1)))
    connection.close()
    listener.close()
    worker.join(20)
    assert worker.exitcode == 0
    assert capfd.readouterr().err[-len("could not be written\n") :] == printed


class Stuck(Broken):
    """Opens a FIFO in its first step, and returns from none; nor from being closed."""

    def __init__(self, fifo):
        self.fifo = fifo

    def step(self, action):
        open(self.fifo, "w").close()
        time.sleep(1000)

    def close(self):
        time.sleep(1000)


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_a_shutdown_in_another_thread_ends_the_wait_for_a_batch(cls, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "SHUTDOWN_GRACE", 0.1)
    fifo = tmp_path / "started"
    os.mkfifo(fifo)
    collector = cls([lambda: GymEnv(Stuck(fifo))], policy(), frames_per_batch=16)
    errors: list[str] = []

    def gather():
        try:
            next(collector)
        except wsync.NotConnected as error:
            errors.append(str(error))

    thread = threading.Thread(target=gather)
    thread.start()
    open(fifo).close()  # once the worker is in the middle of the batch
    collector.shutdown()
    thread.join(20)
    assert errors == ["this collector has been shut down"]


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_an_interrupt_between_two_batches_leaves_the_next_one_its_time(cls, monkeypatch):
    with cls([cartpole()], policy(), frames_per_batch=2000) as collector:
        monkeypatch.setattr(group, "_STOP_GRACE", 0.0)
        collector.interrupt()
        monkeypatch.setattr(group, "_STOP_GRACE", 60.0)
        assert next(collector).numel() == 2000


def test_an_interrupted_shutdown_of_a_collector_can_be_repeated():
    def interrupt(*_):
        raise KeyboardInterrupt

    collector = MultiSyncCollector([lambda: GymEnv(Stuck("unused"))] * 2, policy(), frames_per_batch=16)
    pids = [worker.process.pid for worker in collector.remote_workers]
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            collector.shutdown()
    finally:
        signal.signal(signal.SIGALRM, before)
    collector.shutdown()
    assert collector.closed and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector, Collector])
def test_a_forked_child_uses_and_ends_nothing_of_its_parents_collector(cls):
    with multi(cls, workers=1 if cls is Collector else 2) as collector:
        next(collector)
        for use in (lambda: next(collector), collector.update_policy_weights_, lambda: collector.set_seed(0)):
            assert "NotConnected" in in_forked_child(use)
        assert in_forked_child(collector.shutdown) == ""
        assert next(collector).numel() == 16
        collector.update_policy_weights_()


class Nudging(Broken):
    """Signals its trainer in the middle of the second batch, and goes on."""

    def __init__(self, trainer: int):
        self.trainer = trainer

    def step(self, action):
        self.steps += 1
        if self.steps == 12:
            os.kill(self.trainer, signal.SIGINT)
        return np.zeros(4, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
def test_what_an_interrupted_batch_was_asked_for_is_in_no_later_one(cls):
    trainer = os.getpid()
    makers = [lambda: GymEnv(Nudging(trainer)), cartpole(1)]  # one signal: a second would interrupt the shutdown
    with cls(makers, policy(), frames_per_batch=16) as collector:
        pids = [worker.process.pid for worker in collector.remote_workers]
        with pytest.raises(KeyboardInterrupt):
            for _ in range(1000):
                next(collector)
        assert collector.closed and not any(os.path.exists(f"/proc/{pid}") for pid in pids)
        with pytest.raises(RuntimeError, match="shut down"):
            next(collector)


def test_a_process_that_has_ended_is_sent_no_signal(monkeypatch):
    process = start(os.getpid, 0)
    assert wait([process.sentinel], 60)
    sent = []
    monkeypatch.setattr(os, "kill", lambda *given: sent.append(given))  # its id may be that of another process
    kill(process)
    assert not sent


def test_an_interrupted_shutdown_leaves_no_worker_that_is_waited_for_at_exit():
    def interrupt(*_):
        raise KeyboardInterrupt

    stuck = [start(time.sleep, i, 1000.0) for i in range(2)]
    pids = [process.pid for process in stuck]
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            join_or_kill(stuck)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_random_frames_of_an_earlier_run_are_not_had_again(cls):
    def versions(earlier: int) -> list[int]:
        with cls([cartpole()], policy(), frames_per_batch=16, init_random_frames=24) as collector:
            collector.load_state_dict({"frames": earlier})
            assert collector.frames == earlier
            return [int((next(collector)["policy_version"] == -1).sum()) for _ in range(2)]

    assert versions(0) == [16, 8]
    assert versions(16) == [8, 0]
    assert versions(4096) == [0, 0]


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_a_row_that_a_step_has_reset_is_not_a_frame(cls):
    def native():
        return GymEnv("CartPole-v1", 4, vectorization_mode="vector_entry_point")

    with cls([native], policy(), frames_per_batch=100, total_frames=1000, init_random_frames=150) as collector:
        batches = list(collector)
    rows, frames = torch.cat([batch["mask"].flatten() for batch in batches]), collector.frames
    assert frames == rows.sum() < len(rows)
    assert 1000 <= frames < 1000 + 100, "iteration ends with the batch that reaches total_frames"
    at_random = [bool((step == -1).all()) for batch in batches for step in batch["policy_version"].flatten(0, -2).T]
    frames_before = torch.cat([batch["mask"].flatten(0, -2).T for batch in batches]).sum(1).cumsum(0).roll(1)
    frames_before[0] = 0
    assert at_random == (frames_before < 150).tolist()


def test_collectors_that_are_made_at_once_do_not_show_each_other_the_script():
    names, inside, done = vars(sys.modules["__main__"]), threading.Event(), threading.Event()
    before = {name: names.get(name) for name in ("__spec__", "__file__")}

    def other():
        inside.set()
        with hidden_main():
            done.set()

    thread = threading.Thread(target=other)
    with hidden_main():
        thread.start()
        assert inside.wait(10) and not done.wait(0.2), "two had hidden it at once: the first to end would show it"
    thread.join(10)
    assert done.is_set() and {name: names.get(name) for name in before} == before


def test_a_collector_in_one_process_that_cannot_be_made_leaves_nothing():
    schemes = {name: wsync.SharedMemWeightSyncScheme() for name in ("policy", "polcy")}
    env = GymEnv(Broken())
    closed: list[bool] = []
    env.stepper.driver.close = lambda: closed.append(True)
    with pytest.raises(LookupError, match="polcy"):
        Collector(env, policy(), frames_per_batch=16, weight_sync_schemes=schemes)
    assert closed and not process_gate().gate_state.hooks


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(create_env_fn=[explode] * 2), wsync.WorkerFailed, "no such table"),
        (dict(create_env_fn=[]), ValueError, "no environment"),
        (dict(create_env_fn=[lambda: 3]), wsync.WorkerFailed, "made a int"),
        (dict(create_env_fn=GymEnv("CartPole-v1")), TypeError, "a list of them, not a GymEnv"),
        (dict(policy=threading.Lock()), TypeError, "a policy is a module, or a function of a TensorDict, not a lock"),
        (dict(policy=threading.Lock().acquire), TypeError, "policy cannot be sent to a worker"),
        (dict(frames_per_batch=0), ValueError, "frames_per_batch"),
        (dict(frames_per_batch=8.0), TypeError, "frames_per_batch is a whole number, not 8.0"),
        (dict(create_env_fn="CartPole-v1"), TypeError, "create_env_fn is an environment, or a function that makes one"),
        (dict(init_random_frames=-1), ValueError, "init_random_frames is at least 0, not -1"),
        (dict(init_random_frames=2.5), TypeError, "init_random_frames is a whole number, not 2.5"),
        (dict(max_frames_per_traj=0), ValueError, "max_frames_per_traj is at least 1, or None for no limit, not 0"),
        (dict(threads=0), ValueError, "threads is at least 1, not 0"),
        (dict(worker_timeout=float("inf")), ValueError, "worker_timeout is a finite number"),
        (dict(device=0), TypeError, "device is one device"),
        (dict(storing_device="nope"), RuntimeError, "nope"),
        (dict(create_env_fn=[cartpole(), acrobot]), ValueError, r"cannot join .* \[2, 4\]: .*for key observation"),
        (dict(policy_factory=[policy, scored_policy]), ValueError, "not all have action_log_prob"),
        (dict(cat_results=True), ValueError, "a dimension or 'stack', not True"),
        (dict(cat_results=5), ValueError, r"cat_results=5 cannot join workers' batches of shape \[2, 4\]"),
        (dict(create_env_fn=[cartpole(2), cartpole(4)]), ValueError, r"cannot join .* \[2, 4\], \[4, 2\]"),
        (dict(total_frames=-7), ValueError, "total_frames"),
        (dict(weight_sync_schemes={"policy": "shared_mem"}), TypeError, "not 'shared_mem'"),
        (dict(weight_sync_schemes=wsync.NoWeightSyncScheme()), TypeError, "{model_id: scheme}"),
        (dict(weight_sync_schemes={"policy": wsync.SharedMemWeightSyncScheme}), TypeError, "not <class"),
        (dict(weight_sync_schemes={"polcy": wsync.SharedMemWeightSyncScheme()}), wsync.WorkerFailed, "polcy"),
    ],
)
def test_bad_arguments_are_clear_errors_and_leave_nothing(arguments, error, message):
    options = {"create_env_fn": [cartpole()] * 2, "policy": policy(), "frames_per_batch": 16, **arguments}
    with multi():
        pass  # the fork server is there
    gc.collect()  # closes what earlier tests have left
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=message):
        MultiSyncCollector(**options)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_a_seed_that_environments_do_not_take_is_refused_before_it_is_sent(cls):
    with cls([cartpole()], frames_per_batch=8) as collector:
        for wrong, error in ((-1, ValueError), (1.5, TypeError)):
            with pytest.raises(error, match="seed is"):
                collector.set_seed(wrong)
        assert next(collector).numel() == 8


@pytest.mark.parametrize("given", [gymnasium.make("CartPole-v1"), (cartpole(1),)])
def test_an_environment_may_be_given_as_it_is_or_in_a_tuple(given):
    with Collector(given, policy(), frames_per_batch=8) as collector:
        assert next(collector)["observation"].shape == (8, 4)


def test_a_collector_in_one_process_checks_its_limits_as_well():
    with pytest.raises(ValueError, match="init_random_frames is at least 0, not -1"):
        Collector(cartpole(), policy(), frames_per_batch=8, init_random_frames=-1)


def test_what_makes_no_environment_is_named():
    with pytest.raises(TypeError, match="or a function that makes one, not a str"):
        Collector("CartPole-v1", policy(), frames_per_batch=8)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_wrong_weights_are_refused_whole(scheme):
    trained = policy()
    with multi(scheme=scheme, trained=trained) as collector:
        weights = flipped(trained)
        wrong = {
            "missing 'module.bias'": weights.exclude(("module", "bias")),
            "float32\\[3\\], not float32\\[2\\]": weights.clone().set(("module", "bias"), torch.zeros(3)),
            "float64\\[2\\], not float32\\[2\\]": weights.clone().set(("module", "bias"), torch.zeros(2).double()),
            "unknown": nn.Linear(4, 2),
        }
        for message, bad in wrong.items():
            with pytest.raises(wsync.LayoutMismatch, match=message):
                collector.update_policy_weights_(bad)
        with pytest.raises(TypeError, match="int"):
            collector.update_policy_weights_(3)
        with pytest.raises(ValueError, match="more than once"):
            collector.update_policy_weights_(weights, policy=trained)
        assert chosen(next(collector)) == 1.0


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("where", ["update", "batch"])
def test_a_killed_worker_is_named_and_no_other_one_is_left(where, scheme):
    with multi(scheme=scheme) as collector:
        next(collector)
        pids = [worker.process.pid for worker in collector.remote_workers]
        victim = collector.remote_workers[1].process
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(10)
        with pytest.raises(wsync.WorkerDied, match="worker 1"):
            collector.update_policy_weights_() if where == "update" else next(collector)
        assert collector.closed and collector.failures.failed == {1: 1}
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_rounds_of_start_and_stop_leave_nothing():
    def count():
        return threading.active_count(), len(os.listdir("/proc/self/fd")), len(children()), shared_memory_files()

    gc.collect()  # a test before this one may have left what would go within it

    def round_of(scheme):
        with multi(scheme=scheme) as collector:
            next(collector)
            collector.update_policy_weights_()

    round_of("shared_mem")
    before = count()
    for number in range(6):
        round_of(SCHEMES[number % 2])
    assert count() == before


def test_workers_that_would_never_fetch_an_update_are_refused():
    options = {"scheme": "shared_mem", "weight_sync_schemes": {}}
    for staleness in (None, 1):
        scheme = wsync.SharedMemWeightSyncScheme(initiator="receiver", max_staleness=staleness)
        options["weight_sync_schemes"] = {"policy": scheme}
        if staleness is None:
            with pytest.raises(ValueError, match=r"'policy' has initiator='receiver', .* max_staleness="):
                multi(**options)
        else:
            with multi(**options) as collector:
                next(collector)
                for _ in range(4):
                    collector.update_policy_weights_()
                next(collector)
                assert next(collector)["policy_version"].min() >= scheme.version - 1


def test_what_a_worker_raises_as_it_connects_is_the_error():
    class Unreachable(wsync.SharedMemWeightSyncScheme):
        def connect(self, **given):
            if not self.is_sender:
                raise OSError("no route to the trainer")
            super().connect(**given)

    with pytest.raises(wsync.WorkerFailed, match="no route to the trainer"):
        multi(weight_sync_schemes={"policy": Unreachable()})


def test_a_state_whose_weights_could_not_be_sent_counts_its_frames():
    with Collector(cartpole(), policy(), frames_per_batch=16) as collector:
        state = collector.state_dict() | {"frames": 48}
        scheme = collector.weight_sync_schemes["policy"]

        def fail(*_, **__):
            raise wsync.SyncTimeout("not in time")

        scheme.send = fail
        with pytest.raises(wsync.SyncTimeout):
            collector.load_state_dict(state)
        assert collector.frames == 48


def test_a_state_of_a_collector_without_a_policy_fits_one_in_this_process():
    with Collector(cartpole(), policy_factory=policy, frames_per_batch=16) as collector:
        collector.load_state_dict({"frames": 8, "policy_version": 3})
        assert collector.frames == 8
        next(collector)


def test_no_warning_where_all_is_well():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with multi() as collector:
            next(collector)
