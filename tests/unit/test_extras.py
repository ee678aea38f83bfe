"""Without a package of an extra: `import wsync` works, and what needs the package names the extra in its error."""

import sys
import tomllib
from pathlib import Path

import pytest
import setuptools
from packaging.requirements import Requirement
from programs import run_python

import wsync

ROOT = Path(__file__).parents[2]
OPTIONAL = (
    *("cloudpickle", "gymnasium", "hydra", "matplotlib", "omegaconf", "prometheus_client"),
    *("pytest", "ray", "rich", "typer", "wandb", "zstandard"),
)
PROGRAM = f"""
import sys
from importlib import import_module

optional = {OPTIONAL}
import tensordict  # needs cloudpickle itself
import fsspec  # imports zstandard if it is installed
import wsync

used_by_others = ("cloudpickle", "zstandard")
print("imported:", [name for name in optional if name in sys.modules and name not in used_by_others])
for name in optional:
    sys.modules[name] = None  # as if it were not installed
for module in ("wsync.config", "wsync.testing", "collectors"):
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        print(error)
for call in (lambda: wsync.RayWeightSyncScheme().init_on_sender("policy"), lambda: wsync.serve_metrics(0)):
    try:
        call()
    except ModuleNotFoundError as error:
        print(error)
"""


def test_what_is_missing_names_its_extra(tmp_path: Path) -> None:
    done = run_python("-c", PROGRAM, folder=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.stdout.splitlines() == [
        "imported: []",
        "hydra is not installed: pip install -e '.[train]' in a clone of wsync",
        "pytest is not installed: pip install -e '.[testing]' in a clone of wsync",
        "cloudpickle is not installed: pip install -e '.[collectors]' in a clone of wsync",
        "ray is not installed: pip install -e '.[ray]' in a clone of wsync",
        "prometheus_client is not installed: pip install -e '.[metrics]' in a clone of wsync",
    ], done.stderr


def test_a_ray_scheme_is_shut_down_where_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    scheme = wsync.RayWeightSyncScheme()
    scheme.shutdown()
    scheme.shutdown()


def test_57_16_the_library_installs_one_package_and_takes_the_versions_that_were_tried() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = setuptools.find_packages(str(ROOT), include=project["tool"]["setuptools"]["packages"]["find"]["include"])
    assert {name.partition(".")[0] for name in found} == {"wsync"} != {project["project"]["name"]}
    tried = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for one in map(Requirement, project["project"]["dependencies"]):
        bounded = any(limit.operator == "<" for limit in one.specifier)
        assert bounded == (one.name in ("torch", "tensordict")) and tried[one.name] in one.specifier
