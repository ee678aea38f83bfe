"""The files that ``docs/backends.md`` and ``docs/unlike_ends.md`` show run as they stand there."""

import json
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
from programs import run_program, run_python

import wsync

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
UNLIKE = (ROOT / "docs" / "unlike_ends.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE + UNLIKE, flags=re.DOTALL))
CONTRACT_TEST = """
from {name}_backend import {scheme} as Scheme
from wsync.testing import BackendContract


class TestScheme(BackendContract):
    def make_scheme(self, **options):
        return Scheme(**options)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Contains all files of the page."""
    for name, content in FILES.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    return tmp_path


PROGRAMS = [name for name in FILES if name.startswith("run_")]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs(folder: Path, name: str) -> None:
    done = run_program(folder / name, folder=folder, PYTHONPATH=f"{ROOT}:{folder}")
    assert done.stdout != ""


def test_the_programs_are_found_and_the_page_names_the_private_attributes_of_a_scheme() -> None:
    assert len(PROGRAMS) == 3
    (named,) = re.findall(r"(`_.*`) are taken", PAGE)
    taken = {name for name in vars(wsync.NoWeightSyncScheme()) if name.startswith("_")}
    assert set(re.findall(r"`(\w+)`", named)) == taken


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_backends_of_the_page_and_the_example_pass_the_contract_outside_the_repository(folder: Path) -> None:
    for name in ("socket", "queue"):
        shutil.copy(ROOT / "examples" / "backends" / f"{name}_backend.py", folder)
        (folder / f"test_{name}s.py").write_text(CONTRACT_TEST.format(name=name, scheme=f"{name.capitalize()}Scheme"))
    shutil.copy(ROOT / "examples" / "custom_backend.py", folder / "my_backend.py")
    files = ["test_file_backend.py", "test_sockets.py", "test_queues.py", "my_backend.py"]
    options = ("-v", "-p", "no:cacheprovider", "--strict-markers", "--rootdir", str(folder))
    done = run_python("-m", "pytest", *options, *files, folder=folder, timeout=600, PYTHONPATH=f"{ROOT}:{folder}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{file}::" in done.stdout for file in files) and "passed" in done.stdout


def train(folder: Path, *options: str) -> None:
    command = [*options, "total_frames=2000", "logger=none", f"hydra.run.dir={folder}/run"]
    run_program(ROOT / "train.py", *command, folder=folder, PYTHONPATH=f"{ROOT}:{folder}")
    told = json.loads((folder / "run" / "summary.json").read_text())["weight_sync"]
    assert told["scheme"] == "files" and told["updates"] > 0


def test_the_yaml_file_trains(folder: Path) -> None:
    (settings,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)
    (folder / "my" / "weight_sync").mkdir(parents=True)
    (folder / "my" / "weight_sync" / "files.yaml").write_text(settings.replace("/tmp/weights", f"{folder}/weights"))
    train(folder, "--config-dir", "my", "weight_sync=files")


@pytest.mark.slow  # tests/unit/test_config.py composes registered backends
def test_an_entry_point_trains(folder: Path) -> None:
    """Without a YAML file, and beside an entry point that cannot be imported."""
    (section,) = re.findall(r'```toml\n\[project\.entry-points\."([\w.]+)"\]\n', PAGE)
    info = folder / "file_backend-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: file-backend\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{section}]\nfiles = file_backend:FileScheme\nabsent = no_such_module:Scheme\n"
    )
    train(folder, "weight_sync=files", f"weight_sync.folder={folder}/weights")


def test_no_word_of_a_diagram_depends_on_a_font() -> None:
    for diagram in sorted((ROOT / "docs" / "images" / "diagrams").glob("*.svg")):
        tags = {one.tag.rpartition("}")[2] for one in ElementTree.parse(diagram).iter()}
        assert "path" in tags and not tags & {"text", "foreignObject"}, diagram.name


# --- the README's examples, its table of backends, and links ---


README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, len(EXAMPLES)))]
)
def test_an_example_runs(tmp_path: Path, number: int) -> None:
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[number], encoding="utf-8")
    done = run_program(script, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert done.stderr == "" or "import ray" in EXAMPLES[number]  # Ray always writes something
    assert done.stdout != ""


def test_the_table_names_every_backend() -> None:
    for name in wsync.registered_backends():
        assert f"| `{name}` |" in README, f"{name} is not in the README"


def test_links_and_pictures_exist() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        targets = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text(encoding="utf-8"))
        assert targets
        assert not [target for target in targets if not (ROOT / target).exists()]


def test_pages_include_files_that_exist() -> None:
    pages = [*(ROOT / "docs").rglob("*.md")]
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("--8")]
    included = [re.fullmatch(r'--8<-- "(.+)"', line) for line in lines]  # a formatter may have broken one
    assert lines and all(one and (ROOT / one[1]).exists() for one in included)


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
