"""The folder of docs/environments.md, with a policy, an environment and a callback of a user's own, in train.py."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from programs import run_program

from learning import checkpoint

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("logger=none", "num_envs=4", "frames_per_batch=256", "total_frames=512", "hydra.run.dir=first")
NORMALIZED = ("+env.normalize_observations=true", "+env.rewards=normalized")


def train(folder: Path, *arguments: str) -> None:
    run_program(ROOT / "train.py", *arguments, folder=folder, PYTHONPATH=str(ROOT))


def evaluate(folder: Path, *options: str) -> str:
    """Return what evaluate.py says of the run in `folder` / "second", a line."""
    script = ROOT / "scripts" / "evaluate.py"
    done = run_program(script, "second", "--episodes", "1", *options, folder=folder, status=None, PYTHONPATH=str(ROOT))
    said = done.stdout + done.stderr
    assert said.count("\n") == 1
    return said


@pytest.mark.slow  # tests/unit has its parts
def test_an_experiment_of_ones_own_trains_and_resumes_with_its_statistics_and_its_callback(tmp_path: Path) -> None:
    for path, text in re.findall(
        r"```(?:python|yaml)\n# (my/\S+)\n(.*?)```", (ROOT / "docs" / "environments.md").read_text(), re.DOTALL
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    train(tmp_path, "--config-dir", "my", "experiment=mine", *QUICK, *NORMALIZED)
    train(tmp_path, "--config-dir", "my", "resume=first", "total_frames=1024", "hydra.run.dir=second")
    counts = []
    for run, frames in (("first", ["256", "512"]), ("second", ["768", "1024"])):
        rows = (tmp_path / run / "rows.csv").read_text().splitlines()
        assert [row.partition(",")[0] for row in rows] == ["frames", *frames]
        state = checkpoint.load(tmp_path / run)
        assert any("layers" in name for name in state["learner"]["policy"])
        name = "network.normalizer.moments.0.count"
        statistics = state["learner"]["policy"][name], state["rewards"]["moments.count"]
        counts.append((*map(int, statistics), state["progress"]["frames"]))
    assert counts == [(512, 512, 512), (1024, 1024, 1024)]
    assert evaluate(tmp_path).startswith("return ")  # with the config folder of the run
    (tmp_path / "my").rename(tmp_path / "moved")
    assert evaluate(tmp_path).startswith(
        "evaluate.py: policy._target_=mine.Wide: there is no module 'mine' on sys.path"
    )
    assert evaluate(tmp_path, "--config-dir", "moved").startswith("return ")


COPIED = """
import copy
import random
import numpy
import torch
from learning import PPO

class Copied(PPO):
    def __init__(self, policy, critic, **settings):
        super().__init__(copy.deepcopy(policy), critic, **settings)

    def update(self, batch):
        draws = {"python": random.random(), "numpy": numpy.random.rand()}
        with torch.no_grad():
            now = self.policy.distribution(batch["observation"]).log_prob(batch["action"])
        assert torch.allclose(now, batch["action_log_prob"], atol=1e-3), "another policy has acted"
        return super().update(batch) | draws
"""


@pytest.mark.slow
def test_an_algorithm_of_ones_own_draws_from_seeded_generators_and_its_policy_acts_also_after_a_resume(
    tmp_path: Path,
) -> None:
    (tmp_path / "copied.py").write_text(COPIED)
    (tmp_path / "algorithm").mkdir()
    (tmp_path / "algorithm" / "copied.yaml").write_text("_target_: copied.Copied\nlr: 0.01\n")
    own = ("--config-dir", str(tmp_path))
    train(tmp_path, *own, "algorithm=copied", *QUICK, "seed=3")
    first = json.loads((tmp_path / "first" / "metrics.jsonl").read_text().splitlines()[0])["learning"]
    assert (first["python"], first["numpy"]) == (random.Random(3).random(), np.random.RandomState(3).rand())
    train(tmp_path, *own, "resume=first", "total_frames=1024", "hydra.run.dir=second")
