"""Every test of the contract runs once for each backend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import wsync

sys.path.insert(0, str(Path(__file__).parent))  # workers unpickle what is written here
import crew
from backends import BACKENDS, ENDS_OF_DISTRIBUTED, WORKERS


@pytest.fixture(scope="package", autouse=True)
def no_cluster_is_left() -> Iterator[None]:
    """Other tests begin without Ray; these share a cluster, and the actors that have survived."""
    yield
    if "ray_crew" in sys.modules:
        sys.modules["ray_crew"].dismiss()


@pytest.fixture(params=list(BACKENDS))
def make_scheme(request: pytest.FixtureRequest) -> Iterator[Callable[..., wsync.WeightSyncScheme]]:
    """Makes a scheme of each backend in turn; ``crew`` then has the workers that it needs."""
    if request.param in ENDS_OF_DISTRIBUTED and request.node.get_closest_marker("above_the_ends"):
        pytest.skip("is about what stands above the ends, which are those of distributed")
    crew.current_kind = WORKERS.get(request.param, "process")
    if crew.current_kind == "ray":
        import ray_crew  # Ray takes seconds to start: for those who need it

        ray_crew.begin()
    yield BACKENDS[request.param]
    crew.current_kind = "process"
