"""The README's examples run, its table of backends is complete, and its links lead somewhere."""

import re
from pathlib import Path

import pytest
from programs import run_program

import wsync

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, len(EXAMPLES)))]
)
def test_an_example_runs(tmp_path: Path, number: int) -> None:
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[number], encoding="utf-8")
    done = run_program(script, folder=tmp_path, PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
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
