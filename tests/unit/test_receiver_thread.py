"""The thread that serves all receivers of a process, and what one of them may do to the others: nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from wsync.receiving.receiver_thread import ReceiverThread

pytestmark = pytest.mark.timeout(30)


class Listening:
    """Writes down what its line says; ``"fail"`` is too much for it, or (``wholly``) everything is."""

    def __init__(self, thread: ReceiverThread, wholly: bool = False) -> None:
        self.sender, self.line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sender.settimeout(10.0)
        self.heard: list[bytes] = []
        self.over = threading.Event()
        self.wholly = wholly
        thread.register(self.line.fileno(), self)

    def on_readable(self) -> bool:
        if self.wholly:
            raise SystemExit("no")
        said = self.line.recv(100)
        if said == b"fail":
            raise OSError("cannot allocate memory")
        self.heard.append(said)
        if said:
            self.line.send(said)
            return True
        self.over.set()
        return False

    def serves(self) -> bool:
        self.sender.send(b"hello")
        return self.sender.recv(100) == b"hello"


@pytest.fixture
def thread() -> Iterator[ReceiverThread]:
    thread = ReceiverThread()
    yield thread
    for receiver, _ in set(thread._handlers.values()):
        thread.unregister(receiver)


@pytest.mark.parametrize("wholly", [False, True])
def test_a_receiver_that_fails_is_the_only_one_that_ends(
    thread: ReceiverThread, wholly: bool, caplog: pytest.LogCaptureFixture
) -> None:
    failing, other = Listening(thread, wholly), Listening(thread)
    assert other.serves()
    failing.sender.send(b"fail")
    assert failing.sender.recv(100) == b"", "its sender is not hung up on"
    assert wholly or failing.over.wait(10.0), "it does not hear that its line has ended"
    assert other.serves()
    assert failing not in [receiver for receiver, _ in thread._handlers.values()]
    assert ("no" if wholly else "cannot allocate memory") in caplog.text
    late = Listening(thread)
    assert late.serves()
    for end in (failing, other, late):
        end.sender.close()
        end.line.close()
