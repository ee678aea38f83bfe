"""A model id is a path in the collector, in its policy or in its environment; a miss says what there is."""

from types import SimpleNamespace

import gymnasium
import pytest
from small_models import Scaled, scaled
from stepping import Quiet, policy
from torch import nn

import wsync
from collectors import Collector, GymEnv, ModuleTransform, MultiAsyncCollector, MultiSyncCollector
from wsync import find_model

REWARD = [("next", "reward")]


def cartpole():
    return GymEnv("CartPole-v1", 2, transforms=[ModuleTransform(Scaled(), REWARD, REWARD)])


class Judged(Quiet):
    def __init__(self):
        self.value_net = Scaled()

    def step(self, action):
        return self._observe(), self.value_net.weight.item(), False, False, {}


def judged():
    return GymEnv(gymnasium.wrappers.TimeLimit(Judged(), 9))


def collector_of(cls, *model_ids, make=cartpole, **options):
    schemes = {model_id: wsync.SharedMemWeightSyncScheme() for model_id in model_ids}
    return cls([make], policy(), frames_per_batch=8, weight_sync_schemes=schemes, **options)


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector, MultiAsyncCollector])
@pytest.mark.parametrize(
    "model_id", ["transform[0].module", "env.transform[0].module", "env.transform[-1].module", "env.value_net"]
)
def test_a_module_of_a_transform_is_updated_by_its_path(cls, model_id):
    if cls is not MultiSyncCollector and "-1" in model_id:
        model_id = "transform[-1].module"
    with collector_of(cls, "policy", model_id, make=judged if "net" in model_id else cartpole) as collector:
        assert (next(collector)["next", "reward"] == 1).all()
        collector.update_policy_weights_(weights=scaled(3.0), model_id=model_id)
        newest = next(batch for batch in collector if (batch["next", "reward"] == 3).all())
        collector.update_policy_weights_(weights_dict={"policy": policy(), model_id: scaled(5.0)})
        both = next(batch for batch in collector if (batch["policy_version"] == 2).all())
        assert (both["next", "reward"] == 5).all() and (newest["policy_version"] == 1).all()


MISSES = [
    ("env.transform[0].modul", r"in the collector, env.transform\[0\] has no modul; it has .*\bmodule\b"),
    ("module.wait", r"in its policy, module has no wait; it has weight, bias$"),
    (
        "polcy",
        r"in the collector, it has no polcy; it has env, policy; in its policy, it has no polcy; it has module"
        r".*; in its environment, it has no polcy; it has .*\btransform\b",
    ),
]


@pytest.mark.parametrize(("model_id", "said"), MISSES)
def test_a_miss_says_what_there_is_at_that_level(model_id, said):
    with pytest.raises(LookupError, match=said) as missed:
        collector_of(Collector, model_id)
    assert "Namespace" not in str(missed.value)


# --- the path alone ---


NET = nn.Linear(1, 1)
CONTEXT = SimpleNamespace(
    policy=NET, env=SimpleNamespace(value_net=NET, made=3), transform=[SimpleNamespace(module=NET)], models={"a-b": NET}
)


@pytest.mark.parametrize(
    "path", ["policy", "env.value_net", "transform[0].module", "transform[-1].module", "models['a-b']"]
)
def test_a_path_leads_to_a_model(path):
    assert find_model(CONTEXT, path) is NET


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("polcy", LookupError, "the context has no polcy; it has env, models, policy, transform$"),
        ("env.critic", LookupError, "env has no critic; it has made, value_net$"),
        ("transform[3].module", LookupError, r"transform has no \[3\]; it has \[0\]$"),
        ("transform[0].modul", LookupError, r"transform\[0\] has no modul; it has module$"),
        ("policy[0]", LookupError, r"policy has no \[0\]; it has weight, bias$"),
        ("models['b']", LookupError, r"models has no \['b'\]; it has \['a-b'\]$"),
        ("env.made[0]", LookupError, r"env.made has no \[0\]; it has nothing$"),
        ("env.made", TypeError, "is a int"),
        ("env..made", ValueError, "is not a path"),
        ("", TypeError, "SimpleNamespace"),
    ],
)
def test_the_error_of_a_wrong_path_names_the_first_wrong_part(path, error, message):
    with pytest.raises(error, match=message):
        find_model(CONTEXT, path)


def test_a_context_may_have_get_model():
    class Shelf:
        def get_model(self, model_id):
            return {"critic": NET}[model_id]

    assert find_model(Shelf(), "critic") is NET
    with pytest.raises(LookupError):
        find_model(Shelf(), "actor")
