"""A backend of a user's own in train.py, from a YAML file in a config folder. For an entry point: ``test_docs.py``."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from programs import run_program

ROOT = Path(__file__).resolve().parents[2]
QUICK = ("logger=none", "num_envs=4", "frames_per_batch=256", "total_frames=512")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The current folder of a user, with the module of the backend."""
    shutil.copy(ROOT / "tests" / "file_backend.py", tmp_path)
    return tmp_path


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program(ROOT / "train.py", *arguments, *QUICK, folder=folder, PYTHONPATH=str(ROOT))


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
