"""Fixtures of the tests that all built-in backends share beside the contract suite."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # workers import what is written here

from backends import PROCESS_BACKENDS, BuiltIn

import wsync
from wsync.testing import WorkerGroup, WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Worker processes for the tests of all files."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture
def workers(pool: WorkerPool) -> Iterator[WorkerGroup]:
    with pool.group(2) as workers:
        yield workers


@pytest.fixture(params=[wsync.MultiProcessWeightSyncScheme, wsync.SharedMemWeightSyncScheme])
def make(request: pytest.FixtureRequest) -> Any:
    """The schemes that take the pipes of the older API."""
    return request.param


@pytest.fixture(params=["shared_mem-published", "multiprocess", "distributed-gloo"])
def backend(request: pytest.FixtureRequest, pool: WorkerPool) -> BuiltIn:
    """Backends with plain processes as their workers, whose ends have no code of their own in common.

    They bind a model to the arena, copy out of it, and receive by a process group; a send of the first waits for no
    acknowledgement. `shared_mem` and `distributed` combine the same parts: the contract suite runs on each.
    """
    chosen = PROCESS_BACKENDS[request.param]()
    type(chosen).pool = pool
    return chosen


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A class with ``QUICK`` is slow but for these tests; one with ``SLOW`` has no other tests than those of both."""
    left_out = set[pytest.Item]()
    for item in items:
        if not isinstance(item, pytest.Function) or item.cls is None or "QUICK" not in vars(item.cls):
            continue
        function: Any = item.function
        if function in item.cls.QUICK:
            continue
        item.add_marker(pytest.mark.slow)
        if "SLOW" in vars(item.cls) and function not in item.cls.SLOW:
            left_out.add(item)
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=[*left_out])
