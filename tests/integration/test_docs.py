"""The files that ``docs/backends.md`` and ``docs/unlike_ends.md`` show run as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
UNLIKE = (ROOT / "docs" / "unlike_ends.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE + UNLIKE, flags=re.DOTALL))
SOCKET_TEST = """
from socket_backend import SocketScheme
from wsync.testing import BackendContract


class TestSockets(BackendContract):
    def make_scheme(self, **options):
        return SocketScheme(**options)
"""
SOME = "every_calling_form or apply_that_raises or successor_joins or forked_child"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Contains all files of the page."""
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    return tmp_path


def run(folder: Path, *command: str) -> str:
    """Run Python in ``folder``; return what it prints."""
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=90, check=False,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{folder}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "name",
    # The README's first program does the same with another backend.
    [
        "run_collector.py",
        "run_engine.py",
        "run_pull.py",
        "run_store.py",
        pytest.param("run_files.py", marks=pytest.mark.slow),
    ],
)
def test_a_program_runs(folder: Path, name: str) -> None:
    assert run(folder, name) != ""


def test_every_program_is_run() -> None:
    assert {name for name in FILES if name.startswith("run_")} == {
        "run_collector.py",
        "run_engine.py",
        "run_files.py",
        "run_pull.py",
        "run_store.py",
    }


def test_files_and_sockets_pass_the_contract(folder: Path) -> None:
    (folder / "test_sockets.py").write_text(SOCKET_TEST)
    files = ["test_file_backend.py", "test_sockets.py"]
    printed = run(folder, "-m", "pytest", "-v", "--rootdir", str(folder), *files, "-k", SOME)
    assert all(f"{file}::" in printed for file in files) and "passed" in printed


@pytest.mark.slow  # as tests/integration/test_train_own_backend.py does with files of its own
def test_the_yaml_file_trains(folder: Path) -> None:
    (settings,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    (folder / "my" / "weight_sync").mkdir(parents=True)
    (folder / "my" / "weight_sync" / "files.yaml").write_text(settings.replace("/tmp/weights", f"{folder}/weights"))
    options = ["total_frames=2000", "logger=none", f"hydra.run.dir={folder}/run"]
    run(folder, str(ROOT / "train.py"), "--config-dir", "my", "weight_sync=files", *options)
    assert (folder / "run" / "summary.json").exists()


@pytest.mark.slow  # see above
def test_an_entry_point_trains(folder: Path) -> None:
    (section,) = re.findall(r'```toml\n\[project\.entry-points\."([\w.]+)"\]\n', PAGE)
    info = folder / "file_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: file-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{section}]\nfiles = file_backend:FileScheme\n")
    options = [f"weight_sync.folder={folder}/weights", "total_frames=2000", "logger=none"]
    run(folder, str(ROOT / "train.py"), "weight_sync=files", *options, f"hydra.run.dir={folder}/run")
    assert (folder / "run" / "summary.json").exists()
