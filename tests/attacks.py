"""Another user's process on the trainer's machine, without the key, given all that any user can see.

The attacker connects to every port that it finds: `integration/test_attackers.py` runs these in their own network.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from listening import own_sockets
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import wsync

ATTACKER = Path(__file__).parent / "attacker.py"
VALUE = 1234.5
SECRET = torch.full((16,), VALUE).numpy().tobytes()
"""Sixteen weights in a row."""


class Attack:
    """An attacker at work.

    Attributes:
        outcome: what it has got, once it has ended.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(ATTACKER), SECRET.hex()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self.outcome: dict[str, Any] = {}

    def end(self) -> None:
        self.outcome = json.loads(self.process.communicate()[0])


@contextmanager
def attack() -> Iterator[Attack]:
    attacker = Attack()
    try:
        yield attacker
    finally:
        attacker.end()


def model_of(value: float) -> nn.Linear:
    model = nn.Linear(64, 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def follow(line: Any) -> None:
    """Connect by each scheme that comes, and say what has come with it."""
    for scheme in iter(line.recv, None):
        model = nn.Linear(64, 64)
        scheme.init_on_receiver("policy", model=model, worker_idx=0)
        try:
            scheme.connect()
            line.send(model.bias[0].item())
        except (wsync.WeightSyncError, ConnectionError) as error:
            line.send(f"{type(error).__name__}: {error}")
        scheme.shutdown()


@pytest.fixture
def line() -> Iterator[Any]:
    """The pipe to a worker's process."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=follow, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    yield ours
    ours.send(None)
    process.join(10.0)
    process.kill()


@pytest.mark.parametrize("options", [{}, {"shared_memory": False}, {"shared_memory": False, "inline_bytes": 0}])
def test_a_process_that_connects_to_every_port_gets_no_weights(line: Any, options: dict[str, Any]) -> None:
    for _ in range(4):
        with attack() as attacker, wsync.DistributedWeightSyncScheme(timeout=30.0, **options) as scheme:
            scheme.init_on_sender("policy", model=model_of(VALUE), num_workers=1)
            time.sleep(0.3)  # the attacker has connected to the scheme's port
            line.send(scheme)
            try:
                scheme.connect()
                assert line.recv() == VALUE
            except wsync.WeightSyncError:  # it was in a pair of gloo's
                line.recv()
        assert attacker.outcome["made"] >= 5 and not attacker.outcome["found"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start another user's process")
def test_another_user_cannot_open_the_memory_nor_connect_to_a_unix_socket() -> None:
    with wsync.SharedMemWeightSyncScheme(timeout=30.0) as scheme:
        scheme.init_on_sender("policy", model=model_of(VALUE), num_workers=1)
        code = (
            "import os, socket, sys\n"
            "pid, name = int(sys.argv[1]), sys.argv[2]\n"
            "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
            "try:\n    print(os.listdir(f'/proc/{pid}/fd'))\n"
            "except PermissionError: print('no descriptors')\n"
            "sock = socket.socket(socket.AF_UNIX); sock.settimeout(5)\n"
            "sock.connect(chr(0) + name); sock.send(bytes(64))\n"
            "try:\n    print('got', len(sock.recv(100)))\n"
            "except ConnectionResetError: print('got 0')\n"
            "except TimeoutError: print('nothing came')\n"
        )
        (name,) = [
            row.split()[-1].lstrip("@")
            for row in Path("/proc/net/unix").read_text().splitlines()[1:]
            if f"socket:[{row.split()[6]}]" in own_sockets() and len(row.split()) > 7
        ]
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(os.getpid()), name], stdout=subprocess.PIPE, text=True
        )
        scheme.timeout = 2.0
        with pytest.raises(wsync.SyncTimeout):
            scheme.connect()
        assert process.communicate()[0].splitlines() == ["no descriptors", "got 0"]


# --- a user's store, which any process can read and write ---


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def follow_store(port: int, line: Any, secret: str | None) -> None:
    """Connect by the store; say what has come, or why nothing has."""
    if secret is not None:
        os.environ["WSYNC_AUTHKEY"] = secret
    store = TCPStore("127.0.0.1", port, is_master=False)
    with wsync.DistributedWeightSyncScheme(store=store, timeout=line.recv()) as scheme:
        model = nn.Linear(64, 64)
        scheme.init_on_receiver("policy", model=model, worker_idx=0)
        try:
            scheme.connect()
            line.send(model.bias[0].item())
        except wsync.WeightSyncError as error:
            line.send(f"{type(error).__name__}: {error}")


@contextmanager
def worker_of(store: TCPStore, secret: str | None = None) -> Iterator[Any]:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=follow_store, args=(store.port, theirs, secret), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def test_a_sender_with_another_secret_in_the_store_is_passed_over(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    attackers = TCPStore("127.0.0.1", store.port, is_master=False)
    with monkeypatch.context() as others, wsync.DistributedWeightSyncScheme(store=attackers, timeout=5.0) as false:
        others.setenv("WSYNC_AUTHKEY", "the attacker's")
        false.init_on_sender("policy", model=model_of(-1.0), num_workers=1)
        others.delenv("WSYNC_AUTHKEY")
        with wsync.DistributedWeightSyncScheme(store=store, timeout=60.0) as scheme, worker_of(store) as line:
            line.send(60.0)
            scheme.init_on_sender("policy", model=model_of(VALUE), num_workers=1)
            scheme.connect()
            assert line.recv() == VALUE


def test_a_process_with_another_secret_is_told_so(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        worker_of(store, "of the worker") as line,
        wsync.DistributedWeightSyncScheme(store=store, timeout=1.0) as scheme,
    ):
        line.send(4.0)
        monkeypatch.setenv("WSYNC_AUTHKEY", "of the trainer")
        scheme.init_on_sender("policy", model=model_of(VALUE), num_workers=1)
        with pytest.raises(wsync.SyncTimeout):
            scheme.connect()
        error = line.recv()
        assert "WSYNC_AUTHKEY" in error
