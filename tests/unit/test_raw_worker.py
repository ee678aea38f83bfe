"""Bytes that no worker of ``wsync`` sends: an end that has the key, or a recording of one, and says what is not so."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
from raw_worker import RawWorker
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from workers_here import connect, make_worker

import wsync

SECRET = "a secret of these tests"


@contextmanager
def joined(timeout: float = 20.0) -> Iterator[tuple[wsync.WeightSyncScheme, RawWorker]]:
    """A sender, and its one worker."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("WSYNC_AUTHKEY", SECRET)
        sender = stack.enter_context(wsync.DistributedWeightSyncScheme(store=store, timeout=timeout))
        sender.init_on_sender("policy", model=nn.Linear(2, 2), num_workers=1)
        connecting = threading.Thread(target=sender.connect)
        connecting.start()
        other = TCPStore("127.0.0.1", store.port)  # a wait would keep the first from the sender's thread
        other.wait(["wsync/policy/1"])
        worker = RawWorker(other, SECRET)
        stack.callback(worker.socket.close)
        worker.join()
        connecting.join()
        yield sender, worker


def test_a_recorded_handshake_is_refused() -> None:
    with joined() as (_, worker), socket.create_connection(worker.socket.getpeername(), timeout=10.0) as other:
        other.recv(16)
        other.sendall(worker.sent)
        with suppress(ConnectionError):
            assert other.recv(100) == b""


def test_a_recorded_frame_ends_its_connection() -> None:
    with joined() as (sender, worker):
        worker.socket.sendall(2 * worker.frame("State", received=1))
        with pytest.raises(wsync.WorkerDied, match="a message without the key of this connection"):
            sender.send()


FAR = 2**40 - 1


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("State", {"received": FAR, "ready": FAR, "installed": FAR}),
        ("State", {"received": 2**40}),
        ("State", {"received": -1}),
        *(("State", {"received": 1, "wait": seconds}) for seconds in (float("nan"), float("inf"), -5.0)),
        ("Refused", {"version": FAR, "error": "no", "last": True}),
        ("Fits", {}),  # it was asked about one layout, and has answered
    ],
)
def test_an_answer_that_cannot_be_ends_the_connection(kind: str, fields: dict[str, Any]) -> None:
    with joined() as (sender, worker):
        worker.say(kind, **fields)
        with pytest.raises(wsync.WorkerDied, match=r"which it was not sent|has sent something unknown|does not say"):
            sender.send()


def test_a_byte_does_not_renew_the_deadline() -> None:
    with joined(timeout=1.0) as (sender, worker):
        over = threading.Event()

        def answer() -> None:
            for byte in worker.frame("State", received=2, ready=2, installed=2):
                if over.wait(0.2):
                    return
                worker.socket.send(bytes([byte]))

        answering = threading.Thread(target=answer)
        answering.start()
        started = time.monotonic()
        with pytest.raises(wsync.SyncTimeout, match="worker 0"):
            sender.send()
        over.set()
        answering.join()
        assert time.monotonic() - started < 3.0


@pytest.mark.parametrize("text", ["\N{GRINNING FACE}" * 100_000, "a file \udc80"])
def test_any_text_of_an_error_reaches_the_trainer(text: str) -> None:
    versions = list[int]()

    def load(pairs: Any) -> None:
        versions.append(len(list(pairs)))
        if len(versions) > 1:
            raise ArithmeticError(text)

    with wsync.DistributedWeightSyncScheme(timeout=20.0) as sender:
        sender.init_on_sender("policy", model=nn.Linear(2, 2), num_workers=1)
        with make_worker(sender, 0, load=load, near=False) as worker:
            connect(sender.connect, worker)
            with pytest.raises(wsync.WorkerFailed, match=r"😀|a file") as failed:
                sender.send()
    assert len(str(failed.value)) < 1 << 17


unpickled = list[str]()


def note(text: str) -> None:
    unpickled.append(text)


class Planted(nn.Linear):
    """Its extra state runs code where it is unpickled."""

    def get_extra_state(self) -> object:
        return self

    def set_extra_state(self, state: object) -> None: ...

    def __reduce__(self) -> tuple[Any, ...]:
        return note, ("it has run",)


@pytest.mark.parametrize("load", [None, list])
def test_extra_state_is_unpickled_for_a_module_alone(load: Any) -> None:
    unpickled.clear()
    with wsync.SharedMemWeightSyncScheme(timeout=20.0) as sender:
        sender.init_on_sender("policy", model=Planted(2, 2), num_workers=1)
        with make_worker(sender, 0, model=None if load else Planted(2, 2), load=load) as worker:
            connect(sender.connect, worker)
            assert bool(unpickled) is (load is None)
