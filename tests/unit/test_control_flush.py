"""``SocketConnection.flush``: raw bytes and a close may follow a message that a thread sends."""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import wait

import pytest

from wsync.control import Kind, Listener, Message, SocketConnection, connect

SIZE = 8 << 20  # bytes; more than a socket takes at once


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_a_long_message_arrives_though_the_connection_is_closed_after_flush(host: str) -> None:
    listener = Listener(host)
    worker = connect(listener.address, 0, time.monotonic() + 20.0)
    accepted: SocketConnection | None = None
    while accepted is None:
        assert wait([listener.fileno()], 20)
        found = listener.accept()
        accepted = None if found is None else found[0]
    received: list[Message | None] = []
    reading = threading.Thread(target=lambda: received.extend(worker.receive() for _ in range(2)))
    reading.start()
    accepted.send(Message(Kind.DATA, payload=bytes(SIZE)))
    accepted.flush()
    accepted.close()
    reading.join()
    worker.close()
    listener.close()
    message, end = received
    assert message is not None and message.payload == bytes(SIZE) and end is None
