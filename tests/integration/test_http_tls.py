"""Weights over https: nothing leaves the trainer unencrypted, also when an update is given up at its deadline."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

from wsync.deadlines import NOW
from wsync.engine.client import EngineClient, EngineError

FILLER, SECRET = bytes(8 << 20), b"weights " * (1 << 17)  # the first is larger than the buffers of a connection


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A file with a self-signed certificate of 127.0.0.1, and its key."""
    command = shutil.which("openssl") or pytest.skip("there is no openssl command")
    made = tmp_path / "made.pem"
    options = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=engine -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(
        [command, *options.split(), "-keyout", made, "-out", tmp_path / "own.pem"],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    made.write_bytes(made.read_bytes() + (tmp_path / "own.pem").read_bytes())
    return made


class SilentEngine:
    """Accepts one TLS connection, and reads what arrives, still encrypted, once it is told to.

    Attributes:
        started: set when a request has begun.
        read: set to have it read.
        drained: set when as many bytes as the weights have been read.
        received: the bytes.
    """

    def __init__(self, certificate: Path) -> None:
        self.started, self.read, self.drained = threading.Event(), threading.Event(), threading.Event()
        self.received = bytearray()
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listening.getsockname()[1]}"

    def run(self) -> None:
        with self._listening:
            encrypted = self._context.wrap_socket(self._listening.accept()[0], server_side=True)
        with socket.socket(fileno=encrypted.detach()) as plain:
            plain.recv(1, socket.MSG_PEEK)
            self.started.set()
            self.read.wait(30.0)
            while piece := plain.recv(1 << 20):
                self.received += piece
                if len(self.received) >= len(FILLER) + len(SECRET):
                    self.drained.set()


def test_nothing_is_sent_in_plain_text_while_an_update_is_aborted(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that sends may run at any moment of an abort: here, just before the connection is shut down."""
    engine, shutdown = SilentEngine(certificate), socket.socket.shutdown
    client = EngineClient(engine.url, context=ssl.create_default_context(cafile=str(certificate)))
    errors = list[EngineError]()

    def send() -> None:
        with pytest.raises(EngineError) as caught:
            client.send_body([FILLER, SECRET])
        errors.append(caught.value)

    def shut_down_later(sock: socket.socket, how: int) -> None:
        client.deadline = None  # the thread that sends has looked at it just before the abort
        engine.read.set()
        assert engine.drained.wait(30.0)
        client.deadline = NOW
        shutdown(sock, how)

    threads = [threading.Thread(target=target) for target in (engine.run, send)]
    for thread in threads:
        thread.start()
    assert engine.started.wait(30.0)
    monkeypatch.setattr(socket.socket, "shutdown", shut_down_later)
    client.abort()
    for thread in threads:
        thread.join(30.0)
    assert [error.late for error in errors] == [True]
    assert SECRET[:64] not in engine.received
