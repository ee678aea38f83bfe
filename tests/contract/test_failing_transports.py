"""What ``send_weights`` of a user's own transport raises, and what the trainer is told."""

import os
import threading
from collections.abc import Callable
from multiprocessing import ProcessError
from pathlib import Path
from typing import Any

import pytest
from file_backend import FileScheme, FileTransport

import wsync
from wsync.testing import commands
from wsync.testing.hooks import BackendHooks
from wsync.testing.models import Small


class FailingTransport(FileTransport):
    """Raises ``error``, once, after a call of ``before_error``."""

    error: BaseException | None = None
    before_error: Callable[[], None] | None = None

    def send_weights(self, weights: Any) -> None:
        error, self.error = self.error, None
        if error is None:
            self.write(weights)
            return
        if self.before_error is not None:
            self.before_error()
        raise error

    def write(self, weights: Any) -> None:
        super().send_weights(weights)


def raising() -> None:
    """In place of ``close``."""
    raise RuntimeError("close failed")


class FailingScheme(FileScheme):
    """Keeps its transports, so that a test can have them fail."""

    transport_type: type[FailingTransport] = FailingTransport

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(folder, **options)
        self.transports: dict[int, FailingTransport] = {}

    def create_transport(self, worker_idx: int | None = None) -> FileTransport:
        assert worker_idx is not None
        self.transports[worker_idx] = self.transport_type(self.folder / f"{worker_idx}.pt")
        return self.transports[worker_idx]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "transports": {}}


class Misspelt:
    """Has one of the methods of a transport, and another under a wrong name."""

    def send_weights(self, weights: Any) -> None: ...

    def recieve_weights(self, timeout: float | None = None, **places: Any) -> Any: ...


class MisspeltScheme(FileScheme):
    """``create_transport`` returns ``made``, which is no transport, in the trainer or in the workers."""

    def __init__(self, folder: str, made: Any = None, *, in_worker: bool = False, **options: Any) -> None:
        super().__init__(folder, **options)
        self.made, self.in_worker, self.trainer = made, in_worker, os.getpid()

    def create_transport(self, worker_idx: int | None = None) -> Any:
        if self.in_worker is (os.getpid() != self.trainer):
            return self.made
        return super().create_transport(worker_idx)


class TestFailingTransports(BackendHooks):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_scheme(self, scheme_type: type[FileScheme] = FailingScheme, **options: Any) -> FileScheme:
        return scheme_type(str(self.folder), **options)

    def test_a_transport_whose_close_raises_hides_no_death_and_stops_no_shutdown(self) -> None:
        with self.connected(3) as session:
            scheme: Any = session.scheme
            scheme.transports[0].close = scheme.transports[1].close = raising
            session.workers[0].kill()
            with pytest.raises(wsync.WorkerDied, match="worker 0"):
                session.send(2)
            session.send(3)
            assert session.outputs() == [3, 3]
            assert session.workers.call(commands.receive) == [("dict", ["weight"])] * 2
            session.scheme.shutdown()
            assert session.workers.call(commands.receive) == [None, None]

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

    @pytest.mark.parametrize("made", [None, Misspelt()])
    def test_what_is_no_transport_is_an_error_that_names_the_methods(self, made: Any) -> None:
        expected = pytest.raises(wsync.WorkerFailed, match=r"create_transport\(\) returned .*receive_weights")
        with expected, self.connected(1, scheme_type=MisspeltScheme, made=made):
            pass

    def test_why_a_worker_could_not_set_its_transport_up_reaches_the_trainer(self) -> None:
        with self.workers(1) as workers, self.make_scheme(MisspeltScheme, in_worker=True, timeout=60.0) as scheme:
            scheme.init_on_sender("policy", model=Small(), num_workers=1)
            workers[0].start(commands.join, scheme, Small, 0, "policy")
            with pytest.raises(wsync.WorkerDied, match=r"(?s)worker 0.*TypeError.*receive_weights"):
                scheme.connect()
            with pytest.raises(ProcessError, match="receive_weights"):
                workers[0].result()

    def test_a_transport_that_does_not_return_in_time_is_a_dead_worker(self) -> None:
        released = threading.Event()
        with self.connected() as session:
            scheme: Any = session.scheme
            scheme.transports[1].error = TimeoutError("given up")
            scheme.transports[1].before_error = lambda: released.wait(60.0) and None
            scheme.timeout = 0.3
            try:
                with pytest.raises(wsync.WorkerDied, match="worker 1"):
                    session.send(2)
                session.send(3)
                assert session.workers[0].call(commands.output)[0] == 3
            finally:
                released.set()
