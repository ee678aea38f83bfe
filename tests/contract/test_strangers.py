"""Whoever else comes to a sender's door, its workers get in, and the trainer goes on."""

from __future__ import annotations

import random
import socket
import time
from typing import Any

import pytest
from contract_models import Small, fill
from crew import crew, establish

import wsync
from wsync.wire.words import PROTOCOL, Kind, Message


def visit(endpoint: Any) -> socket.socket:
    """A connection to a sender's door."""
    if hasattr(endpoint, "port"):
        return socket.create_connection((endpoint.host, endpoint.port))
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(endpoint.address)
    return sock


@pytest.mark.parametrize("backend", ["shared_mem", "multiprocess", "distributed"])
def test_workers_come_in_next_to_strangers(backend: str) -> None:
    noise = random.Random(5)
    hello = Message(Kind.HELLO, 0, PROTOCOL, noise.randbytes(16)).pack()
    words = [b"", b"GET / HTTP/1.1\r\n\r\n", noise.randbytes(500), hello, hello[:20], Message(Kind.HELLO).header(2**63)]
    with crew(2) as workers, wsync.WeightSyncScheme.from_backend(backend, timeout=30.0) as scheme:
        model = fill(Small(), 1)
        scheme.init_on_sender("policy", model=model, num_workers=2)
        endpoint = getattr(scheme._seed, "endpoint", scheme._seed)
        strangers = [visit(endpoint) for _ in words]
        for stranger, word in zip(strangers, words, strict=True):
            if word:
                stranger.send(word)
        for index, worker in enumerate(workers.workers):
            worker.call("init", scheme, Small, index, "policy")
            worker.start("connect")
        began = time.monotonic()
        establish(scheme)
        assert time.monotonic() - began < 5.0  # one second for each stranger would be more
        assert workers.results() == [1, 1]
        for value in (2, 3):
            scheme.send(fill(model, value))
            assert [seen[0] for seen in workers.all("forward")] == [value] * 2
        for stranger in strangers:
            stranger.close()
