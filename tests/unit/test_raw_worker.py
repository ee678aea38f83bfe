"""Bytes that no worker of ``wsync`` sends: an end that has the key, or a recording of one, and says what is not so."""

import gc
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raw_worker import RawWorker
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from workers_here import both_ends

import wsync
from wsync.testing.models import Small, fill

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

    with (
        both_ends(nn.Linear(2, 2), kind=wsync.DistributedWeightSyncScheme, load=load, near=False) as (sender, _),
        pytest.raises(wsync.WorkerFailed, match=r"😀|a file") as failed,
    ):
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
    with both_ends(Planted(2, 2), model=None if load else Planted(2, 2), load=load):
        assert bool(unpickled) is (load is None)


# --- arbitrary bytes: a short run by default; --hypothesis-profile=long --timeout=0 takes some minutes ---


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
        given = {"kind": wsync.DistributedWeightSyncScheme, "model": model, "near": not options, **options}
        with both_ends(fill(Small(), 1), **given) as (scheme, receiver):
            scheme.timeout = 0.5
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
