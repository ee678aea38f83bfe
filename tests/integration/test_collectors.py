"""Collectors with real worker processes: weights in every form, failures with names, nothing left behind."""

import gc
import inspect
import multiprocessing
import os
import pickle
import signal
import threading
from contextlib import suppress
from typing import Any

import gymnasium
import pytest
import torch
from collecting import Scores, check_calling_conventions, chosen, policy
from stepping import Quiet
from tensordict.nn import TensorDictModule
from torch import nn

import collectors
import wsync
from collectors import BaseCollector, Collector, GymEnv, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from collectors.distributed import DistributedCollector, RayCollector, RPCCollector
from wsync.testing.models import fill

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


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_calling_convention_reaches_every_worker(scheme):
    trained = policy(1.0)
    with multi(scheme=scheme, trained=trained) as collector:
        check_calling_conventions(collector, trained)


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
        with pytest.raises(wsync.LayoutMismatch, match="unknown"):
            collector.update_policy_weights_(nn.Linear(4, 2))
        with pytest.raises(TypeError, match="int"):
            collector.update_policy_weights_(3)
        with pytest.raises(ValueError, match="more than once"):
            collector.update_policy_weights_(policy(1.0), policy=trained)
        assert chosen(next(collector)) == 0.0
        collector.update_policy_weights_(weights_dict={**good, "policy": policy(1.0)})
        assert chosen(next(collector)) == 1.0


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


def test_batches_have_the_shape_that_was_asked_for_and_are_never_written_again():
    with multi(frames_per_batch=24) as collector:
        copy = (first := next(collector)).clone()
        assert first.batch_size == (2, 2, 6)
        next(collector)
        assert (first == copy).all()
    with multi(cat_results=0, frames_per_batch=24, total_frames=48, track_policy_version=False) as collector:
        batches = list(collector)
        assert [batch.batch_size for batch in batches] == [(4, 6)] * 2
        assert batches[0].get("policy_version", None) is None


@pytest.mark.parametrize(
    ("cls", "workers", "said"),
    [(MultiSyncCollector, 2, "2 × 10 = 20"), (MultiAsyncCollector, 2, "18"), (Collector, 1, "18")],
)
def test_a_share_is_rounded_up_with_a_warning(cls, workers, said):
    with pytest.warns(UserWarning) as warned, multi(cls, workers=workers, frames_per_batch=17) as collector:
        assert next(collector).numel() == int(said.split()[-1])
    (only,) = warned
    assert f"frames_per_batch=17 is rounded up to {said}: " in str(only.message) and only.filename == __file__


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


class Broken(Quiet):
    steps = 0

    def step(self, action):
        self.steps += 1
        if self.steps > 3:
            raise ArithmeticError("the cart fell off the table")
        return super().step(action)


@pytest.fixture(scope="module")
def fork_server():
    with multi():
        pass  # it is there


def explode():
    raise ArithmeticError("no such table")


def test_an_environment_that_raises_is_an_error_with_its_traceback():
    collector = MultiSyncCollector([lambda: Broken()] * 2, policy(), frames_per_batch=16)
    pids = [worker.process.pid for worker in collector.remote_workers]
    with pytest.raises(wsync.WorkerFailed, match="the cart fell off the table"):
        next(collector)
    assert collector.closed and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


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
@pytest.mark.usefixtures("fork_server")
def test_bad_arguments_are_clear_errors_and_leave_nothing(arguments, error, message):
    options = {"create_env_fn": [cartpole()] * 2, "policy": policy(), "frames_per_batch": 16, **arguments}
    gc.collect()  # closes what earlier tests have left
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(error, match=message):
        MultiSyncCollector(**options)
    gc.collect()  # the traceback has kept some
    after = threading.active_count(), len(os.listdir("/proc/self/fd"))
    assert after[0] <= before[0] and after[1] <= before[1]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("cls", "where"), [(MultiSyncCollector, "update"), (MultiSyncCollector, "batch"), (MultiAsyncCollector, "batch")]
)
def test_a_killed_worker_is_named_and_no_other_one_is_left(cls, where, scheme):
    with multi(cls, scheme=scheme) as collector:
        next(collector)
        pids = [worker.process.pid for worker in collector.remote_workers]
        victim = collector.remote_workers[1].process
        os.kill(victim.pid, signal.SIGKILL)
        victim.join(10)
        with pytest.raises(wsync.WorkerDied, match="worker 1"):
            for _ in range(9):  # asynchronous: batches that were ready come first
                collector.update_policy_weights_() if where == "update" else next(collector)
        assert collector.closed and collector.failures.failed == {1: 1}
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


ALL = [
    *(Collector, MultiCollector, MultiSyncCollector, MultiAsyncCollector),
    *(DistributedCollector, RPCCollector, RayCollector),
]
EVERYWHERE = {
    *("create_env_fn", "policy", "frames_per_batch", "total_frames"),
    *("weight_sync_schemes", "max_frames_per_traj"),
}


def test_statistics_of_each_worker_are_refused_unless_they_are_fixed() -> None:
    def normalized(fixed: bool) -> GymEnv:
        env = gymnasium.wrappers.NormalizeObservation(gymnasium.make("CartPole-v1"))
        env.update_running_mean = not fixed
        return GymEnv(gymnasium.wrappers.TimeLimit(env, 9))

    with pytest.raises(wsync.WorkerFailed, match="NormalizeObservation has statistics of its own"):
        MultiSyncCollector([lambda: normalized(False)], policy(), frames_per_batch=16)
    with MultiSyncCollector([lambda: normalized(True)], policy(), frames_per_batch=16) as collector:
        assert next(collector).numel() == 16


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_an_update_returns_its_report(cls: Any) -> None:
    trained = Scores()
    schemes = {"policy": wsync.SharedMemWeightSyncScheme(), "mean": wsync.SharedMemWeightSyncScheme()}
    trained.mean = nn.Linear(4, 1)
    with cls([cartpole()], trained, frames_per_batch=16, weight_sync_schemes=schemes) as collector:
        report = collector.update_policy_weights_()
        assert isinstance(report, wsync.SyncReport)
        assert (report.version, dict(report.workers)) == (2, {0: 2}) and report.seconds > 0
        assert report == schemes["policy"].metrics.last
        both = collector.update_policy_weights_(weights_dict={"policy": trained, "mean": trained.mean})
        assert {name: one.version for name, one in both.items()} == {"policy": 3, "mean": 2}


@pytest.mark.parametrize("cls", ALL)
def test_signatures_name_every_argument(cls: type[BaseCollector]) -> None:
    shown = inspect.signature(cls)
    assert set(shown.parameters) >= EVERYWHERE
    kinds = {one.kind for one in shown.parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    assert shown.parameters["total_frames"].default == -1


class Own(MultiSyncCollector):
    """A user's subclass, which passes its arguments on."""

    def __init__(self, *arguments: Any, colour: str = "red", **options: Any) -> None:
        self.colour = colour
        super().__init__(*arguments, **options)


class OfOneSize(MultiSyncCollector):
    """A user's subclass with fewer arguments."""

    def __init__(self, create_env_fn: Any) -> None:
        super().__init__(create_env_fn, frames_per_batch=16)


@pytest.mark.slow
def test_subclasses_of_users() -> None:
    with Own([cartpole()], frames_per_batch=16, colour="blue") as collector:
        assert collector.colour == "blue"
    with OfOneSize([cartpole()]) as collector:
        assert next(collector).numel() == 16
    assert "colour" in inspect.signature(Own).parameters


# --- the context of a worker has workers of its own: each installed update is passed on to it ---


CONTEXT = multiprocessing.get_context("forkserver")


def linear(value: float) -> nn.Linear:
    return fill(nn.Linear(1, 1, bias=False), value)


class Relay:
    """Has a model and workers of its own, here a pipe."""

    def __init__(self, line, fails_at: float | None = None) -> None:
        self.policy, self.line, self.fails_at = linear(0.0), line, fails_at

    def _pass_on(self, *passed: object) -> None:
        if self.policy.weight.item() == self.fails_at:
            raise ArithmeticError("the workers below are on strike")
        self.line.send(passed)


class Newest(Relay):
    def update_policy_weights_(self, policy_or_weights=None, /, *, weights=None, model_id=None):
        self._pass_on(weights["weight"].item(), model_id)


class Cascade(Relay):
    def cascade_weights(self, model_id):
        self._pass_on(self.policy.weight.item(), model_id)


def relay(kind, scheme, line, fails_at):
    scheme.init_on_receiver("policy", context=kind(line, fails_at), worker_idx=0)
    scheme.connect()
    with suppress(wsync.NotConnected):
        while scheme.receive() is not None:
            pass
    scheme.shutdown()


def started(kind, scheme, fails_at=None):
    mine, theirs = CONTEXT.Pipe()
    scheme.init_on_sender("policy", model=linear(1.0), num_workers=1)
    process = CONTEXT.Process(target=relay, args=(kind, scheme, theirs, fails_at))
    process.start()
    theirs.close()
    return process, mine


CASES = [
    (Newest, "shared_mem", {}),
    (Newest, "multiprocess", {"strategy": "state_dict"}),
    (Newest, "distributed", {}),
    (Cascade, "multiprocess", {}),
    (Cascade, "distributed", {"shared_memory": False}),
]


@pytest.mark.parametrize(("kind", "name", "options"), CASES)
def test_each_installed_update_is_passed_on_before_it_is_acknowledged(kind, name, options):
    with wsync.WeightSyncScheme.from_backend(name, **options) as scheme:
        process, mine = started(kind, scheme)
        scheme.connect()
        for value in (1.0, 2.0, 3.0):
            if value > 1.0:
                scheme.send(linear(value))
            assert mine.poll(), "acknowledged, and not passed on"
            assert mine.recv() == (value, "policy")
    process.join(20)
    assert process.exitcode == 0


@pytest.mark.parametrize(("kind", "name", "options"), [CASES[0], *CASES[3:]])
def test_an_update_that_cannot_be_passed_on_is_an_error_of_the_send(kind, name, options):
    method = "cascade_weights" if kind is Cascade else "update_policy_weights_"
    with wsync.WeightSyncScheme.from_backend(name, **options) as scheme:
        process, mine = started(kind, scheme, fails_at=2.0)
        scheme.connect()
        with pytest.raises(wsync.WorkerFailed, match=f"(?s){method}.*the workers below are on strike"):
            scheme.send(linear(2.0))
        scheme.send(linear(3.0))
        assert [mine.recv()[0], mine.recv()[0]] == [1.0, 3.0]
    process.join(20)


@pytest.mark.parametrize("kind", [Newest, Cascade])
def test_a_published_send_cannot_promise_anything_for_workers_below(kind):
    with wsync.SharedMemWeightSyncScheme(acknowledge="published") as scheme:
        scheme.init_on_sender("policy", model=linear(1.0), num_workers=1)
        own = pickle.loads(pickle.dumps(scheme))
        with pytest.raises(ValueError, match="acknowledge='installed'"):
            own.init_on_receiver("policy", context=kind(None), worker_idx=0)
