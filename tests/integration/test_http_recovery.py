"""After a fault between a trainer and engines: nothing stays paused, and a new attempt begins afresh."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from http_engines import trainer

import wsync
from wsync.testing.models import Small


@contextmanager
def dripping() -> Iterator[str]:
    """A server that answers with one byte after the other, without an end."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve_all() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    try:
                        connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                        while not over.wait(0.02):
                            connection.sendall(b"x")
                    except OSError:
                        continue

        thread = threading.Thread(target=serve_all)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_an_engine_that_answers_without_an_end_holds_no_connect() -> None:
    with dripping() as url, pytest.raises(wsync.SyncTimeout, match="no answer before"), trainer(url, timeout=0.5):
        pass


def test_the_number_of_workers_is_that_of_the_urls() -> None:
    with wsync.HTTPWeightSyncScheme(["http://a", "http://b"]) as scheme:
        for count in (1, 3):
            with pytest.raises(ValueError, match="urls"):
                scheme.init_on_sender("policy", model=Small(), num_workers=count)
        scheme.init_on_sender("policy", model=Small(), num_workers=2)
