"""The benchmark of weight sync: it runs, its figures are plausible, and it detects a scheme that does not deliver."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from programs import run_program
from stopping import descendants, ends

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_sync
import compare_editions
from harness.models import RevealingModel, fill
from harness.sides import Case, Side

SCRIPT = Path(bench_sync.__file__)
TINY = ("mib=[0.01]", "policy_mib=[0.018]", "workers=[1]", "rounds=2")


def options(folder: Path, *overrides: str) -> list[str]:
    return [f"out={folder}", *TINY, *overrides]


@pytest.mark.slow
def test_a_small_run(tmp_path):
    done = run_program(SCRIPT, *options(tmp_path, "backends=[shared_mem]"), folder=tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())["cases"]
    labels = ["shared_mem, installed", "shared_mem, published"]
    assert [(case["kind"], case["label"]) for case in found] == [
        (kind, label) for kind in ("send", "update") for label in labels
    ]
    for case in found:
        assert (case["status"], case["wrong"]) == ("ok", 0)
        assert 0 < case["min_us"] <= case["p50_us"] <= case["p95_us"]
        assert case["over_copy"] > 0
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")
    assert all(label in done.stdout for label in labels)


def test_a_send_that_drops_updates_is_wrong():
    model, worker = RevealingModel(0.01, 4, 0.0), RevealingModel(0.01, 4, 0.0)
    sends = iter(range(100))

    def drop_every_other() -> None:
        if next(sends) % 2 == 0:
            fill(worker, model().tolist()[0])

    side = Side(model, drop_every_other, lambda: [worker().tolist()])
    rounds = [*side.rounds(2, 60.0), *side.rounds(4, 60.0)]
    row = bench_sync.row_of(Case("send", "shared_mem", 0.01, 4), {"wsync": rounds})
    assert row["status"] == "WRONG" and row["wrong"] >= 4  # those of the warm rounds as well
    assert "workers saw" in row["error"]


def test_an_edition_that_is_slower_is_found():
    old, new = {"a": [1.0, 2.0, 3.0], "b": [2.0]}, {"a": [9.0, 3.0, 3.0], "b": [2.0]}
    _, ratios = compare_editions.table_of(old, new, 1.25)
    assert ratios == {"a": 1.5, "b": 1.0}


@pytest.mark.slow
def test_an_interrupt_leaves_no_process(tmp_path):
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *options(tmp_path, "backends=[distributed]", "kind=send", "rounds=1000000")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline, found = time.monotonic() + 200, descendants(process.pid)
    while max(found.values(), default=0) < 4:  # fork server, side, its fork server, worker
        assert time.monotonic() < deadline
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            pytest.fail(str(process.communicate()))
        found = descendants(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=250)
    assert process.returncode == 130, output + errors
    assert not [pid for pid in found if not ends(pid)]
    assert (tmp_path / "results.json").exists()
