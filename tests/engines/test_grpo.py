"""GRPO with an unmodified vLLM, as the example has it: what is generated gets better, by versions that are known."""

import re
from pathlib import Path

import pytest
from programs import run_python

pytest.importorskip("vllm", reason="needs vLLM: make engines")
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_the_reward_rises(tmp_path: Path) -> None:
    program, variables = ROOT / "examples" / "grpo_vllm.py", {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    done = run_python(program, folder=tmp_path, timeout=600, **variables)
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "vllm.log").read_text()[-4000:]
    rewards = [float(reward) for reward in re.findall("reward (.+?),", done.stdout)]
    assert len(rewards) == 60 and max(rewards[:5]) < 0.1 and min(rewards[-5:]) > 0.3
    for step, versions in enumerate(re.findall(r"by version: (.+);", done.stdout), start=1):
        assert {int(version) for _, version in re.findall(r"(of|and) (\d+)", versions)} <= {step - 1, step}
