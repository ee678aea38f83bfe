"""A worker that connects to a sender that breaks the protocol, or goes away meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Script, Scripted
from torch import Tensor, nn

import wsync
from wsync.control import Connection, Kind, Message
from wsync.control.settings import SenderSettings
from wsync.gate import process_gate
from wsync.receiving.joining import BackgroundConnect
from wsync.weights.layout import Layout
from wsync.weights.snapshot import snapshot

NO_MEMORY = (os.getpid(), 0, 0, "no arena")
SETTINGS = SenderSettings(Layout.of(snapshot(nn.Linear(2, 2))), None)


class ArenaOnly(Scripted):
    """Takes weights from shared memory."""

    arena_only = True


def connect_by(script: Script, scheme: type[Scripted] = Scripted) -> None:
    with scheme(script) as worker:
        worker.init_on_receiver("policy", model=nn.Linear(2, 2), worker_idx=0)
        worker.connect()


def test_a_malformed_message_while_a_worker_connects_is_named_at_both_ends() -> None:
    ends: list[Connection] = []

    def script(sender: Connection) -> None:
        ends.append(sender)
        sender.send(Message(Kind.ACCEPTED, 0, 1, SETTINGS.dump()))
        sender.send(Message(Kind.BEGIN_RECEIVE, 0, 1, b"no"))

    with pytest.raises(wsync.NotConnected, match="invalid message from the sender: the payload has 2 bytes"):
        connect_by(script)
    answer = ends[0].receive()
    assert answer is not None and answer.kind is Kind.FAILED
    assert "the payload has 2 bytes" in answer.payload.decode()


def test_a_sender_that_dies_after_it_has_accepted_a_worker_is_not_connected() -> None:
    def script(sender: Connection) -> None:
        sender.send(Message(Kind.ACCEPTED, 0, 0, SenderSettings(None, None, arena_handle=NO_MEMORY).dump()))
        sender.close()

    with pytest.raises(wsync.NotConnected, match="worker 0: the sender went away"):
        connect_by(script)


def test_memory_that_cannot_be_mapped_is_closed() -> None:
    memory = os.memfd_create("wsync-empty")
    settings = SenderSettings(None, None, arena_handle=(os.getpid(), memory, memory, "wsync-empty"))
    ends: list[Connection] = []  # without a reference, the garbage collector would close it

    def descriptors() -> int:
        links = [os.readlink(one.path) for one in os.scandir("/proc/self/fd") if os.path.lexists(one.path)]
        return links.count("/memfd:wsync-empty (deleted)")

    def script(sender: Connection) -> None:
        ends.append(sender)
        sender.send(Message(Kind.ACCEPTED, 0, 0, settings.dump()))

    with pytest.raises(wsync.NotConnected, match="invalid message from the sender"):
        connect_by(script, ArenaOnly)
    assert descriptors() == 1
    os.close(memory)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    descriptors = os.pipe()
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)


@pytest.mark.parametrize("settings", [b"[]", SenderSettings(None, None, num_workers=1).dump().replace(b"1", b"-1")])
def test_descriptors_that_come_with_invalid_settings_are_closed(settings: bytes, pipe: tuple[int, int]) -> None:
    targets = {os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in pipe}

    def script(sender: Connection) -> None:
        sender.send(Message(Kind.ACCEPTED, 0, 0, settings, fds=pipe))

    with pytest.raises(wsync.NotConnected, match="invalid message"):
        connect_by(script)
    copies = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink() and str(path.readlink()) in targets]
    assert len(copies) == 2


def test_closing_ends_the_wait_for_a_connection_in_the_background(pipe: tuple[int, int]) -> None:
    joining = BackgroundConnect(lambda: None)
    joining.begin([pipe[0]])
    assert not joining.wait(0.0)
    joining.close()
    with pytest.raises(wsync.NotConnected, match="shut down"):
        joining.wait(0.0)


def test_whatever_ends_a_connection_in_the_background_ends_the_wait(pipe: tuple[int, int]) -> None:
    def leave() -> None:
        raise SystemExit("of a model's hook")

    joining = BackgroundConnect(leave)
    joining.begin([pipe[0]])
    os.write(pipe[1], b".")
    with pytest.raises(SystemExit, match="hook"):
        joining.wait(30.0)


def test_a_connect_that_was_interrupted_leaves_nothing_behind(tmp_path: Path) -> None:
    loaded: list[str] = []

    def load(pairs: Iterable[tuple[str, Tensor]]) -> None:
        loaded.extend(name for name, _ in pairs)
        if len(loaded) == 2:
            raise KeyboardInterrupt

    with wsync.StoreWeightSyncScheme(str(tmp_path)) as trainer, wsync.StoreWeightSyncScheme(str(tmp_path)) as worker:
        trainer.init_on_sender("policy", model=nn.Linear(2, 2), num_workers=1)
        trainer.connect()
        worker.init_on_receiver("policy", load=load, worker_idx=0)
        with pytest.raises(KeyboardInterrupt):
            worker.connect()
        assert not process_gate().gate_state.hooks
        worker.connect()
        assert worker.version == 1 and len(process_gate().gate_state.hooks) == 1


def test_receive_after_a_connect_that_failed_raises() -> None:
    def reject(sender: Connection) -> None:
        sender.send(Message(Kind.REJECTED, payload=b"not today"))

    with Scripted(reject) as worker:
        worker.init_on_receiver("policy", model=nn.Linear(2, 2), worker_idx=0)
        for wait in (worker.receive, worker.pull):
            with pytest.raises(wsync.NotConnected, match="call connect"):
                wait(None)
        with pytest.raises(wsync.NotConnected, match="not today"):
            worker.connect()
        for wait in (worker.receive, worker.pull):
            with pytest.raises(wsync.NotConnected, match="no more weights"):
                wait(None)
        assert not worker.finished


def test_receive_after_a_connect_that_could_not_begin_raises() -> None:
    def break_(sender: Connection) -> None:
        raise wsync.NotConnected("no network")

    with Scripted(break_) as worker:
        worker.init_on_receiver("policy", model=nn.Linear(2, 2), worker_idx=0)
        receiver = worker._role.as_receiver("test").receiver
        with pytest.raises(wsync.NotConnected, match="no network"):
            receiver.begin_connect(0, 30.0)
        with pytest.raises(wsync.NotConnected, match="call connect"):
            worker.receive(None)


def test_a_worker_that_lost_its_sender_connects_again() -> None:
    ends: list[Connection] = []

    def script(sender: Connection) -> None:
        ends.append(sender)
        if len(ends) == 2:  # the first attempt to connect again fails
            sender.close()
        else:
            sender.send(Message(Kind.ACCEPTED, 0, 0, SETTINGS.dump()))

    with Scripted(script) as worker:
        worker.init_on_receiver("policy", model=nn.Linear(2, 2), worker_idx=0)
        worker.connect()
        with pytest.raises(RuntimeError, match="connected already"):
            worker.connect()
        assert worker.receive(0.0) is None, "a refused second connect() keeps the connection"
        ends[0].close()
        for _ in range(2):
            with pytest.raises(wsync.NotConnected, match="no more weights"):
                worker.receive(None)
            if len(ends) == 1:
                with pytest.raises(wsync.NotConnected, match="went away"):
                    worker.connect()
        worker.connect()
        assert worker.receive(0.0) is None and not worker.finished
        ends[-1].send(Message(Kind.LEAVE, version=1))
        assert worker.receive(None) is None and worker.finished
        with pytest.raises(wsync.NotConnected, match="has shut down"):
            worker.receive(None)
    assert len(ends) == 3


def test_a_worker_that_cannot_install_its_first_weights_is_not_finished(tmp_path: Path) -> None:
    """The sender has not shut down."""

    def load(pairs: Iterable[tuple[str, Tensor]]) -> None:
        raise OSError("no room")

    with wsync.StoreWeightSyncScheme(str(tmp_path)) as trainer, wsync.StoreWeightSyncScheme(str(tmp_path)) as worker:
        trainer.init_on_sender("policy", model=nn.Linear(2, 2), num_workers=1)
        trainer.connect()
        worker.init_on_receiver("policy", load=load, worker_idx=0)
        with pytest.raises(wsync.WeightSyncError, match="no room"):
            worker.connect()
        assert not worker.finished
        with pytest.raises(wsync.NotConnected, match="no more weights"):
            worker.receive(None)


@pytest.mark.parametrize("connected", [False, True])
def test_weights_before_their_layout_are_named_at_both_ends(connected: bool) -> None:
    ends: list[Connection] = []
    early = Message(Kind.BEGIN_RECEIVE, 0, 1, bytes(8))

    def script(sender: Connection) -> None:
        ends.append(sender)
        sender.send(Message(Kind.ACCEPTED, 0, 0 if connected else 1, SenderSettings(None, None).dump()))
        if not connected:
            sender.send(early)

    with Scripted(script) as worker:
        worker.init_on_receiver("policy", model=nn.Linear(2, 2), worker_idx=0)
        if connected:
            worker.connect()
            ends[0].send(early)
        with pytest.raises(wsync.NotConnected, match="no more weights" if connected else "before its layout"):
            worker.receive(None) if connected else worker.connect()
        answer = ends[0].receive()
        assert answer is not None and answer.kind is Kind.FAILED
        assert "before its layout" in answer.payload.decode()


class Probed(nn.Linear):
    """Notes whether each forward ran inside the gate."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.inside: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.inside.append(process_gate().held_here)
        return super().forward(x)


def test_a_model_stays_gated_while_one_of_its_schemes_connects_and_another_shuts_down() -> None:
    ends: list[Connection] = []

    def accept(sender: Connection) -> None:
        ends.append(sender)  # a connection that is dropped is closed
        sender.send(Message(Kind.ACCEPTED, 0, 0, SETTINGS.dump()))

    model, accepted = Probed(), threading.Event()
    with Scripted(accept) as first, Scripted(accept) as second:
        second._rendezvous.connected = lambda _: accepted.set()  # called before the model is gated
        for scheme in (first, second):
            scheme.init_on_receiver("policy", model=model, worker_idx=0)
        first.connect()
        thread = threading.Thread(target=second.connect, daemon=True)
        with process_gate().gate_state.lock:  # ``second`` cannot enter the gate
            thread.start()
            assert accepted.wait(30.0)
            first.shutdown()
        thread.join(30.0)
        model(torch.ones(2))
        second.shutdown()
        model(torch.ones(2))
    assert model.inside == [True, False]
    for end in ends:
        end.close()


class Outer:
    """A context with workers of its own, which are given weights."""

    def __init__(self) -> None:
        self.updates: list[Any] = []

    def update_policy_weights_(self, weights: Any) -> None:
        self.updates.append(weights)


def test_load_in_a_context_that_needs_weights_to_pass_on_is_refused() -> None:
    with Scripted(lambda _: None) as worker, pytest.raises(ValueError, match="give model="):
        worker.init_on_receiver("policy", Outer(), load=lambda pairs: None)


@pytest.mark.parametrize("given", [{"weights": nn.Linear(2, 2)}, {"processes": [os.getpid()]}])
def test_arguments_of_the_senders_connect_are_refused_in_a_worker(given: dict[str, Any]) -> None:
    with Scripted(lambda _: None) as worker:
        worker.init_on_receiver("policy", model=nn.Linear(2, 2), worker_idx=0)
        with pytest.raises(ValueError, match=f"takes no {next(iter(given))}= on the receiver"):
            worker.connect(**given)


def test_a_workers_index_is_refused_by_the_senders_connect() -> None:
    with wsync.SharedMemWeightSyncScheme() as sender:
        sender.init_on_sender("policy", model=nn.Linear(2, 2), num_workers=1)
        with pytest.raises(ValueError, match="takes no worker_idx= on the sender"):
            sender.connect(worker_idx=0)
