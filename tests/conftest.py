"""For all tests: no threads on busy cores, one fork server, signals that may be ignored; fuzzing; who runs what."""

import signal
from multiprocessing import forkserver
from typing import Any

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

settings.register_profile("long", max_examples=3_000, deadline=None)  # pytest --hypothesis-profile=long
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and theirs, ignore it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and what runs under nohup this one
forkserver.set_forkserver_preload(["collectors.workers.worker"])  # there is one server: all gain


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """With several processes at work, one of them does all that needs the same things: they take long to start."""
    return ByNeed(config, log)


class ByNeed(LoadScopeScheduling):
    """The tests of a file stay together; of the faults, those of a backend do."""

    def _split_scope(self, nodeid: str) -> str:
        file, _, case = nodeid.partition("::")
        return case.partition("[")[2] if file.startswith("tests/chaos/") else file
