"""Arbitrary bytes from outside are understood or refused: no hang, no crash, nothing executed, nothing leaked.

A short run by default; ``--hypothesis-profile=long --timeout=0`` takes some minutes.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workers_here import connect, make_worker

import wsync
from wsync.testing.models import Small, fill


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def connected_sockets() -> set[int]:
    """The descriptors of this process that are connected sockets."""
    found = set[int]()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if stat.S_ISSOCK(os.stat(path).st_mode):
                with socket.socket(fileno=os.dup(int(path.name))) as opened:
                    opened.getpeername()
                    found.add(int(path.name))
    return found


@pytest.mark.parametrize("options", [{}, {"shared_memory": False}], ids=["memory", "socket"])
def test_bytes_on_an_authenticated_connection_harm_neither_end(options: dict[str, Any]) -> None:
    """They may come from either end: the sender loses the worker, the worker its sender; both can shut down."""
    gc.collect()
    before = descriptors()

    @settings(max_examples=10, deadline=None)
    @given(st.lists(st.binary(min_size=1, max_size=120), min_size=1, max_size=3), st.integers(0, 9))
    def send_noise(contents: list[bytes], end: int) -> None:
        others, model = connected_sockets(), Small()
        with wsync.DistributedWeightSyncScheme(timeout=0.5, **options) as scheme:
            scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
            with make_worker(scheme, 0, model=model, near=not options) as receiver:
                connect(scheme.connect, receiver)
                opened = sorted(connected_sockets() - others)
                with socket.socket(fileno=os.dup(opened[end % len(opened)])) as raw:
                    for content in contents:
                        with suppress(OSError):
                            raw.send(content)
                    with suppress(OSError):
                        raw.shutdown(socket.SHUT_WR)
                with suppress(wsync.WeightSyncError):
                    scheme.send(fill(Small(), 2))
                assert model().unique().tolist() in ([1.0], [2.0])
                with suppress(wsync.WeightSyncError):
                    while receiver.receive(0.2) is not None:
                        pass

    send_noise()
    gc.collect()
    assert descriptors() <= before + 2  # kept once by what the schemes share in a process
