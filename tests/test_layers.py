"""Who may import whom: the rules of the house, held by walking the imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("wsync", "collectors", "learning")
BACKENDS = ROOT / "wsync" / "backends"
GROUND = "deadlines", "errors", "memory", "native", "_native", "types"
FLOORS = {  # what stands on what: each folder, and what it may import of its package
    "wsync/weights": GROUND,
    "wsync/wire": (*GROUND, "weights"),
    "wsync/sending": (*GROUND, "weights"),
    "wsync/receiving": (*GROUND, "weights", "wire"),
    "wsync/local": (*GROUND, "weights", "wire", "sending", "receiving"),
    "wsync/network": (*GROUND, "weights", "wire", "sending", "receiving"),
    "collectors/environments": (),
    "collectors/rollouts": ("environments",),
    "collectors/workers": ("rollouts", "making", "updating"),
}


def files(*parts: str) -> list[Path]:
    return sorted(path for part in parts for path in (ROOT / part).rglob("*.py"))


def product() -> list[Path]:
    return [*files(*PACKAGES), ROOT / "train.py"]


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that ``path`` imports, names taken out of it included (``a.b`` and ``a.b.name``)."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.relative_to(ROOT).with_suffix("").parts[: -node.level] if node.level else ()
            base = ".".join((*package, *([node.module] if node.module else [])))
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def offences(paths: list[Path], *banned: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in paths
        for name, line in imports(path)
        if any(name == one or name.startswith(one + ".") for one in banned)
    ]


def test_wsync_imports_nothing_of_the_rest() -> None:
    assert not offences(files("wsync"), "collectors", "learning", "scripts", "train", "tests")


def test_collectors_do_not_know_learning() -> None:
    assert not offences(files("collectors"), "learning", "scripts", "train", "tests")


def test_products_do_not_import_tests_or_scripts() -> None:
    assert not offences(product(), "tests", "scripts")


def public_names() -> set[str]:
    tree = ast.parse((ROOT / "wsync" / "__init__.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return set(names)


def test_collectors_use_only_public_names_of_wsync() -> None:
    public = public_names()
    bad = []
    for path in files("collectors"):
        for name, line in imports(path):
            head, _, rest = name.partition(".")
            if head == "wsync" and rest and rest not in public and not (path.name == "config.py" and "config" in rest):
                bad.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != "wsync" or node.attr in public:
                continue
            bad.append(f"{path.relative_to(ROOT)}:{node.lineno} uses wsync.{node.attr}")
    assert not bad


@pytest.mark.parametrize("folder", FLOORS)
def test_a_folder_imports_only_what_it_stands_on(folder: str) -> None:
    package, own = folder.split("/")
    below = {own, *FLOORS[folder]}
    assert not [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(folder)
        for name, line in imports(path)
        if name.startswith(f"{package}.") and name.split(".")[1] not in below
    ]


def test_no_backend_imports_another() -> None:
    backends = [path for path in BACKENDS.glob("*.py") if path.stem != "__init__"]
    for path in backends:
        others = [f"wsync.backends.{other.stem}" for other in backends if other != path]
        assert not offences([path], *others)


def test_only_configs_import_hydra() -> None:
    exempt = {ROOT / "train.py", *ROOT.glob("*/config.py")}
    assert not offences([path for path in product() if path not in exempt], "hydra", "omegaconf")


def test_only_ray_files_import_ray() -> None:
    assert not offences([path for path in product() if "ray" not in path.stem], "ray")


def test_only_the_wandb_logger_imports_wandb() -> None:
    assert not offences([path for path in product() if "wandb" not in path.stem], "wandb")


def test_torchrl_is_no_part_of_the_product() -> None:
    assert not offences(product(), "torchrl")


@pytest.mark.timeout(90)
def test_importing_wsync_is_cheap() -> None:
    heavy = ("torch._dynamo", "hydra", "omegaconf", "ray", "wandb", "gymnasium", "matplotlib")
    code = f"import sys, wsync; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
