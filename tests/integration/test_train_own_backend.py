"""A backend of a user's own in train.py: from an installed package, and from a YAML file in a config folder."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("logger=none", "num_envs=4", "frames_per_batch=256", "total_frames=512")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The current folder of a user, with the module of the backend."""
    shutil.copy(ROOT / "tests" / "file_backend.py", tmp_path)
    return tmp_path


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *arguments, *QUICK],
        capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL, cwd=folder, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def trained(folder: Path) -> tuple[str, str]:
    """The scheme and the collector of a run in which every batch was followed by an update."""
    sync = json.loads((folder / "summary.json").read_text())["weight_sync"]
    batches = len((folder / "metrics.jsonl").read_text().splitlines())
    assert sync["updates"] == batches > 0 and sync["version"] == batches + 1
    (collector,) = re.findall(r"_target_: collectors\.(\w+)$", (folder / "config.yaml").read_text(), re.MULTILINE)
    return sync["scheme"], collector


def test_a_yaml_file_in_a_config_folder_trains(folder: Path) -> None:
    """With the collector that the scheme names first, and with another one that it names."""
    (folder / "my" / "weight_sync").mkdir(parents=True)
    (folder / "my" / "weight_sync" / "mine.yaml").write_text(
        "_target_: file_backend.FileScheme\nfolder: ${hydra:runtime.output_dir}\n"
    )
    both = ["weight_sync=mine", "collector=for/mine,multi_sync", f"hydra.sweep.dir={folder}/runs"]
    done = train(folder, "--config-dir", "my", "-m", *both)
    assert done.returncode == 0, done.stderr
    runs = sorted(path.parent for path in (folder / "runs").glob("*/summary.json"))
    assert [trained(run) for run in runs] == [("files", "MultiAsyncCollector"), ("files", "MultiSyncCollector")]


@pytest.mark.slow  # tests/unit/test_config_own_backend.py composes registered backends
def test_an_installed_backend_trains(folder: Path) -> None:
    """Found by its entry point: without a YAML file, and beside one that cannot be imported."""
    package = folder / "file_backend-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: file-backend\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[wsync.backends]\ninstalled = file_backend:FileScheme\nabsent = no_such_module:Scheme\n"
    )
    done = train(folder, "weight_sync=installed", f"weight_sync.folder={folder}", f"hydra.run.dir={folder}/run")
    assert done.returncode == 0, done.stderr
    assert trained(folder / "run") == ("files", "MultiAsyncCollector")
