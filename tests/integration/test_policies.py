"""The policies that a collector takes: factories, bare modules, what is no policy; and schemes as they are given."""

import gc
import os
import threading
import warnings

import pytest
import torch
from collecting import Scores, cartpole, chosen, policy
from tensordict import TensorDict
from torch import nn

import wsync
from collectors import (
    Collector,
    GymEnv,
    MultiAsyncCollector,
    MultiProcessedWeightUpdater,
    MultiSyncCollector,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from collectors.distributed import DistributedCollector, RPCCollector

EVERY = [Collector, MultiSyncCollector, MultiAsyncCollector]


class OfTensorDict(Scores):
    """The same as a function of a TensorDict, which it does not declare."""

    def forward(self, given):
        return given.set("action", super().forward(given["observation"]))


def rule(given):
    """A policy without weights."""
    return given.set("action", (given["observation"][..., 2] > 0).long())


def scoring_rule(given):
    """The same; its actions are scores, as those of the policies with weights."""
    return given.set("action", nn.functional.one_hot(rule(given)["action"], 2).float())


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
        collector.update_policy_weights_(policy(-1.0))
        batch = next(collector)
        assert chosen(batch) == 0.0 and (batch["policy_version"] == 1).all()


def test_one_factory_for_each_worker_that_is_restarted():
    factories = [lambda: policy(1.0), lambda: policy(-1.0)]
    with collect_with(MultiSyncCollector, policy_factory=factories, on_worker_failure="restart") as collector:
        next(collector)
        os.kill(collector.remote_workers[1].process.pid, 9)
        both = next(batch for batch in collector if collector.failures.restarted[1] and len(batch) == 2)
        assert [chosen(both[0]), chosen(both[1])] == [1.0, 0.0]
        collector.update_policy_weights_(policy(1.0))
        assert chosen(when(collector, 1)) == 1.0


@pytest.mark.parametrize("cls", EVERY)
def test_a_list_of_factories_has_the_length_of_the_workers(cls):
    with pytest.raises(ValueError, match=r"policy_factory has 3 functions, and there are [12] worker"):
        collect_with(cls, policy_factory=[policy] * 3)
    with pytest.raises(TypeError, match="policy_factory is a function that makes a policy, or a list of them, not 3"):
        collect_with(cls, policy_factory=3)
    with pytest.raises(TypeError, match="policy_factory is a function that makes a policy, or a list of them, not 'a'"):
        collect_with(cls, workers=1, policy_factory=["a"])
    if cls is Collector:
        with collect_with(cls, policy_factory=[lambda: policy(-1.0)]) as collector:
            assert chosen(next(collector)) == 0.0


@pytest.mark.parametrize("cls", [*EVERY, DistributedCollector])
def test_a_policy_that_only_a_factory_makes_has_the_default_scheme(cls):
    with collect_with(cls, policy_factory=lambda: policy(1.0)) as collector:
        assert list(collector.weight_sync_schemes) == ["policy"]
        batch = next(collector)
        assert chosen(batch) == 1.0 and (batch["policy_version"] == 0).all()
        collector.update_policy_weights_(policy(-1.0))
        assert chosen(when(collector, 1)) == 0.0


@pytest.mark.parametrize("cls", EVERY)
def test_a_policy_without_weights_that_a_factory_makes_has_none(cls):
    with collect_with(cls, policy_factory=lambda: rule) as collector:
        batch = next(collector)
        assert (batch["action"] == (batch["observation"][..., 2] > 0)).all()
        assert collector.weight_sync_schemes == {} and collector.policy_version == 0
        with pytest.raises(KeyError, match="no weight sync scheme for model 'policy'"):
            collector.update_policy_weights_(policy())


def test_policies_with_weights_and_without_are_an_error_that_leaves_nothing():
    with collect_with(MultiSyncCollector, policy()):
        pass  # the fork server is there
    gc.collect()
    threads, descriptors = {*threading.enumerate()}, len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=r"with weights, and for worker\(s\) \[1\] without"):
        collect_with(MultiSyncCollector, policy_factory=[policy, lambda: scoring_rule])
    assert threads >= {*threading.enumerate()}  # those of earlier tests may end meanwhile
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    collector = collect_with(MultiSyncCollector, policy_factory=[policy, lambda: scoring_rule], weight_sync_schemes={})
    with collector, pytest.raises(KeyError, match="there are: none at all"):
        collector.update_policy_weights_(policy())


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
            collector.update_policy_weights_({0: policy()}, worker_ids=[1])
        assert next(collector)["policy_version"][:, 0, 0].tolist() == [4, 5]


def test_models_that_belong_together_are_for_the_same_workers():
    trained = policy()
    schemes = {name: wsync.SharedMemWeightSyncScheme() for name in ("policy", "module")}
    with collect_with(MultiSyncCollector, trained, weight_sync_schemes=schemes) as collector:
        collector.update_policy_weights_(weights_dict={"policy": {0: policy()}, "module": {0: Scores(-1.0)}})
        assert [scheme.version for scheme in schemes.values()] == [2, 2]
        assert next(collector)["policy_version"][:, 0, 0].tolist() == [2, 1]
        for other in ({1: Scores()}, Scores()):
            with pytest.raises(ValueError, match=r"in an update of worker\(s\)"):
                collector.update_policy_weights_(weights_dict={"policy": {0: policy()}, "module": other})
        collector.update_policy_weights_(weights_dict={"policy": {0: policy(), 1: policy()}, "module": Scores()})
        assert (next(collector)["policy_version"] == 3).all()


def test_weights_for_some_workers_may_be_the_first():
    with collect_with(MultiSyncCollector, policy_factory=lambda: policy(1.0)) as collector:
        collector.update_policy_weights_({1: policy(-1.0)})
        batch = next(collector)
        assert [chosen(batch[0]), chosen(batch[1])] == [1.0, 0.0]
        assert batch["policy_version"][:, 0, 0].tolist() == [0, 1]


def test_weights_for_the_only_worker_of_one_process():
    with collect_with(Collector, policy(1.0)) as collector:
        collector.update_policy_weights_({0: policy(-1.0)})
        assert chosen(next(collector)) == 0.0
        with pytest.raises(ValueError, match="1"):
            collector.update_policy_weights_({1: policy(-1.0)})


# --- schemes that were initialised already ---


@pytest.mark.parametrize("cls", EVERY)
def test_a_scheme_that_is_initialised_already_is_an_error_that_says_which_line_to_leave_out(cls):
    with wsync.SharedMemWeightSyncScheme() as scheme:
        scheme.init_on_sender("policy", model=policy(), num_workers=2)
        with pytest.raises(RuntimeError, match=r"leave out the line scheme.init_on_sender\('policy', …\)"):
            collect_with(cls, policy(), weight_sync_schemes={"policy": scheme})
        assert scheme.model_id == "policy", "it is the user's, and was shut down"
        scheme.shutdown()
        with collect_with(cls, policy(), weight_sync_schemes={"policy": scheme}) as collector:
            next(collector)


def test_one_scheme_for_two_models_is_an_error():
    scheme = wsync.SharedMemWeightSyncScheme()
    with pytest.raises(ValueError, match="'policy' and 'module' have the same scheme object"):
        collect_with(MultiSyncCollector, policy(), weight_sync_schemes={"policy": scheme, "module": scheme})


# --- updaters of the older API ---


@pytest.mark.filterwarnings("ignore:.*of the older API:DeprecationWarning")
@pytest.mark.parametrize(
    ("cls", "updater"),
    [
        (Collector, VanillaWeightUpdater),
        (MultiSyncCollector, MultiProcessedWeightUpdater),
        (MultiAsyncCollector, WeightUpdaterBase),
    ],
)
def test_an_updater_with_only_a_factory(cls, updater):
    with collect_with(cls, policy_factory=lambda: policy(1.0), weight_updater=updater) as collector:
        assert chosen(next(collector)) == 1.0
        collector.update_policy_weights_(policy(-1.0))
        assert chosen(when(collector, 1)) == 0.0
        collector.update_policy_weights_(policy(1.0).state_dict())
        assert chosen(when(collector, 2)) == 1.0


@pytest.mark.filterwarnings("ignore:.*of the older API:DeprecationWarning")
def test_an_updater_that_gets_the_weights_itself_with_only_a_factory():
    trained = policy(-1.0)

    def updater():
        return MultiProcessedWeightUpdater(get_server_weights=lambda: TensorDict.from_module(trained).data)

    with collect_with(MultiSyncCollector, policy_factory=lambda: policy(1.0), weight_updater=updater) as collector:
        collector.update_policy_weights_()
        assert chosen(next(collector)) == 0.0
    for cls in EVERY:
        with pytest.raises(ValueError, match="nothing to update: the policy of policy_factory has no weights"):
            collect_with(cls, policy_factory=lambda: rule, weight_updater=VanillaWeightUpdater)


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


def test_a_bare_network_acts_and_its_parts_are_models():
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    schemes = {name: wsync.SharedMemWeightSyncScheme() for name in ("policy", "[2]")}
    with collect_with(MultiSyncCollector, network, weight_sync_schemes=schemes) as collector:
        batch = next(collector)
        torch.testing.assert_close(batch["action"], network(batch["observation"]).detach())
        collector.update_policy_weights_(nn.Linear(8, 2).requires_grad_(False), model_id="[2]")
    with Collector(lambda: GymEnv("Pendulum-v1"), nn.Linear(3, 1), frames_per_batch=4) as collector:
        assert next(collector)["action"].shape == (4, 1)


def test_a_bare_module_that_a_factory_makes_acts():
    with collect_with(MultiSyncCollector, policy_factory=lambda: Scores(-1.0)) as collector:
        assert chosen(next(collector)) == 0.0
        collector.update_policy_weights_(Scores(1.0))
        assert chosen(next(collector)) == 1.0


def test_a_bare_module_is_wrapped_in_a_rollout_too():
    batch = GymEnv("CartPole-v1", 2).rollout(5, Scores(-1.0))
    assert chosen(batch) == 0.0


# --- what is no policy ---


class OfTwo(Scores):
    def forward(self, observation, goal):
        return super().forward(observation)


@pytest.mark.parametrize("cls", [*EVERY, DistributedCollector])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (3, "a policy is a module, or a function of a TensorDict, not a int"),
        ("policy", "not a str"),
        (OfTwo(), r"OfTwo\(observation, goal\) cannot be called with one argument"),
        (lambda observation, goal: observation, "cannot be called with one argument"),
    ],
)
def test_what_cannot_be_called_with_an_observation_is_a_type_error_at_construction(cls, wrong, said):
    with pytest.raises(TypeError, match=said):
        collect_with(cls, wrong)


class Unfit(nn.Module):
    def forward(self, observation):
        return observation.no_such_method()


class Pair(nn.Module):
    def forward(self, observation):
        return observation, observation


@pytest.mark.parametrize("cls", [*EVERY, DistributedCollector, RPCCollector])
@pytest.mark.parametrize("wrong", [Unfit(), nn.Linear(7, 2), Pair()])
def test_a_module_that_takes_neither_form_is_a_type_error_at_construction_with_both_reasons(cls, wrong):
    with pytest.raises(
        TypeError, match=r"(?s)not usable as a policy.*with the tensor of .*with a TensorDict: "
    ) as raised:
        collect_with(cls, wrong)
    if cls is not Collector:
        assert isinstance(raised.value, wsync.WorkerFailed) and list(raised.value.workers) in ([0], [1])


def test_errors_of_a_module_that_declares_its_input_are_its_own():
    class Declared(nn.Module):
        def forward(self, tensordict):
            raise ArithmeticError("no such action")

    with pytest.raises(ArithmeticError, match="no such action"):
        collect_with(Collector, Declared())


def test_a_lazy_module_is_initialised_before_its_weights_are_synchronised():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of lazy modules
        with collect_with(Collector, policy_factory=lambda: nn.LazyLinear(2)) as collector:
            collector.update_policy_weights_(nn.Linear(4, 2))
            assert (next(collector)["policy_version"] == 1).all()
