"""The training loop without workers: the files of a run that fails."""

import copy
import itertools
import json
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

import collectors.workers.records
from collectors import MultiSyncCollector
from collectors.batches import Staleness
from collectors.environments.specs import Spec
from collectors.envs import GymEnv
from collectors.errors import ConfigError
from learning import IMPALA, MLP, PPO, Policy, checkpoint, make_actor_critic
from learning.actor_critic import Diverged, UnusableBatch
from learning.checkpoint import CheckpointError
from learning.loop import Goal, StopRequest, Training, WeightDelay, delays
from learning.normalization import ObservationNormalizer, RewardNormalizer
from learning.progress import Row
from learning.reporting import Reporter
from learning.reporting.files import FolderError, RunFiles
from wsync import NoWeightSyncScheme, SharedMemWeightSyncScheme, WeightSyncScheme


class FakeCollector:
    """Yields two valid batches, and a third in which sums of rewards overflow."""

    failures = collectors.workers.records.Failures()
    staleness = Staleness()

    def __init__(self, policy: nn.Module) -> None:
        self.policy = policy

    def interrupt(self) -> None:
        pass

    def update_policy_weights_(self, policy: nn.Module, /) -> None:
        pass

    def __iter__(self) -> Iterator[TensorDict]:
        for reward in (1.0, 2.0, 3e38):
            with torch.no_grad():
                batch: Any = self.policy(TensorDict({"observation": torch.randn(2, 8, 4)}, [2, 8]))
            no = torch.zeros(2, 8, 1, dtype=torch.bool)
            step = {"observation": torch.randn(2, 8, 4), "reward": torch.full((2, 8, 1), reward), "done": no}
            step |= {"terminated": no, "truncated": no, "episode_return": torch.zeros(2, 8, 1)}
            batch["policy_version"] = torch.zeros(2, 8, dtype=torch.int64)
            yield batch.set("next", TensorDict(step, [2, 8]))


class TwoBatches(FakeCollector):
    """Ends the run after two batches, and records the weights that are sent."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__(policy)
        self.sent: list[Tensor] = []

    def update_policy_weights_(self, policy: nn.Module, /) -> None:
        self.sent.append(torch.cat([one.detach().flatten() for one in policy.parameters()]))

    def __iter__(self) -> Iterator[TensorDict]:
        return itertools.islice(super().__iter__(), 2)


class InterruptedCollector(FakeCollector):
    """Yields two batches; a second Ctrl-C arrives during the third."""

    def __iter__(self) -> Iterator[TensorDict]:
        yield from itertools.islice(super().__iter__(), 2)
        raise KeyboardInterrupt


class RecordingReporter(Reporter):
    """Records whether it was concluded."""

    concluded = False

    def conclude(self) -> None:
        self.concluded = True


def training(folder: Path, *reporters: Reporter, scheme: type[WeightSyncScheme] = NoWeightSyncScheme) -> Training:
    four, choice = Spec(torch.Size([4]), torch.float32), Spec(torch.Size([2]), torch.int64, n=2)
    learner = PPO(*make_actor_critic(partial(MLP, hidden=(8,)), four, choice))
    return Training(learner, scheme(), Goal(1000), folder, 0.0, reporters=reporters)


def training_with(collector: type[FakeCollector], folder: Path, *reporters: Reporter) -> dict[str, Any]:
    one = training(folder, *reporters)
    return one.run(collector(one.learner.policy), StopRequest(), {})


@pytest.mark.parametrize("learner", [PPO, IMPALA])
@pytest.mark.parametrize(("sync_each", "sends"), [("update", 2), ("epoch", 6)])
def test_weights_are_sent_after_each_update_or_after_each_pass_over_a_batch(
    learner: Any, sync_each: str, sends: int, tmp_path: Path
) -> None:
    one = training(tmp_path)
    one.learner = learner(one.learner.policy, one.learner.critic, epochs=3)
    one.goal, one.sync_each = Goal(32), sync_each
    collector = TwoBatches(one.learner.policy)
    one.run(collector, StopRequest(), {})
    assert len({tuple(weights.tolist()) for weights in collector.sent}) == len(collector.sent) == sends


def test_after_a_second_interrupt_only_the_files_are_written(tmp_path: Path) -> None:
    reporter = RecordingReporter()
    with pytest.raises(KeyboardInterrupt):
        training_with(InterruptedCollector, tmp_path, RunFiles(), reporter)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["frames"]) == ("interrupted", 32)
    assert checkpoint.load(tmp_path)["progress"]["frames"] == 32
    assert not reporter.concluded


class RefusingCollector(FakeCollector):
    """Its workers refuse weights that are not finite."""

    def update_policy_weights_(self, policy: nn.Module, /) -> None:
        if not all(one.isfinite().all() for one in policy.parameters()):
            raise RuntimeError("a worker refused the weights")


@pytest.mark.parametrize("sync_each", ["update", "epoch"])
def test_networks_that_have_diverged_do_not_replace_the_last_checkpoint(sync_each: str, tmp_path: Path) -> None:
    reporter = RecordingReporter()
    one = training(tmp_path, reporter)
    one.sync_each = sync_each
    with pytest.raises(Diverged, match="diverged after 48 frames"):
        one.run(RefusingCollector(one.learner.policy), StopRequest(), {})
    assert reporter.concluded and one.learner.after_epoch is None
    kept = checkpoint.load(tmp_path)
    assert kept["progress"]["frames"] == kept["learner"]["frames"] == 32
    assert all(value.isfinite().all() for value in kept["learner"]["policy"].values())


def test_statistics_are_set_before_the_first_batch_is_learnt_from_and_resumed(tmp_path: Path) -> None:
    one = training(tmp_path)
    one.observations = ObservationNormalizer(Spec(torch.Size([4]), torch.float32))
    seen: list[int] = []

    class Learner(PPO):
        def update(self, batch: Any) -> dict[str, float]:
            assert one.observations is not None
            seen.append(int(one.observations.moments[0].count))
            return super().update(batch)

    one.learner = Learner(one.learner.policy, one.learner.critic)
    collector = FakeCollector(one.learner.policy)
    with pytest.raises(Diverged):
        one.run(collector, StopRequest(), {})
    assert seen[:2] == [16, 16] and seen[2] == 32  # afterwards a batch is learnt from as it was acted on
    one.rewards.moments.count.fill_(7)
    checkpoint.save(tmp_path, one.state_dict())
    again = training(tmp_path, scheme=SharedMemWeightSyncScheme)
    again.resume(tmp_path)
    assert again.rewards.moments.count.item() == 7


def test_a_control_is_not_resumed_with_weights_that_were_learnt(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, training(tmp_path).state_dict())
    with pytest.raises(ConfigError, match="workers would keep the weights of the checkpoint"):
        training(tmp_path).resume(tmp_path)


@pytest.mark.parametrize("key", ["observation", ("next", "reward")])
def test_values_that_are_not_finite_change_nothing_and_the_checkpoint_is_written(tmp_path: Path, key: Any) -> None:
    one = training(tmp_path)
    one.rewards = RewardNormalizer("normalized")
    one.observations = ObservationNormalizer(Spec(torch.Size([4]), torch.float32))

    class Collector(FakeCollector):
        def __iter__(self) -> Iterator[TensorDict]:
            for number, batch in enumerate(super().__iter__()):
                if number == 1:
                    batch[key][0, 3, 0] = torch.inf
                yield batch

    with pytest.raises(UnusableBatch, match=r"is not finite at \[0, 3\] of the batch"):
        one.run(Collector(one.learner.policy), StopRequest(), {})
    for moments in (one.observations.moments[0], one.rewards.moments):
        assert moments.mean.isfinite().all() and int(moments.count) == 16
    kept = checkpoint.load(tmp_path)
    assert kept["learner"]["frames"] == 16 and all(x.isfinite().all() for x in kept["learner"]["policy"].values())


# --- the first signal is a request to stop; a second SIGINT has its usual effect ---


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_a_request(number: signal.Signals, status: int) -> None:
    before, calls = signal.getsignal(number), []
    with StopRequest() as stop:
        assert (stop.requested, stop.exit_status) == (False, 0)
        stop.add_callback(lambda: calls.append("before"))
        os.kill(os.getpid(), number)
        stop.add_callback(lambda: calls.append("after"))
        assert (stop.requested, stop.exit_status, calls) == (True, status, ["before", "after"])
        assert (signal.getsignal(number) is before) == (number is signal.SIGINT)
    assert signal.getsignal(number) is before


def test_the_second_signal_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_57_10_a_repeated_sigterm_is_one_request_and_sigusr1_asks_for_a_checkpoint() -> None:
    calls: list[int] = []
    with StopRequest() as stop:
        stop.add_callback(lambda: calls.append(stop.exit_status))
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (stop.wants_checkpoint, stop.requested) == (True, False)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert [stop.exit_status] == calls == [128 + signal.SIGTERM]


def test_outside_the_main_thread_signals_are_not_caught() -> None:
    seen = []

    def work() -> None:
        with StopRequest() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


# --- weights that are handed on late ---


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
    learner = Recorded(*make_actor_critic(MLP, env.observation_spec["observation"], env.action_spec), lr=1e-2)
    delay = WeightDelay(late if isinstance(late, int) else iter(late))
    training = Training(learner, scheme, Goal(64 * 6), tmp_path, reporters=[reporter], delay=delay)
    with MultiSyncCollector(
        [lambda: GymEnv("CartPole-v1")] * 2, learner.policy, frames_per_batch=64, weight_sync_schemes={"policy": scheme}
    ) as collector:
        training.run(collector, StopRequest(), {})
    assert learner.acted == acting[:6]
    assert [row.staleness for row in reporter.rows] == [batch - acting[batch] for batch in range(6)]
    assert [row.version for row in reporter.rows] == [1 + version for version in acting[1:]]


# --- a checkpoint is whole or not there, and nothing in it is executed ---


STATE = {
    "learner": {"policy": {"w": torch.arange(1000.0)}, "frames": 3},
    "progress": {"window": [1.0, 2.0], "first": None},
}


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt is missing"):
        checkpoint.load(tmp_path)
    checkpoint.save(tmp_path, {"old": 1})
    path = checkpoint.save(tmp_path, STATE)
    state = checkpoint.load(tmp_path)
    assert torch.equal(state["learner"]["policy"].pop("w"), torch.arange(1000.0))
    assert state == {"learner": {"policy": {}, "frames": 3}, "progress": STATE["progress"]}
    assert os.listdir(tmp_path) == [path.name]


def test_where_nothing_can_be_removed_either_it_says_that_it_could_not_be_written(tmp_path: Path) -> None:
    """As in a file system that the kernel has made read-only."""
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match="could not be written: Not a directory"):
        checkpoint.save(tmp_path / "file", STATE)


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, 0.99])
def test_a_truncated_one_is_refused(tmp_path: Path, kept: float) -> None:
    path = checkpoint.save(tmp_path, STATE)
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(CheckpointError, match="truncated, or not a checkpoint"):
        checkpoint.load(tmp_path)


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("trapped",)


@pytest.mark.parametrize("how", ["text", "pickle", "torch"])
def test_a_foreign_file_is_refused_and_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / checkpoint.FILE
    if how == "text":
        path.write_text("hello\n" * 100)
    elif how == "pickle":
        path.write_bytes(pickle.dumps(Trap()))
    else:
        torch.save({"format": checkpoint.FORMAT, "state": Trap()}, path)
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path)
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("content", [torch.zeros(3), {"state": {}}, {"format": "another", "state": {}}])
def test_another_programs_file_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / checkpoint.FILE)
    with pytest.raises(CheckpointError, match=r"is not a checkpoint of train\.py"):
        checkpoint.load(tmp_path)
