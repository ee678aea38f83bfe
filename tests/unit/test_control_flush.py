"""``Connection.flush``: raw bytes and a close may follow a message that a thread sends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import Any

import pytest
from striking import struck_at

from wsync.control import Connection, Kind, Listener, Message, connect

SIZE = 8 << 20  # bytes; more than a socket takes at once


@contextmanager
def connected(host: str | None) -> Iterator[tuple[Connection, Connection]]:
    """Yield the sender's end and the worker's."""
    listener = Listener(host)
    worker = connect(listener.address, 0, time.monotonic() + 20.0)
    accepted: Connection | None = None
    while accepted is None:
        assert wait([listener.fileno()], 20)
        found = listener.accept()
        accepted = None if found is None else found[0]
    yield accepted, worker
    for one in (accepted, worker, listener):
        one.close()


every_host = pytest.mark.parametrize("host", [None, "127.0.0.1"])


@every_host
def test_a_long_message_arrives_though_the_connection_is_closed_after_flush(host: str | None) -> None:
    with connected(host) as (sender, worker):
        received: list[Message | None] = []
        reading = threading.Thread(target=lambda: received.extend(worker.receive() for _ in range(2)))
        reading.start()
        sender.send(Message(Kind.DATA, payload=bytes(SIZE)))
        sender.flush()
        sender.close()
        reading.join()
        message, end = received
        assert message is not None and message.payload == bytes(SIZE) and end is None


@every_host
def test_a_connection_ends_if_no_thread_can_be_started_to_send(host: str | None, monkeypatch: Any) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with connected(host) as (sender, worker):
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(ConnectionError, match="no thread could be started"):
            sender.send(Message(Kind.DATA, payload=bytes(SIZE)))
        assert sender.busy and sender.receive() is None
        assert worker.receive() is None


@every_host
def test_an_interruption_does_not_end_the_connection_if_the_socket_has_room(host: str | None) -> None:
    sent = Message(Kind.DATA, payload=bytes(60_000))
    with connected(host) as (sender, worker):
        sender.send(sent)
        assert worker.receive() == sent
        point, ended, arrived = 0, False, 0
        while not ended:
            point += 1
            ended = struck_at(point, lambda: sender.send(sent))
            sender.send(Message(Kind.DATA, version=point))
            message = worker.receive()
            if message == sent:  # whole, or not at all
                arrived += 1
                message = worker.receive()
            assert message == Message(Kind.DATA, version=point)
        assert 1 < arrived < point  # it was interrupted before it had sent, and afterwards


@every_host
def test_an_empty_socket_takes_a_message_of_half_its_buffer_at_once(host: str | None) -> None:
    with connected(host) as (sender, worker):
        sender.send(Message(Kind.DATA))
        assert worker.receive() == Message(Kind.DATA)
        sent = Message(Kind.DATA, payload=bytes(sender.room_when_empty))
        sender.send(sent)
        assert not sender.busy
        assert worker.receive() == sent


def test_after_an_interruption_before_the_thread_began_the_connection_ends(monkeypatch: Any) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with connected(None) as (sender, worker):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(threading.Thread, "start", interrupt)
            sender.send(Message(Kind.DATA, payload=bytes(SIZE)))
        with pytest.raises(ConnectionError, match="was interrupted"):
            sender.send(Message(Kind.DATA))
        assert worker.receive() is None
