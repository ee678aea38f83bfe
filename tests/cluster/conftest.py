"""One Ray cluster for the tests of all files."""

import sys
from pathlib import Path

import pytest
import ray

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from ray_workers import start_cluster


@pytest.fixture(scope="module")
def cluster() -> None:
    """A cluster on this machine, unless there is one: the last test that needs Ray ends it (``tests/conftest.py``)."""
    start_cluster()


@pytest.fixture(scope="module")
def no_cluster() -> None:
    """For test files that start clusters of their own."""
    ray.shutdown()


@pytest.fixture(autouse=True)
def needs_a_cluster(request: pytest.FixtureRequest) -> None:
    """Collectors with workers in Ray join the cluster; a trainer in a process of its own starts another one."""
    names = request.fixturenames
    if "family" in names and "how" not in names and request.getfixturevalue("family") == "ray":
        request.getfixturevalue("cluster")
