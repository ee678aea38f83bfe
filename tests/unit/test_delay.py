from __future__ import annotations

import copy
from itertools import islice
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from collectors import Collector, MultiSyncCollector
from collectors.envs import GymEnv
from learning import IMPALA, Policy, make_critic, make_policy
from learning.loop import Goal, StopRequest, Training, WeightDelay, delays
from learning.progress import Row
from learning.reporting import Reporter
from wsync import SharedMemWeightSyncScheme


def test_weights_are_handed_on_a_number_of_updates_late() -> None:
    delay, model, sent = WeightDelay(3), nn.Linear(1, 1, bias=False), []
    for update in range(8):
        nn.init.constant_(model.weight, update)
        due = delay.exchange(model)
        sent.append(None if due is None else due.weight.item())
        assert len(delay) == min(update + 1, 3)
    assert sent == [None, None, None, 0.0, 1.0, 2.0, 3.0, 4.0]


def test_delays_are_constant_drawn_or_recorded(tmp_path: Path) -> None:
    assert delays(3) == 3
    drawn = [list(islice(delays(2, 4, seed=seed), 500)) for seed in (0, 0, 1)]  # pyright: ignore[reportArgumentType]
    assert {*drawn[0]} == {2, 3, 4, 5, 6} and drawn[0] == drawn[1] != drawn[2]
    (tmp_path / "metrics.jsonl").write_text('{"staleness": 0.2}\n{"staleness": 3.8}\n')
    assert list(islice(delays(0, recorded=tmp_path), 5)) == [0, 4, 0, 4, 0]  # pyright: ignore[reportArgumentType]


class Rows(Reporter):
    """Keeps the rows."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def update(self, row: Row) -> None:
        self.rows.append(row)


class Recorded(IMPALA):
    """Records which version of the policy has acted in each batch, found by the log-probabilities of its frames."""

    def __init__(self, *args: nn.Module, **options: int) -> None:
        super().__init__(*args, **options)
        self.versions = [copy.deepcopy(self.policy)]
        self.acted: list[int] = []

    def update(self, batch: TensorDict) -> dict[str, float]:
        self.acted.append(*[i for i, version in enumerate(self.versions) if could_have_acted(version, batch)])
        stats = super().update(batch)
        self.versions.append(copy.deepcopy(self.policy))
        return stats


def could_have_acted(policy: Policy, batch: TensorDict) -> bool:
    log_prob = policy.distribution(batch["observation"]).log_prob(batch["action"])
    return torch.allclose(log_prob, batch["action_log_prob"], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("late", "acting"),  # the second: after so many updates
    [(0, [0, 1, 2, 3, 4, 5, 6]), (2, [0, 0, 0, 1, 2, 3, 4]), ([2, 0, 0, 1, 0, 0], [0, 0, 0, 3, 3, 5, 6])],
)
def test_workers_act_with_the_weights_of_so_many_updates_ago_and_the_rows_tell_it(
    late: int | list[int], acting: list[int], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    env, scheme, reporter = GymEnv("CartPole-v1"), SharedMemWeightSyncScheme(), Rows()
    learner = Recorded(make_policy(4, env.action_spec), make_critic(4), lr=1e-2)
    delay = WeightDelay(late if isinstance(late, int) else iter(late))
    training = Training(learner, scheme, Goal(64 * 6), tmp_path, reporters=[reporter], delay=delay)
    with MultiSyncCollector(
        [lambda: GymEnv("CartPole-v1")] * 2, learner.policy, frames_per_batch=64, weight_sync_schemes={"policy": scheme}
    ) as collector:
        training.run(collector, StopRequest(), {})
    assert learner.acted == acting[:6]
    assert [row.staleness for row in reporter.rows] == [batch - acting[batch] for batch in range(6)]
    assert [row.version for row in reporter.rows] == [1 + version for version in acting[1:]]


@pytest.mark.parametrize("then", [3, 2, 1, 0])
def test_a_resumed_run_keeps_the_delay(then: int, tmp_path: Path) -> None:
    """It has a delay of 2, and goes on with another one, or the same."""
    torch.manual_seed(0)
    env, reporter, versions = GymEnv("CartPole-v1"), Rows(), []
    for batches, late in ((4, 2), (8, then)):
        learner = Recorded(make_policy(4, env.action_spec), make_critic(4), lr=1e-2)
        scheme, delay = SharedMemWeightSyncScheme(), WeightDelay(late)
        training = Training(learner, scheme, Goal(32 * batches), tmp_path, reporters=[reporter], delay=delay)
        if versions:
            training.resume(tmp_path)
            learner.versions = versions
        with Collector(
            lambda: GymEnv("CartPole-v1"), delay.acting_policy(learner.policy), frames_per_batch=32,
            weight_sync_schemes={"policy": scheme},
        ) as collector:  # fmt: skip
            collector.load_state_dict({"frames": training.progress.frames, "policy_version": training.progress.version})
            training.run(collector, StopRequest(), {})
        versions = learner.versions
    expected = {3: [2, 2, 3, 4], 2: [2, 3, 4, 5], 1: [2, 4, 5, 6], 0: [4, 5, 6, 7]}[then]
    assert learner.acted == expected
    assert [row.staleness for row in reporter.rows[4:]] == [batch - acted for batch, acted in enumerate(expected, 4)]
