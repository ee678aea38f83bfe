"""tensordict is imported without torch's compiler, and who compiles does not notice: each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LOOK = """
import json, sys
from tensordict import base, utils
import wsync.lean_import
first = "torch._dynamo" in sys.modules
marked = hasattr(utils._check_inbuild, "_dynamo_marked_constant")
import torch, torch._dynamo
from tensordict import TensorDict
from torch._dynamo import trace_rules

known = {**vars(utils), "foreach_copy": base._foreach_copy_compiled}
allowed = [n for n, f in known.items() if callable(f) and id(f) in trace_rules._allowed_callable_ids]
constant = [n for n, f in known.items() if getattr(f, "_dynamo_marked_constant", False) is True]

@torch.compile(backend="eager", fullgraph=True)
def twice(weights):
    return (weights * 2).lock_()

torch.testing.assert_close(twice(TensorDict(a=torch.ones(3)))["a"], torch.full((3,), 2.0))
asked = any(type(finder).__module__ == "wsync.lean_import" for finder in sys.meta_path)
print(json.dumps([first, marked, sorted(allowed), sorted(constant), asked]))
"""


def looked(before: str) -> list[Any]:
    done = subprocess.run([sys.executable, "-c", before + LOOK], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.timeout(120)
def test_the_compiler_is_not_imported_and_is_told_all_when_it_is() -> None:
    compiler, marked, *ours = looked("import wsync, collectors, learning")
    assert (compiler, marked) == (False, False)
    compiler, marked, *usual = looked("import tensordict")
    assert (compiler, marked) == (True, True)
    assert ours == usual and all(usual[:2]) and usual[2] is False


LEARN = """
import json, sys
from collectors import Collector, GymEnv
from learning import PPO, make_critic, make_policy

env = GymEnv("CartPole-v1", num_envs=4)
policy = make_policy(4, env.action_spec)
learner = PPO(policy, make_critic(4), entropy_coef=0.01)
with Collector(lambda: env, policy, frames_per_batch=64) as collector:
    batch = next(iter(collector))
    before = set(sys.modules)
    learner.update(batch)
    print(json.dumps(sorted(sys.modules.keys() - before)))
"""


def test_learning_imports_nothing_while_the_clock_runs() -> None:
    done = subprocess.run([sys.executable, "-c", LEARN], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
