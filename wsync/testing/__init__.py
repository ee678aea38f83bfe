"""The contract suite for backends, for use with pytest: ``BackendContract``. pytest has to be installed.

A backend's test class derives from it and overrides ``make_scheme`` and, where it can, the other methods of
``BackendHooks``.
"""

from wsync.errors import missing_extra

try:
    import pytest
except ModuleNotFoundError as error:
    raise missing_extra(error, "testing") from error

pytest.register_assert_rewrite("wsync.testing.contract", "wsync.testing.workers")  # before they are imported

from wsync.testing.contract import BackendContract  # noqa: E402
from wsync.testing.hooks import BackendHooks, Session  # noqa: E402
from wsync.testing.workers import Worker, WorkerGroup, WorkerPool  # noqa: E402

__all__ = ["BackendContract", "BackendHooks", "Session", "Worker", "WorkerGroup", "WorkerPool"]
