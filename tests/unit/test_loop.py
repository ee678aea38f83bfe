"""The training loop without workers: what is kept of a run that fails."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import collectors.workers.recovery
from collectors.environments.specs import Spec
from learning import PPO, checkpoint, make_critic, make_policy
from learning.loop import Goal, Training
from learning.ppo import Diverged
from learning.reporting import Reporter
from learning.reporting.files import RunFiles
from learning.stop import StopRequest
from learning.summary import Failures
from wsync import NoWeightSyncScheme


class Ruinous:
    """Collects two good batches, and then one with a reward that is no number."""

    failures: Failures = collectors.workers.recovery.Failures()

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy

    def interrupt(self) -> None:
        pass

    def update_policy_weights_(self, policy: nn.Module, /) -> None:
        pass

    def __iter__(self) -> Iterator[TensorDict]:
        for reward in (1.0, 2.0, torch.nan):
            with torch.no_grad():
                batch: Any = self.policy(TensorDict({"observation": torch.randn(2, 8, 4)}, [2, 8]))
            no = torch.zeros(2, 8, 1, dtype=torch.bool)
            step = {"observation": torch.randn(2, 8, 4), "reward": torch.full((2, 8, 1), reward), "done": no}
            step |= {"terminated": no, "truncated": no, "episode_return": torch.zeros(2, 8, 1)}
            batch["policy_version"] = torch.zeros(2, 8, dtype=torch.int64)
            yield batch.set("next", TensorDict(step, [2, 8]))


class Impatience(Ruinous):
    """Collects two batches; in the third one somebody asks to stop for the second time."""

    def __iter__(self) -> Iterator[TensorDict]:
        yield from itertools.islice(super().__iter__(), 2)
        raise KeyboardInterrupt


class Slow(Reporter):
    """Would take long in the end."""

    concluded = False

    def conclude(self) -> None:
        self.concluded = True


def training(folder: Path, *reporters: Reporter, env: str = "CartPole-v1") -> Training:
    policy = make_policy(4, Spec(torch.Size([2]), torch.int64, n=2), (8,))
    learner, facts = PPO(policy, make_critic(4, (8,))), {"env": env}
    return Training(learner, NoWeightSyncScheme(), Goal(1000), folder, 0.0, reporters=reporters, facts=facts)


def training_with(collector: type[Ruinous], folder: Path, *reporters: Reporter) -> dict[str, Any]:
    one = training(folder, *reporters)
    return one.run(collector(one.learner.policy), StopRequest(), {})


def test_who_asks_twice_to_stop_waits_for_nothing_but_the_files(tmp_path: Path) -> None:
    slow = Slow()
    with pytest.raises(KeyboardInterrupt):
        training_with(Impatience, tmp_path, RunFiles(), slow)
    told = json.loads((tmp_path / "summary.json").read_text())
    assert (told["status"], told["frames"]) == ("interrupted", 32)
    assert checkpoint.load(tmp_path)["progress"]["frames"] == 32
    assert not slow.concluded


def test_networks_that_have_diverged_do_not_replace_the_last_checkpoint(tmp_path: Path) -> None:
    slow = Slow()
    with pytest.raises(Diverged, match="diverged after 48 frames"):
        training_with(Ruinous, tmp_path, slow)
    assert slow.concluded
    kept = checkpoint.load(tmp_path)
    assert kept["progress"]["frames"] == kept["learner"]["frames"] == 32
    assert all(value.isfinite().all() for value in kept["learner"]["policy"].values())


def test_returns_of_another_environment_do_not_count(tmp_path: Path) -> None:
    before = training(tmp_path)
    before.progress.window.extend([500.0] * 100)
    checkpoint.save(tmp_path, before.state_dict())
    same, other = training(tmp_path), training(tmp_path, env="CartPole-v0")
    same.resume(tmp_path)
    other.resume(tmp_path)
    assert same.progress.solved(475.0) and not other.progress.solved(195.0)
    assert same.facts["resumed_from"] == other.facts["resumed_from"]
