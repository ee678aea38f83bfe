"""For all tests: threads, the fork server, signals, fuzzing, and which process runs which tests."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from wsync.testing import WorkerPool
from wsync.testing.workers import PRELOADED_MODULES

settings.register_profile("long", max_examples=3_000, deadline=None)  # pytest --hypothesis-profile=long
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # in programs and actors as well: more threads than cores slow each other down
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="wsync-tests-")  # no key file in the user's home
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)
# With a niceness of 15, Ray's default, an actor starves beside two processes of tests; on a disk fuller than the
# threshold, Ray logs an error into the outputs that tests compare.
os.environ.update(RAY_worker_niceness="0", RAY_local_fs_capacity_threshold="1")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
PRELOADED_MODULES.extend(["collectors.worker", "learning.config"])
forkserver.set_forkserver_preload(PRELOADED_MODULES)  # one server starts all workers

OWN_CLUSTERS = "tests/cluster/test_launch_ray"
"""The file of tests that start their own Ray clusters."""


@pytest.fixture(scope="session", autouse=True)
def imports_are_no_garbage() -> None:
    """A collection, for which many tests ask, looks only at what they have made: at no object of an import."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder for sockets: a socket's path has at most 107 bytes, and ``tmp_path`` may leave too few of them."""
    with tempfile.TemporaryDirectory(prefix="w", dir="/tmp", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture
def long_path(tmp_path: Path) -> Path:
    """A folder in which no path of a socket is short enough."""
    path = tmp_path / ("long" * 25)
    path.mkdir()
    return path


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Worker processes for the tests of one file."""
    pool = WorkerPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A group of one rank, for sharded models."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Of several processes, one runs all tests that share something that takes long to start."""
    return SharedResources(config, log)


class SharedResources(LoadScopeScheduling):
    """The tests of a class or file stay together; of the faults, those of a backend do.

    All contract tests that need Ray stay together, and all others that need it.
    """

    def _split_scope(self, nodeid: str) -> str:
        if needs_ray(nodeid):
            return "ray contract" if nodeid.startswith("tests/contract/") else "ray"
        file, _, case = nodeid.partition("::")
        name, _, parameters = case.partition("[")  # parameters may contain "::"
        return parameters if file.startswith("tests/chaos/") else f"{file}::{name.rpartition('::')[0]}"


def needs_ray(nodeid: str) -> bool:
    """Whether a test belongs to those that share a Ray cluster: its file, class or parameters say so."""
    if nodeid.startswith(OWN_CLUSTERS):
        return False
    return nodeid.startswith("tests/cluster/") or "TestRay" in nodeid or nodeid.endswith("[ray]")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Tests that do not need Ray begin without it."""
    if "ray" in sys.modules and (nextitem is None or not needs_ray(nextitem.nodeid)):
        sys.modules["ray"].shutdown()
