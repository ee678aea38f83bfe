"""What ``send_weights`` of a user's own transport raises, and what the trainer is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from file_backend import FileScheme, FileTransport

import wsync
from wsync.testing.hooks import BackendHooks


class FailingTransport(FileTransport):
    """Raises ``error``, once, after a call of ``before_error``."""

    error: Exception | None = None
    before_error: Callable[[], None] | None = None

    def send_weights(self, weights: Any) -> None:
        error, self.error = self.error, None
        if error is None:
            super().send_weights(weights)
            return
        if self.before_error is not None:
            self.before_error()
        raise error


class FailingScheme(FileScheme):
    """Keeps its transports, so that a test can have them fail."""

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(folder, **options)
        self.transports: dict[int, FailingTransport] = {}

    def create_transport(self, worker_idx: int | None = None) -> FileTransport:
        assert worker_idx is not None
        self.transports[worker_idx] = FailingTransport(self.folder / f"{worker_idx}.pt")
        return self.transports[worker_idx]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "transports": {}}


class TestFailingTransports(BackendHooks):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_scheme(self, **options: Any) -> FailingScheme:
        return FailingScheme(str(self.folder), **options)

    @pytest.mark.parametrize("error", [BrokenPipeError("gone"), RuntimeError("gone")])
    def test_a_transport_that_fails_because_its_worker_was_killed(self, error: Exception) -> None:
        with self.connected() as session:
            scheme: Any = session.scheme
            scheme.transports[1].error, scheme.transports[1].before_error = error, session.workers[1].kill
            with pytest.raises(wsync.WorkerDied, match="worker 1") as died:
                session.send(2)
            assert list(died.value.workers) == [1]
            session.restart(1)
            assert session.outputs() == [2, 2]

    def test_a_broken_connection_of_a_live_worker_disconnects_it(self) -> None:
        with self.connected() as session:
            scheme: Any = session.scheme
            scheme.transports[1].error = ConnectionResetError("the stream is cut")
            with pytest.raises(wsync.WorkerDied, match=r"(?s)worker 1.*the stream is cut"):
                session.send(2)
            session.send(3)
            assert session.outputs() == [3, 1]
            session.workers[1].kill()
            session.restart(1)
            assert session.outputs() == [3, 3]

    def test_after_any_other_error_the_worker_stays_connected(self) -> None:
        with self.connected() as session:
            scheme: Any = session.scheme
            scheme.transports[1].error = ArithmeticError("no room for it")
            with pytest.raises(wsync.WorkerFailed, match=r"(?s)worker 1.*no room for it"):
                session.send(2)
            session.send(3)
            assert session.outputs() == [3, 3]
