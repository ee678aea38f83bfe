"""Files, terminal, report of a sweep, Weights & Biases: each tells the same run."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import wandb
from rich.console import Console

from collectors.staleness import Staleness
from collectors.workers.records import Failures
from learning.progress import Progress, Row, SyncRow
from learning.reporting import Reporter
from learning.reporting.console import ConsoleReporter
from learning.reporting.files import FolderError, RunFiles, read_rows, to_json
from learning.reporting.sweep import report
from learning.reporting.wandb_logger import WandbLogger
from learning.summary import summarise
from wsync import SyncMetrics, SyncReport

PHASES = {"extract": 1.0, "pack": 2.0, "transfer": 3.0, "wait": 4.0, "apply": 5.0, "acknowledge": 6.0}


def row(n: int, sync: bool = True) -> Row:
    cost = SyncRow(100.0 + n, 100.0, 150.0, 200.0, 18432, 0.2, PHASES) if sync else None
    return Row(
        frames=1024 * n, seconds=0.1 * n, frames_per_second=10240.0, seconds_learning=0.05 * n, episodes=3 * n,
        episodes_in_mean=min(3 * n, 100), episode_return_mean_100=20.0 * n, episode_returns=[19.0 * n, 21.0 * n],
        version=n, staleness=0.5, staleness_max=2, dropped_batches=3, dropped_frames=96, weight_sync=cost,
        learning={"loss_policy": 0.25},
    )  # fmt: skip


def summary(sync: bool = True, status: str = "solved") -> dict[str, Any]:
    metrics = SyncMetrics("shared_mem" if sync else "none")
    if sync:
        metrics.record(SyncReport(1, 18432, 1e-4, {name: us / 1e6 for name, us in PHASES.items()}, {}))
    told = summarise(status, Progress(frames=1024, episodes=3), 475.0, metrics, Failures(), {}, Staleness())
    return told | {"env": "CartPole-v1", "seed": 0, "num_workers": 2, "num_envs": 16, "overrides": []}


def told(reporter: Reporter, folder: Path, rows: list[Row], end: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True, parents=True)
    reporter.begin(folder, {"seed": 0})
    for each in rows:
        reporter.update(each)
    reporter.finish(end)
    reporter.conclude()


def test_the_files_hold_the_rows_and_the_summary(tmp_path: Path) -> None:
    told(RunFiles(), tmp_path, [row(1), row(2, sync=False)], summary())
    first, second = read_rows(tmp_path)
    assert first == json.loads(json.dumps(row(1).as_dict())) and second["weight_sync"] is None
    content = json.loads((tmp_path / "summary.json").read_text())
    assert {"status", "solved", "frames", "seconds", "episode_return_mean_100", "seed", "staleness"} <= content.keys()
    assert {"scheme", "updates", "version", "bytes", "latency_us", "phases_us"} <= content["weight_sync"].keys()


def test_a_resumed_run_begins_with_the_rows_up_to_its_checkpoint(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    told(RunFiles(), before, [row(1), row(2), row(3)], summary())
    with open(before / "metrics.jsonl", "a") as file:
        file.write('{"frames": 4096, "sec')  # the process was killed here
    assert len(list(read_rows(before))) == 3
    told(RunFiles(before, frames=2048), after, [row(4)], summary())
    assert [each["frames"] for each in read_rows(after)] == [1024, 2048, 4096]


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
    console = Console(file=out, width=100)
    told(ConsoleReporter("CartPole", 4096, console, interval=0.0), folder, [row(1), row(2)], summary())
    lines = [line for line in out.getvalue().splitlines() if line.startswith("frames ")]
    assert [line.split()[1] for line in lines] == ["1,024/4,096", "2,048/4,096"]
    assert all(one in lines[0] for one in ("frames/s 10,240", "return 20.0", "sync p50 100", "version 1", "staleness"))
    assert "\x1b" not in out.getvalue() and str(folder) in out.getvalue() and "acknowledge" in out.getvalue()


@pytest.mark.parametrize("status", ["solved", "finished", "interrupted", "failed"])
def test_a_live_display_in_a_terminal(tmp_path: Path, status: str) -> None:
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True, _environ={"TERM": "xterm"})
    told(ConsoleReporter("CartPole", 4096, console), tmp_path, [row(1), row(2)], summary(status=status))
    assert all(part in out.getvalue() for part in ("2048/4096", "frames/s", "sync p50", "version", status))


def test_a_sweep_is_reported_and_a_run_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    for number, scheme in enumerate(("shared_mem", "none")):
        end = summary(sync=scheme != "none", status="finished") | {"overrides": [f"weight_sync={scheme}"]}
        told(RunFiles(), tmp_path / f"{number}-{scheme}", [row(1), row(2)], end)
    (tmp_path / "2-damaged").mkdir()
    (tmp_path / "2-damaged" / "summary.json").write_text("{")
    out = io.StringIO()
    report(tmp_path, Console(file=out, width=200))
    assert all(name in out.getvalue() for name in ("shared_mem", "none", "2-damaged"))
    page = (tmp_path / "sweep.html").read_text()
    assert "shared_mem" in page and "none" in page and "data:image/png;base64," in page


def test_a_run_for_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    told(WandbLogger(mode="offline", group="sweep"), tmp_path, [row(1), row(2)], summary())
    wandb.teardown()  # its own process writes the file; this waits for it, as the end of a Python process does
    (run,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    written = run.read_bytes()
    for name in (b"weight_sync/p99_us", b"weight_sync/phases/pack_us", b"staleness", b"learning/loss_policy"):
        assert name in written


def test_an_error_of_wandb_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises ImportError
    told(WandbLogger(start_after=0.0), tmp_path, [row(1)], summary())
    assert "ModuleNotFoundError" in caplog.text
