"""Which package may import which: checked by reading every import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("wsync", "collectors", "learning")
BACKENDS = ROOT / "wsync" / "backends"
LAYERS = (  # of ``wsync``, from the lowest: a module or folder imports its own layer and lower ones, never in a circle
    ("checksum", "deadlines", "errors", "fast_path", "metrics", "paths", "per_process", "types"),
    ("loops", "_loops"),
    ("gate", "transforms", "weights"),
    ("control", "group_of_two", "options", "process_group", "rendezvous", "shm", "transport", "transport_setup"),
    ("receiving", "sending"),
    (
        "assembly",
        "engine",
        "in_process",
        "legacy",
        "receiver",
        "registry",
        "roles",
        "scheme",
        "scheme_base",
        "scheme_transports",
        "sender",
        "store",
    ),
    ("__main__", "backends", "config", "testing", "transaction"),
)
FOLDERS = {  # of other packages: each folder, and what it may import of its package
    "collectors/environments": (),
    "collectors/rollouts": ("environments",),
    "collectors/workers": ("batch_layout", "exploration", "staleness", "worker"),
}


def files(*parts: str) -> list[Path]:
    return sorted(path for part in parts for path in (ROOT / part).rglob("*.py"))


def product() -> list[Path]:
    return [*files(*PACKAGES), ROOT / "train.py"]


@cache
def imports(path: Path) -> list[tuple[str, int]]:
    """Every module that ``path`` imports, names taken out of it included (``a.b`` and ``a.b.name``)."""
    return [*_imports(path)]


def _imports(path: Path) -> Iterator[tuple[str, int]]:
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


def public_names(package: str = "wsync") -> set[str]:
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    return set(names)


def test_collectors_use_only_public_names_of_wsync() -> None:
    public, control = public_names(), public_names("wsync/control")
    bad = []
    for path in files("collectors"):
        for name, line in imports(path):
            head, _, rest = name.partition(".")
            if rest == "control" or (rest.startswith("control.") and rest.split(".")[1] in control):
                continue
            if head == "wsync" and rest and rest not in public and not (path.name == "config.py" and "config" in rest):
                bad.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Attribute) or ast.unparse(node.value) != "wsync" or node.attr in public:
                continue
            bad.append(f"{path.relative_to(ROOT)}:{node.lineno} uses wsync.{node.attr}")
    assert not bad


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_what_it_stands_on(folder: str) -> None:
    package, own = folder.split("/")
    below = {own, *FOLDERS[folder]}
    assert not [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(folder)
        for name, line in imports(path)
        if name.startswith(f"{package}.") and name.split(".")[1] not in below
    ]


def parts() -> dict[str, int]:
    """The layer of each module or folder of ``wsync``."""
    return {part: layer for layer, names in enumerate(LAYERS) for part in names}


def loaded_with(path: Path) -> Iterator[str]:
    """The parts of ``wsync`` that are imported when ``path`` is: not those inside functions, nor those for types."""
    nodes: list[ast.AST] = [*ast.parse(path.read_text()).body]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If | ast.Try):
            if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
                nodes.extend(ast.iter_child_nodes(node))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = ast.Module([node], [])  # type: ignore[list-item]
            for name in named(module):
                package, _, rest = name.partition(".")
                if package == "wsync" and rest.split(".")[0] in parts():
                    yield rest.split(".")[0]


def named(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_part_of_wsync_has_a_layer() -> None:
    present = {
        path.stem for path in (ROOT / "wsync").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert present - {"__init__"} == set(parts()) - {"_loops"}


def test_nothing_imports_a_higher_layer() -> None:
    layer = parts()
    graph: dict[str, set[str]] = {part: set() for part in layer}
    for path in files("wsync"):
        own = path.relative_to(ROOT / "wsync").parts[0].removesuffix(".py")
        if own != "__init__":
            graph[own] |= set(loaded_with(path)) - {own}
    assert not [f"{part} imports {other}" for part in graph for other in graph[part] if layer[other] > layer[part]]
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_no_backend_imports_another() -> None:
    backends = [path for path in BACKENDS.glob("*.py") if path.stem != "__init__"]
    for path in backends:
        family = path.stem.split("_")[0]
        others = [f"wsync.backends.{other.stem}" for other in backends if other.stem.split("_")[0] != family]
        assert not offences([path], *others)


def test_only_what_shows_or_reads_configs_imports_hydra() -> None:
    of_train = [ROOT / "learning" / name for name in ("help.py", "resuming.py", "trained.py")]
    of_settings = [ROOT / "collectors" / name for name in ("env_config.py", "targets.py")]
    exempt = {ROOT / "train.py", *ROOT.glob("*/config.py"), *of_settings, *of_train}
    assert not offences([path for path in product() if path not in exempt], "hydra", "omegaconf")


def test_only_ray_files_import_ray() -> None:
    assert not offences([path for path in product() if "ray" not in path.stem], "ray")


def test_only_the_wandb_logger_imports_wandb() -> None:
    assert not offences([path for path in product() if "wandb" not in path.stem], "wandb")


def test_torchrl_is_no_part_of_the_product() -> None:
    assert not offences(product(), "torchrl")


def test_modules_that_fork_servers_preload_exist() -> None:
    """A fork server ignores modules that it cannot import."""
    named = [
        element.value
        for path in [*files("wsync", "collectors", "learning", "scripts"), ROOT / "train.py"]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("set_forkserver_preload")
        and isinstance(node.args[0], ast.List)
        for element in node.args[0].elts
        if isinstance(element, ast.Constant)
    ]
    assert named
    assert all(find_spec(name) for name in named)
