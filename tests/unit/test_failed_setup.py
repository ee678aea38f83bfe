"""The set-up of a ``FlatTransport`` fails, at one end or at both: each is closed once, after its ``connect``."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import wsync
from wsync.testing.models import Small

TIMEOUT = 20.0
SETUP_THREAD = "wsync-transport-setup"


class Flat:
    """Carries nothing. ``connect`` does what the test has chosen for this end."""

    device = torch.device("cpu")
    receives_ahead = False
    inline_bytes = 0
    behaviour: ClassVar[list[Callable[[Any], object]]] = []  # by rank
    made: ClassVar[list[Flat]] = []
    error_of_close: ClassVar[Exception | None] = None

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.closed_by = ""
        self.made.append(self)

    def connect(self, store: Any, rank: int, connection_number: int, host: str, deadline: float | None) -> None:
        try:
            self.behaviour[rank](store)
        finally:
            self.calls.append("connect")

    def begin_send(self, flat: Tensor, transfers: list[Any]) -> None:
        raise RuntimeError("nothing can be sent")

    begin_receive = begin_send

    def close(self, pending: Any = None) -> bool:
        self.calls.append("close")
        self.closed_by = threading.current_thread().name
        if self.error_of_close is not None:
            raise self.error_of_close
        return False


class FlatScheme(wsync.WeightSyncScheme):
    name = "flat"

    def create_transport(self, worker_idx: int | None = None) -> Any:
        return Flat()


def raises(store: Any) -> None:
    raise RuntimeError("there is no route")


def waits(store: Any) -> None:
    store.get("what the other end never sets")


def succeeds(store: Any) -> None:
    pass


def connect_both(timeout: float = TIMEOUT, said: str | None = None, at_end: Callable[[], Any] = lambda: None) -> None:
    """Have both ends connect, which fails: the sender's error has to match ``said``; wait until all has ended."""
    with ThreadPoolExecutor() as pool, FlatScheme(timeout=timeout) as sender:
        sender.init_on_sender("policy", model=Small(), num_workers=1)
        with pickle.loads(pickle.dumps(sender)) as worker:
            worker.init_on_receiver("policy", model=Small(), worker_idx=0)
            connecting = pool.submit(worker.connect)
            with pytest.raises(wsync.WeightSyncError, match=said):
                sender.connect()
            with pytest.raises(wsync.WeightSyncError):
                connecting.result()
            at_end()
    for thread in threading.enumerate():
        if thread.name == SETUP_THREAD:
            thread.join(TIMEOUT)


def set_up(monkeypatch: pytest.MonkeyPatch, *behaviour: Callable[[Any], object]) -> list[Flat]:
    monkeypatch.setattr(Flat, "behaviour", behaviour)
    monkeypatch.setattr(Flat, "made", [])
    return Flat.made


@pytest.mark.parametrize("in_worker", [raises, waits, succeeds])
@pytest.mark.parametrize("on_sender", [raises, waits, succeeds])
def test_each_end_is_closed_once(monkeypatch: pytest.MonkeyPatch, on_sender: Any, in_worker: Any) -> None:
    made = set_up(monkeypatch, on_sender, in_worker)
    connect_both(TIMEOUT if raises in (on_sender, in_worker) else 0.5)
    assert [one.calls for one in made] == [["connect", "close"]] * 2


def test_an_end_that_is_set_up_too_late_is_closed_then(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up = threading.Event()
    made = set_up(monkeypatch, lambda _: given_up.wait(TIMEOUT), raises)

    def check_and_let_go() -> None:
        assert sorted(one.calls for one in made) == [[], ["connect", "close"]]
        given_up.set()

    connect_both(at_end=check_and_let_go)
    assert [one.calls for one in made] == [["connect", "close"]] * 2
    assert [one.closed_by for one in made] == [SETUP_THREAD] * 2


def test_a_worker_whose_transport_cannot_be_closed_does_not_hinder_the_shutdown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = set_up(monkeypatch, lambda _: None, lambda _: None)
    sender = FlatScheme(timeout=TIMEOUT)
    sender.init_on_sender("policy", model=None, num_workers=2)
    workers = [pickle.loads(pickle.dumps(sender)) for _ in range(2)]
    for index, worker in enumerate(workers):
        worker.init_on_receiver("policy", model=Small(), worker_idx=index)
    with ThreadPoolExecutor() as pool:
        connecting = [pool.submit(worker.connect) for worker in workers]
        sender.connect()
        for one in connecting:
            one.result()
    monkeypatch.setattr(Flat, "error_of_close", OSError("close failed"))
    sender.shutdown()
    assert [worker.receive(TIMEOUT) for worker in workers] == [None, None]
    assert all(worker.finished for worker in workers)
    for worker in workers:
        worker.shutdown()
    assert [one.calls for one in made] == [["connect", "close"]] * 4
    assert caplog.text.count("Flat.close() raised an error") == 4


def test_an_error_of_close_does_not_hide_why_the_set_up_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = set_up(monkeypatch, raises, waits)
    monkeypatch.setattr(Flat, "error_of_close", OSError("close failed"))
    connect_both(said="there is no route")
    assert [one.calls for one in made] == [["connect", "close"]] * 2


class Blocking:
    """A ``TransportBackend`` that carries nothing, and counts the calls of ``close`` on the sender."""

    closed: ClassVar[list[Blocking]] = []
    on_sender = False

    def setup_connection_and_weights_on_sender(self) -> None:
        self.on_sender = True

    def setup_connection_and_weights_on_receiver(self, **_: Any) -> None:
        pass

    def send_weights(self, weights: Any) -> None:
        raise RuntimeError("nothing can be sent")

    receive_weights = send_weights

    def close(self) -> None:
        if self.on_sender:
            self.closed.append(self)


@pytest.mark.parametrize("flat", [True, False])
def test_a_transport_without_a_thread_is_closed(monkeypatch: pytest.MonkeyPatch, flat: bool) -> None:
    made, start, refused = set_up(monkeypatch, succeeds, succeeds), threading.Thread.start, list[threading.Thread]()

    def refuse_first(thread: threading.Thread) -> None:
        if thread.name == (SETUP_THREAD if flat else "wsync-transfer") and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(Blocking, "closed", [])
    monkeypatch.setattr(threading.Thread, "start", refuse_first)
    if not flat:
        monkeypatch.setattr(FlatScheme, "create_transport", lambda *_: Blocking())
    descriptors = len(os.listdir("/proc/self/fd"))
    connect_both()
    assert len(refused) == 1 and len(os.listdir("/proc/self/fd")) <= descriptors
    if flat:
        assert sorted(one.calls for one in made) == [["close"], ["connect", "close"]]
    else:
        assert len(Blocking.closed) == 1
