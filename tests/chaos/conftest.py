"""Every fault runs once against each backend; ``--reliability PATH`` writes down what came of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import wsync

sys.path.insert(0, str(Path(__file__).parent))  # workers unpickle what is written here
sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))  # and there
import crew
from backends import BACKENDS, ENDS_OF_DISTRIBUTED, WORKERS
from matrix import Cell, Matrix
from stage import DEADLINE, Scene

matrix = pytest.StashKey[Matrix]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reliability", metavar="PATH", help="write the matrix of faults and backends to PATH")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[matrix] = Matrix()


@pytest.fixture(scope="session", params=[*reversed(BACKENDS)])  # Ray first: it takes longest
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each in turn: all its cells run one after the other, so that what it needs is started once."""
    crew.current_kind = WORKERS.get(request.param, "process")
    if crew.current_kind == "ray":
        import ray_crew  # Ray takes seconds to start: for those who need it

        ray_crew.begin()
    with Scene(BACKENDS[request.param]).play(checked=False):
        pass  # what the machinery around it makes once, it keeps
    yield request.param
    crew.current_kind = "process"


@pytest.fixture
def make_scheme(request: pytest.FixtureRequest, backend: str) -> Callable[..., wsync.WeightSyncScheme]:
    once = request.node.get_closest_marker("above_the_ends") and not request.config.getoption("--reliability", None)
    if backend in ENDS_OF_DISTRIBUTED and once:
        pytest.skip("is about what stands above the ends, which are those of distributed: see --reliability")
    return BACKENDS[backend]


@pytest.fixture
def scene(make_scheme: Callable[..., wsync.WeightSyncScheme]) -> Scene:
    """A trainer and its workers, all well; afterwards nothing may be left of them."""
    return Scene(make_scheme)


@pytest.fixture
def cell(request: pytest.FixtureRequest) -> Cell:
    """Where the test writes down its times."""
    chosen = request.getfixturevalue("backend") if "backend" in request.fixturenames else ""
    function: Any = request.function
    return request.config.stash[matrix].add(function.__name__.removeprefix("test_"), function.__doc__ or "", chosen)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    noted = getattr(item, "funcargs", {}).get("cell")
    if noted is not None and (report.when == "call" or report.failed):
        noted.outcome = report.outcome if noted.outcome != "failed" else "failed"
        if report.skipped:
            noted.why = report.longrepr[2].removeprefix("Skipped: ")
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Other tests begin without Ray."""
    here = Path(__file__).parent
    if "ray_crew" in sys.modules and (nextitem is None or here not in nextitem.path.parents):
        sys.modules["ray_crew"].dismiss()


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--reliability", None)  # not there in a run of all tests
    found = session.config.stash[matrix]
    if path and found.cells:
        Path(path).write_text(found.page(list(BACKENDS), DEADLINE))
