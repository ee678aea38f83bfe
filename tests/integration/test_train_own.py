"""The folder of docs/environments.md, with a policy and an environment of a user's own, in train.py."""

import re
from pathlib import Path

import pytest
from programs import run_program

from learning import checkpoint

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("logger=none", "num_envs=4", "frames_per_batch=256", "total_frames=512", "hydra.run.dir=first")
NORMALIZED = ("+env.normalize_observations=true", "+env.rewards=normalized")


def train(folder: Path, *arguments: str) -> None:
    done = run_program(ROOT / "train.py", *arguments, folder=folder, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # tests/unit has its parts
def test_a_policy_and_an_environment_of_ones_own_train_and_resume_with_their_statistics(tmp_path: Path) -> None:
    for path, text in re.findall(
        r"```(?:python|yaml)\n# (my/\S+)\n(.*?)```", (ROOT / "docs" / "environments.md").read_text(), re.DOTALL
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    own = ("--config-dir", "my", "env=gate", "policy=wide")
    train(tmp_path, *own, *QUICK, *NORMALIZED)
    train(tmp_path, "--config-dir", "my", "resume=first", "total_frames=1024", "hydra.run.dir=second")
    counts = []
    for run in ("first", "second"):
        state = checkpoint.load(tmp_path / run)
        assert any("layers" in name for name in state["learner"]["policy"])
        name = "network.normalizer.moments.0.count"
        statistics = state["learner"]["policy"][name], state["rewards"]["count"]
        counts.append((*map(int, statistics), state["progress"]["frames"]))
    assert counts == [(512, 512, 512), (1024, 1024, 1024)]
