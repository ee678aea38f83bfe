"""Fixtures of the tests that all built-in backends share beside the contract suite."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # workers import what is written here

from backends import PROCESS_BACKENDS, BuiltIn

from wsync.testing import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Worker processes for the tests of all files."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(params=PROCESS_BACKENDS)
def backend(request: pytest.FixtureRequest, pool: WorkerPool) -> BuiltIn:
    """Each backend with plain processes as its workers."""
    chosen = PROCESS_BACKENDS[request.param]()
    type(chosen).pool = pool
    return chosen


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A class with ``QUICK`` is slow but for the tests that it names."""
    for item in items:
        quick = vars(item.cls).get("QUICK") if isinstance(item, pytest.Function) and item.cls else None
        if quick is not None and item.function not in quick:  # pyright: ignore[reportAttributeAccessIssue]
            item.add_marker(pytest.mark.slow)
