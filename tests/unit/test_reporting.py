"""Files, terminal, pictures, Weights & Biases: each tells the same run."""

import io
import json
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
from PIL import Image
from rich.console import Console
from tensordict import TensorDict

from collectors.batches import Staleness
from collectors.workers.records import Failures
from learning.progress import WINDOW, Progress, Row, SyncRow
from learning.reporting import Reporter
from learning.reporting.console import ConsoleReporter
from learning.reporting.files import FolderError, RunFiles, read_rows, replace_file, to_json
from learning.reporting.plots import learning_curve, sweep_latency, sweep_returns, sync_latency
from learning.reporting.sweep import groups, read_runs, report, table_rows
from learning.reporting.wandb_logger import WandbLogger
from learning.summary import summarise
from wsync import SharedMemWeightSyncScheme, SyncMetrics, SyncReport

PHASES = {"extract": 1.0, "pack": 2.0, "transfer": 3.0, "wait": 4.0, "apply": 5.0, "acknowledge": 6.0}


def row(n: int, sync: bool = True) -> Row:
    cost = SyncRow(100.0 + n, 100.0, 150.0, 200.0, 18432, PHASES) if sync else None
    return Row(
        1024 * n, 0.1 * n, 10240.0, 0.05 * n, 3 * n, min(3 * n, 100), 20.0 * n, [19.0 * n, 21.0 * n], n, 0.5, 2, 3, 96,
        cost, {"loss_policy": 0.25},
    )  # fmt: skip


def summary(sync: bool = True, status: str = "solved") -> dict:
    metrics = SyncMetrics("shared_mem" if sync else "none")
    if sync:
        metrics.record(SyncReport(1, 18432, 1e-4, tuple(us / 1e6 for us in PHASES.values()), []))
    progress = Progress(frames=1024, episodes=3)
    facts = {"env": "CartPole-v1", "seed": 0, "num_workers": 2}
    return summarise(status, progress, 475.0, metrics, Failures(), Staleness()) | facts


def told(reporter: Reporter, folder: Path, rows: list[Row], end: dict) -> None:
    reporter.begin(folder, {"seed": 0})
    for each in rows:
        reporter.update(each)
    reporter.finish(end)
    reporter.conclude()


def test_an_interrupted_write_leaves_the_former_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    replace_file(path, b'{"frames": 1}')

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        replace_file(path, b'{"frames": 2}')
    assert json.loads(path.read_text()) == {"frames": 1} and [*tmp_path.iterdir()] == [path]


def test_the_files_hold_the_rows_and_the_summary(tmp_path: Path) -> None:
    told(RunFiles(), tmp_path, [row(1), row(2, sync=False)], summary())
    first, second = read_rows(tmp_path)
    assert first == json.loads(json.dumps(row(1).as_dict()))
    assert second["weight_sync"] is None
    content = json.loads((tmp_path / "summary.json").read_text())
    top = "status solved frames seconds frames_per_second episode_return_mean_100 seed weight_sync staleness"
    assert {*top.split()} <= content.keys()
    sync = {"scheme", "updates", "version", "bytes", "latency_us", "phases_us"}
    assert sync <= content["weight_sync"].keys()
    assert content["weight_sync"]["latency_us"].keys() == {"p50", "p95", "p99", "max"}
    assert content["weight_sync"]["phases_us"].keys() == PHASES.keys()


def test_a_resumed_run_begins_with_the_rows_up_to_its_checkpoint(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    told(RunFiles(), before, [row(1), row(2), row(3)], summary())
    with open(before / "metrics.jsonl", "a") as file:
        file.write('{"frames": 4096, "sec')  # the process was killed here
    assert len(list(read_rows(before))) == 3
    told(RunFiles(before, frames=2048), after, [row(4)], summary())
    assert [each["frames"] for each in read_rows(after)] == [1024, 2048, 4096]
    (before / "metrics.jsonl").unlink()  # a checkpoint is enough
    told(RunFiles(before, frames=2048), after, [row(4)], summary())
    assert [each["frames"] for each in read_rows(after)] == [4096]


def test_a_resume_into_its_own_folder_that_cannot_write_leaves_the_rows(tmp_path: Path) -> None:
    told(RunFiles(), tmp_path, [row(1), row(2)], summary())
    (tmp_path / "metrics.unfinished").mkdir()  # in place of a full disk
    with pytest.raises(FolderError):
        told(RunFiles(tmp_path, frames=2048), tmp_path, [row(3)], summary())
    assert [each["frames"] for each in read_rows(tmp_path)] == [1024, 2048]


def test_json_has_no_nan() -> None:
    assert to_json({"a": [float("nan"), 1.0], "b": (float("inf"),)}) == '{"a": [null, 1.0], "b": [null]}'


def test_plain_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    out, folder = io.StringIO(), tmp_path / "[seed=1]" / "[" / "b]"  # no markup
    folder.mkdir(parents=True)
    (folder / "checkpoint.pt").touch()
    reporter = ConsoleReporter("CartPole", 40_960, Console(file=out, width=80), 0.0, resume_command="again: ")
    slow = [replace(row(n), seconds=77 + 0.1 * n) for n in (1, 2)]  # the first one has compiled: it does not count
    failed = summary() | {"status": "failed", "error": "WorkerDied: worker 1"}
    told(reporter, folder, slow, failed)
    reporter.finish(failed | {"resumed_from": {"frames": 1024}})  # at once: it would fail again
    assert out.getvalue().count("continue it by: again: ") == 1
    lines = out.getvalue().splitlines()
    figures = "frames/s 10,240 | return 40.0 (6 episodes) | sync p50 100 µs | version 2 | staleness 0.5 (max 2)"
    figures += " | too old 3 batches"
    assert f"frames 2,048/40,960 | 0:00:03 left | {figures}" in lines
    assert len([line for line in lines if line.startswith("frames ")]) == 2
    assert "\x1b" not in out.getvalue() and "latency p99" not in out.getvalue()  # of one update
    ends = ("Solved after 1,024 frames", f"→ {folder}", f"files: {folder}", "collector.on_worker_failure=restart")
    for part in ("latency p95", "acknowledge", "all updates     0.0001 s (", "return, last 3 ", *ends):
        assert part in out.getvalue()


@pytest.mark.parametrize("sync", [True, False])
def test_the_pictures_are_drawn(tmp_path: Path, sync: bool) -> None:
    told(RunFiles(), tmp_path, [row(n, sync) for n in range(1, 30)], summary(sync))
    for name in ("learning_curve.png", "sync_latency.png"):
        with Image.open(tmp_path / name) as image:
            assert image.width > 1000 and len(set(image.convert("L").tobytes())) > 10  # something is on it
    few, far = [row(n).as_dict() for n in range(1, 6)], summary() | {"solved_at": 4800}
    assert all(x == round(x) for x in sync_latency(few, far).axes[0].get_xticks())
    assert learning_curve(few, far).axes[0].get_ylim()[1] < 200  # what it would take to solve it is out of sight


def test_57_12_a_run_for_wandb_has_names_true_times_and_the_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_NAME", "WANDB_RUN_GROUP"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PROJECT": "mine", "TAGS": "our-tag", "RUN_ID": "our-id"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    wandb.teardown()  # it has read the environment of before
    logger, files = WandbLogger(mode="offline", close_within=120.0, start_after=1e3), RunFiles()
    config = {"env": {"id": "CartPole-v1"}, "algorithm": {"_target_": "learning.PPO"}}
    with SharedMemWeightSyncScheme() as scheme:
        scheme.init_in_process("policy", torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
        for one in (files, logger):
            one.begin(tmp_path, config)
            for n in (1, 2):
                one.update(row(n))
                scheme.send()
                scheme.model(torch.zeros(1))
    logged = time.time()
    for one in (files, logger):
        one.finish(summary())
        one.conclude()
    wandb.teardown()  # its own process writes the file; this waits for it, as the end of a Python process does
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-our-id.wandb")
    written = path.read_bytes()
    names = "train our-tag weight_sync/p99_us latency_us bytes phases_us/wait version staleness_max dropped_frames"
    names += " episode_return_mean_100 loss_policy learning_curve mine"
    for text in (tmp_path.name, "CartPole-v1 PPO", *names.split()):
        assert text.encode() in written
    assert {*re.findall(rb"ledger/policy/0/sent.{1,4}?(\d+)", written, re.DOTALL)} == {b"3", b"4"}  # each as it was
    times = {float(found) for found in re.findall(rb"_timestamp.{1,4}?(\d\.\d+e\+09)", written, re.DOTALL)}
    assert len([one for one in times if one <= logged]) == 2


def test_an_error_of_wandb_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises ImportError
    told(WandbLogger(start_after=0.0), tmp_path, [row(1)], summary())
    assert "logging stopped, the run continues: ModuleNotFoundError" in caplog.text


def swept(sweep: Path, *overrides: str, rows: list[Row], status: str = "solved", **facts: Any) -> None:
    """A run of a sweep; by default it was solved in its first row."""
    folder = sweep / f"{len(list(sweep.iterdir()))}-run"
    folder.mkdir()
    facts = {"solved_after_frames": rows[0].frames, "overrides": list(overrides), **facts}
    end = summary(status=status) | {"num_workers": int(overrides[0][-1]), **facts}
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(one.as_dict())}\n" for one in rows))
    (folder / "summary.json").write_text(json.dumps(end | {"seed": int(overrides[1][-1])}))


def test_a_sweep_is_compared_among_runs_that_are_alike_but_for_the_seed(tmp_path: Path) -> None:
    for workers in (2, 8):
        for seed in (0, 1):
            rows = [row(workers + seed)]  # of which the latency is 100 µs more
            swept(tmp_path, f"num_workers={workers}", f"seed={seed}", "weight_sync=shared_mem", rows=rows)
    runs, _ = read_runs(tmp_path)
    assert list(groups(runs)) == ["num_workers=2", "num_workers=8"]
    medians = [(cells["run"], cells["num_workers"]) for cells, is_median in table_rows(runs) if is_median]
    assert medians == [("median", "2"), ("median", "8")]
    report(tmp_path, Console(file=(out := io.StringIO()), width=60, force_terminal=True, color_system=None))
    page = (tmp_path / "sweep.html").read_text()
    assert "<h1>CartPole-v1: 4 runs</h1>" in page and "<th>run</th><th>return</th><th>num_<wbr>workers</th>" in page
    assert re.search(r"run +return +num_workers +seed", out.getvalue()) and "…" not in out.getvalue()  # nothing is cut
    assert ",sync p50 (us)," in (tmp_path / "sweep.csv").read_text() and "<th>backend</th>" not in page
    assert "in all runs: backend shared_mem, " in out.getvalue()
    (legend,) = sweep_returns({"a": runs, "b": runs, "c": runs[:1]}, "", None).legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b (coincides with a)", "c"]


def test_medians_are_of_runs_that_were_not_cut_off(tmp_path: Path) -> None:
    for workers, seed, status, figure in (
        (2, 0, "solved", 40), (2, 1, "finished", 60), (2, 2, "interrupted", 90), (2, 3, "failed", 90),
        (8, 0, "interrupted", 90), (8, 1, "failed", 90),
    ):  # fmt: skip
        swept(tmp_path, f"num_workers={workers}", f"seed={seed}", rows=[row(figure)], status=status)
    runs, _ = read_runs(tmp_path)
    medians = [cells for cells, is_median in table_rows(runs) if is_median]
    assert [(one["s to solved"], one["frames to solved"]) for one in medians] == [("5.0", "51,200"), ("–", "–")]
    sweep_latency({"all": runs}).savefig(tmp_path / "all.png")
    sweep_latency({"all": [run for run in runs if run.complete]}).savefig(tmp_path / "complete.png")
    assert (tmp_path / "all.png").read_bytes() == (tmp_path / "complete.png").read_bytes()


def test_a_run_that_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    for seed in range(7):
        swept(tmp_path, "num_workers=2", f"seed={seed}", rows=[row(1)])
    told = json.loads((tmp_path / "3-run" / "summary.json").read_text())
    del told["staleness"]
    for number, content in enumerate([b"", b'{"status": "fin', b"[1]", json.dumps(told).encode()]):
        (tmp_path / f"{number}-run" / "summary.json").write_bytes(content)
    for number, content in ((4, b"{}\n"), (5, b"\xff\xfe\n")):
        (tmp_path / f"{number}-run" / "metrics.jsonl").write_bytes(content)
    (tmp_path / "7-run" / ".hydra").mkdir(parents=True)  # it was killed
    out = io.StringIO()
    report(tmp_path, Console(file=out))
    whys = ["/summary.json is damaged: "] * 2 + [" is damaged: "] * 3
    whys += ["/metrics.jsonl is damaged: ", " has no summary.json: "]
    lines = [line for line in out.getvalue().splitlines() if line.startswith("left out: ")]
    for line, number, why in zip(lines, (0, 1, 2, 3, 4, 5, 7), whys, strict=True):
        assert line.startswith(f"left out: {tmp_path}/{number}-run{why}")
    assert out.getvalue().startswith("1 run ")
    assert (tmp_path / "sweep.html").read_text().count("<p>Left out: ") == 7


# --- counters, returns in the order of time, staleness ---


def batch(returns: torch.Tensor, version: int | torch.Tensor = 1) -> TensorDict:
    """A batch of `returns` ``[*B, T]``, in which a frame ends an episode where its return is not nan."""
    size = returns.shape
    done = ~returns.isnan()
    step = {"done": done[..., None], "episode_return": returns.nan_to_num()[..., None]}
    version = torch.as_tensor(version).expand(size)
    return TensorDict({"policy_version": version, "next": TensorDict(step, size)}, size)


NAN = float("nan")


def test_returns_come_in_the_order_of_time_whatever_the_batch_looks_like() -> None:
    returns = torch.tensor([[NAN, 2.0, NAN, 5.0], [1.0, NAN, 4.0, NAN]])
    for shaped in (returns, returns.view(2, 1, 4), returns.view(1, 2, 4)):
        progress = Progress()
        progress.collected(batch(shaped), 1)
        assert list(progress.window) == [1.0, 2.0, 4.0, 5.0]
        assert (progress.episodes, progress.frames) == (4, 8)


def test_solved_takes_a_hundred_episodes() -> None:
    progress = Progress()
    progress.collected(batch(torch.full((WINDOW - 1,), 500.0)), 1)
    assert not progress.solved(475)
    progress.collected(batch(torch.tensor([500.0])), 1)
    assert progress.solved(475)
    assert not progress.solved(501)
    assert not progress.solved(None)


def test_solved_is_to_have_been_reached_once_and_a_resumed_run_keeps_that() -> None:
    progress = Progress()
    progress.collected(batch(torch.full((WINDOW,), 0.86)), 1)
    progress.solved_after = progress.frames
    again = Progress()
    again.load_state_dict(progress.state_dict())
    again.collected(batch(torch.full((WINDOW,), 0.8)), 1)
    for status in ("failed", "finished", "interrupted"):
        told = summarise(status, again, 0.85, SyncMetrics(""), Failures(), Staleness())
        assert (told["solved"], told["solved_after_frames"]) == (True, 100)
        assert told["verdict"].startswith(f"{status.capitalize()} after 200 frames in ")
        assert "mean return 0.800 over the last 100 episodes; 0.85 counts as solved, first" in told["verdict"]


def test_masked_frames_do_not_count() -> None:
    progress = Progress()
    one = batch(torch.tensor([[NAN, 2.0, NAN]]), torch.tensor([[1, 1, 0]]))
    progress.collected(one.set("mask", torch.tensor([[True, True, False]])), 1)
    assert (progress.frames, progress.acted_frames, progress.versions_behind) == (2, 2, 0.0)


def test_staleness_is_the_mean_over_frames_in_which_a_policy_acted() -> None:
    progress = Progress()
    progress.collected(batch(torch.full((4,), NAN), torch.tensor([-1, 1, 2, 3])), 3)
    assert progress.versions_behind / progress.acted_frames == pytest.approx(1.0)
    progress.collected(batch(torch.full((3,), NAN), 3), 3)
    assert progress.versions_behind / progress.acted_frames == pytest.approx(0.5)
    assert progress.staleness_max == 2  # 1 when version 3 was the newest; a random action is of no version


def synced(version: int) -> SyncReport:
    return SyncReport(version, 1000, version * 1e-3, (0.0, 1e-4, 0.0, 0.0, 0.0), [0])


def test_a_row_has_the_cost_of_its_own_update() -> None:
    progress, metrics = Progress(), SyncMetrics("shared_mem")
    progress.begin()
    progress.collected(batch(torch.tensor([3.0])), 1)
    metrics.record(synced(1))
    row = progress.synchronised({"loss": 0.5}, metrics, 1)
    assert row.weight_sync is not None
    assert (row.weight_sync.latency_us, row.weight_sync.bytes) == (pytest.approx(1000), 1000)
    phases = {**dict.fromkeys(PHASES, 0.0), "pack": 100.0, "acknowledge": 900.0}
    assert row.weight_sync.phases_us == pytest.approx(phases)
    assert progress.synchronised({}, metrics, 1).weight_sync is None  # nothing new was reported
    metrics.record(synced(3))
    after = progress.synchronised({}, metrics, 3).weight_sync
    assert after is not None
    assert (after.p50_us, after.p95_us) == (pytest.approx(1000), pytest.approx(3000))


def test_counters_survive_a_checkpoint() -> None:
    progress = Progress()
    progress.begin()
    progress.collected(batch(torch.arange(150.0), 2), 5, Staleness(dropped_batches=2, dropped_frames=32))
    again = Progress()
    again.load_state_dict(progress.state_dict())
    again.collected(batch(torch.full((1,), NAN), 5), 5, Staleness(dropped_batches=1, dropped_frames=16))
    assert (again.staleness_max, again.dropped_batches, again.dropped_frames) == (3, 3, 48)
    again = Progress()
    again.load_state_dict(progress.state_dict())
    assert (again.frames, again.episodes, list(again.window)) == (150, 150, list(progress.window))
    assert again.versions_behind / again.acted_frames == 3.0
    assert 0 < again.seconds <= progress.seconds
    assert again.frames_per_second == pytest.approx(150 / again.seconds)  # of the whole run
    assert again.resumes == 1


def test_the_verdict_on_a_control_names_the_version_that_acted() -> None:
    progress = Progress()
    for _ in range(3):
        progress.collected(batch(torch.full((WINDOW,), 20.0), 0), 0)
    summary = summarise("finished", progress, 475.0, SyncMetrics("none"), Failures(), Staleness())
    assert "Finished after 300 frames" in summary["verdict"]
    assert "475 counts as solved, and was not reached" in summary["verdict"]
    assert "Nothing reached the workers: version 0 acted in all frames" in summary["verdict"]
    assert "it did not learn" in summary["verdict"]
    assert summary["weight_sync"]["latency_us"] == {"p50": None, "p95": None, "p99": None, "max": None}
