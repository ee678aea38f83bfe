"""Every fault runs once against each backend; ``--reliability PATH`` writes down the outcomes."""

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # workers import what is written here
sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))  # and there

from backends import PROCESS_BACKENDS, BuiltIn
from cells import Cell, Matrix

BACKENDS = [*(name for name in PROCESS_BACKENDS if name != "distributed-inline"), "rpc", "ray"]
WITHOUT_COMMON_CODE = ("shared_mem-published", "distributed-gloo", "rpc")
"""Backends that share neither transport nor rendezvous. A run of all tests takes these, as the contract suite has every
backend; a run that names this folder takes all."""
_matrix = pytest.StashKey[Matrix]()


def make_backend(name: str) -> BuiltIn:
    """A backend, with a pool of workers of its own."""
    if name in PROCESS_BACKENDS:
        kind: Any = PROCESS_BACKENDS[name]
    else:  # Ray takes seconds to import
        kind = getattr(import_module(f"{name}_workers"), name.capitalize())
    backend = kind()
    kind.pool = kind.pool_type()
    return backend


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reliability", metavar="PATH", help="write the table of faults and backends into PATH")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_matrix] = Matrix()


@pytest.fixture(scope="session", params=[*reversed(BACKENDS)])  # Ray first: it takes longest
def backend_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def backend(backend_name: str) -> Iterator[BuiltIn]:
    """Each in turn: all its cells run one after the other, with the same workers."""
    chosen = make_backend(backend_name)
    yield chosen
    chosen.pool.close()


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> Cell:
    """Where the test writes down its times."""
    name = request.getfixturevalue("backend_name") if "backend_name" in request.fixturenames else ""
    function: Any = request.function
    return request.config.stash[_matrix].add(function.__name__.removeprefix("test_"), function.__doc__ or "", name)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    noted = getattr(item, "funcargs", {}).get("cell")
    if noted is not None and (report.when == "call" or report.failed):
        noted.outcome = report.outcome if noted.outcome != "failed" else "failed"
        if report.skipped:
            noted.why = report.longrepr[2].removeprefix("Skipped: ")
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The contract suite holds the main ones of these promises, and is quicker."""
    here = Path(__file__).parent
    cells = [item for item in items if here in item.path.parents and isinstance(item, pytest.Function)]
    for item in cells:
        item.add_marker(pytest.mark.slow)
    asked_for = [Path(config.invocation_params.dir, argument.partition("::")[0]) for argument in config.args]
    if not any(path.is_relative_to(here) for path in asked_for):
        left_out = [item for item in cells if not runs_among_all(item)]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def runs_among_all(cell: pytest.Function) -> bool:
    """Whether a cell runs among all tests. Ray is there where it notices the death of the trainer by itself."""
    name = cell.callspec.params.get("backend_name", "") if hasattr(cell, "callspec") else ""
    return name in ("", *WITHOUT_COMMON_CODE) or (name, cell.originalname) == ("ray", "test_trainer_killed")


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--reliability", None)  # the option does not exist in a run of all tests
    found = session.config.stash[_matrix]
    if path and found.cells:
        page = Path(path)
        page.write_text(found.page(page.read_text(), BACKENDS))
