"""A model is found by its id: a path of attributes, indices and keys, or by the context's ``get_model``."""

from types import SimpleNamespace

import pytest
from torch import nn

from wsync import find_model

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
