"""Which package may import which, and the graph of the files of ``wsync``: checked by reading every import."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("wsync", "collectors", "learning")
MOST_FLOORS = 8


def files(*parts: str) -> list[Path]:
    return sorted(path for part in parts for path in (ROOT / part).rglob("*.py"))


def product() -> list[Path]:
    return [*files(*PACKAGES), ROOT / "train.py"]


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, those inside functions too; without blocks under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from statements(node)


@cache
def imports(path: Path) -> list[tuple[str, int]]:
    """Every module that ``path`` imports as it runs, names taken out of it included (``a.b`` and ``a.b.name``)."""
    found = list[tuple[str, int]]()
    for node in statements(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno} is a relative import"
            found += [
                (name, node.lineno) for alias in node.names for name in (node.module, f"{node.module}.{alias.name}")
            ]
    return found


def offences(paths: list[Path], *banned: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in paths
        for name, line in imports(path)
        if any(name == one or name.startswith(one + ".") for one in banned)
    ]


# --- packages ---


RULES: dict[str, tuple[list[Path], tuple[str, ...]]] = {
    "wsync imports nothing of the rest": (files("wsync"), ("collectors", "learning", "scripts", "train", "tests")),
    "the command wsync starts without PyTorch": ([ROOT / "wsync_status.py"], (*PACKAGES, "torch")),
    "collectors do not know learning": (files("collectors"), ("learning", "scripts", "train", "tests")),
    "no product imports tests or scripts": (product(), ("tests", "scripts")),
    "only what shows or reads configs imports hydra": (
        [path for path in product() if path.stem not in ("train", "config", "help", "resuming", "trained")],
        ("hydra", "omegaconf"),
    ),
    "only ray files import ray": (
        [path for path in product() if "ray" not in path.stem and path.stem != "rllib"],
        ("ray",),
    ),
    "only the wandb logger imports wandb": ([one for one in product() if one.stem != "wandb_logger"], ("wandb",)),
    "only integrations import torchrl, or integrations": (
        [path for path in product() if path.parent.name != "integrations"],
        ("torchrl", "wsync.integrations"),
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_no_file_imports_what_it_may_not(rule: str) -> None:
    paths, banned = RULES[rule]
    assert paths and not offences(paths, *banned)


def test_collectors_use_only_public_names_of_wsync() -> None:
    tree = ast.parse((ROOT / "wsync" / "__init__.py").read_text())
    (public,) = (
        {*ast.literal_eval(node.value)}
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    public |= {"control", "testing", "transforms"}
    bad = []
    for path in files("collectors"):
        for name, line in imports(path):
            head, *rest = name.split(".")
            allowed = public | {"config"} if path.name == "config.py" else public
            if head == "wsync" and rest and rest[0] not in allowed:
                bad.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not bad


def test_modules_that_fork_servers_preload_exist() -> None:
    preloaded = {
        name.value
        for path in product()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and "preload" in ast.unparse(node.func)
        for name in ast.walk(node)
        if isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.startswith(PACKAGES)
    }
    assert [name for name in preloaded if find_spec(name) is None] == []


# --- the graph of files of wsync, as shared/house/measure.py counts it ---


def graph() -> dict[str, set[str]]:
    """Each module of ``wsync``, and those that it imports. No layer is declared that could hide an arrow inside it."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files("wsync")}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    return {
        name: {found for found, _ in imports(path) if found in modules} - {name, "wsync"}
        for name, path in modules.items()
    }


def rooms() -> dict[str, set[str]]:
    """Each entry directly in ``wsync``, a file or a folder, and those that it imports."""

    def room(module: str) -> str:
        return module.split(".")[1] if "." in module else "__init__"

    found: dict[str, set[str]] = {}
    for module, targets in graph().items():
        found.setdefault(room(module), set()).update(room(target) for target in targets)
    return {name: targets - {name} for name, targets in found.items()}


def in_a_circle(edges: Mapping[str, set[str]]) -> set[str]:
    """The nodes from which a path leads back."""

    def reached(start: str) -> set[str]:
        seen, left = set[str](), [*edges[start]]
        while left:
            if (node := left.pop()) not in seen:
                seen.add(node)
                left += edges[node]
        return seen

    return {node for node in edges if node in reached(node)}


def test_no_file_and_no_room_of_wsync_is_in_a_circle_of_imports() -> None:
    assert (in_a_circle(graph()), in_a_circle(rooms())) == (set(), set())


def test_wsync_has_few_floors() -> None:
    edges = rooms()
    assert not in_a_circle(edges)

    @cache
    def floor(room: str) -> int:
        return 1 + max(map(floor, edges[room]), default=0)

    assert max(map(floor, edges)) <= MOST_FLOORS
