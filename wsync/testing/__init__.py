"""The contract suite for backends, for use with pytest: ``BackendContract``. pytest has to be installed.

A backend's test class derives from it and overrides ``make_scheme`` and, where it can, the other methods of
``BackendHooks``.
"""

from wsync.errors import missing_extra

try:
    import pytest
except ModuleNotFoundError as error:
    raise missing_extra(error, "testing") from error

_PARTS = (
    "delivery",
    "faults",
    "pull",
    "restarts",
    "session",
    "shutdowns",
    "transactions",
    "transports",
    "unlike",
    "updates",
    "workers",
)
pytest.register_assert_rewrite(*(f"wsync.testing.{part}" for part in _PARTS))  # before they are imported

from wsync.testing.contract import BackendContract  # noqa: E402
from wsync.testing.hooks import BackendHooks  # noqa: E402
from wsync.testing.session import Session  # noqa: E402
from wsync.testing.workers import ProcessWorker, Worker, WorkerError, WorkerGroup, WorkerPool  # noqa: E402

__all__ = [
    "BackendContract",
    "BackendHooks",
    "ProcessWorker",
    "Session",
    "Worker",
    "WorkerError",
    "WorkerGroup",
    "WorkerPool",
]
