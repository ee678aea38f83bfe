"""The arena between real processes: what a forward uses is never written, and nobody waits for ever."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from wsync.deadlines import deadline_in
from wsync.errors import SyncTimeout, WeightSyncError
from wsync.gate import process_gate
from wsync.native import native, why_not
from wsync.shm.arena import ArenaInbox, SenderArena
from wsync.shm.registered import RegisteredWeights
from wsync.update import Update
from wsync.weights.binding import Binding
from wsync.weights.layout import Layout
from wsync.weights.packing import Buffer
from wsync.weights.snapshot import snapshot

pytestmark = pytest.mark.skipif(native is None, reason=f"no C extension: {why_not}")

TIMEOUT = 60.0
BLOCKS = 8
PROCESSES = multiprocessing.get_context("fork")


def new_model(width: int = 4, layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)), nn.BatchNorm1d(width)).eval()


class Worker:
    """One connection's end, with a receiver that does what the hook leaves to it."""

    def __init__(
        self, fds: Sequence[int], block: int, model: nn.Module, *, bind: bool = True, fast: bool = True
    ) -> None:
        self.model = model
        self.layout = Layout.of(snapshot(model))
        self.binding = Binding(model, self.layout, bind=bind)
        self.inbox = ArenaInbox([os.dup(fd) for fd in fds], block, BLOCKS, binds=bind, checksum=False)
        self.inbox.set_layout(self.layout)
        self.fast = fast
        self.seen: list[list[int]] = []  # what the receiver polled
        self.hook = self.inbox.hook_for(self)
        process_gate().attach(self.hook)
        self.use_fast_path()

    def use_fast_path(self) -> None:
        self.inbox.usual(self.binding.installer if self.fast else None)

    def poll_update(self) -> bool:
        updates = self.inbox.poll()
        self.seen.append([update.version for update in updates])
        if updates:
            self.binding.install(updates[-1].views)
            self.inbox.settled(updates[-1], "")
            self.inbox.answer(updates[-1], "", 0.0, 0.0)
            self.use_fast_path()
        return False

    def leaving_gate(self) -> None:
        self.inbox.leave()

    def values(self) -> set[float]:
        """The values in the model's parameters and buffers, as a forward sees them."""
        return process_gate().call(lambda: {value for one in self.tensors() for value in one.unique().tolist()})

    def tensors(self) -> list[torch.Tensor]:
        return [one.detach() for name, one in self.model.state_dict().items() if "num_batches" not in name]

    def close(self) -> None:
        process_gate().detach(self.hook)
        process_gate().call(self.binding.detach)
        self.inbox.unbind()
        self.inbox.close()


class Trainer:
    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model or new_model()
        self.arena = SenderArena(BLOCKS)
        self.layout = Layout.of(snapshot(self.model))
        self.arena.set_layout(self.layout)
        self.version = 0
        self.blocks: list[int] = []
        self.kept: list[int] = []

    def connect(self, pid: int | None = None) -> tuple[Sequence[int], int]:
        """Open a block for a worker's process (this one by default); return the descriptors and the block."""
        wake, pidfd = os.eventfd(0, os.EFD_NONBLOCK), os.pidfd_open(pid or os.getpid())
        self.kept += [wake, pidfd]
        self.blocks.append(self.arena.open_block(wake, pidfd, len(self.blocks)))
        return (*self.arena.fds, self.arena.signal, wake), self.blocks[-1]

    def packed(self, timeout: float = TIMEOUT) -> Update:
        """The next version: all values of the model are its number."""
        buffer = self.arena.reserve(deadline_in(timeout))
        self.version += 1
        with torch.no_grad():
            for one in self.model.state_dict().values():
                one.fill_(self.version)
        buffer.pack(self.layout.order(snapshot(self.model)))
        return Update(self.version, buffer)

    def send(self, acknowledge: bool = False, blocks: Sequence[int] | None = None, timeout: float = TIMEOUT) -> bool:
        update = self.packed(timeout)
        return self.publish(update, acknowledge, blocks)

    def publish(self, update: Update, acknowledge: bool = False, blocks: Sequence[int] | None = None) -> bool:
        blocks = self.blocks if blocks is None else blocks
        return self.arena.publish(blocks, update.version, update.buffer.slot, acknowledge)

    @property
    def slots(self) -> int:
        """How many slots the file has."""
        return self.arena._slots.allocated()  # pyright: ignore[reportPrivateUsage]

    def close(self) -> None:
        self.arena.close()
        for fd in self.kept:
            os.close(fd)


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.close()


@contextmanager
def connected(trainer: Trainer, **options: Any) -> Iterator[Worker]:
    worker = Worker(*trainer.connect(), new_model(), **options)
    try:
        yield worker
    finally:
        worker.close()


# --- torn weights ---


def act_until(last: int, fds: Sequence[int], block: int, width: int, bind: bool, fast: bool) -> None:
    """Be a worker: a forward's values are one version, and versions only rise."""
    torch.set_num_threads(1)
    worker, before = Worker(fds, block, new_model(width, 4), bind=bind, fast=fast), 0.0
    while before < last:
        values = worker.values()
        if before == 0.0 and worker.inbox.words.version == 0:
            continue  # nothing was published yet
        assert len(values) == 1, f"torn: {values}"
        (value,) = values
        assert before <= value == worker.inbox.words.version
        before = value


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("bind", [True, False])
@pytest.mark.parametrize("acknowledge", [True, False])
def test_no_forward_is_torn(bind: bool, acknowledge: bool, fast: bool) -> None:
    width, last = 64, 400
    trainer = Trainer(new_model(width, 4))
    processes: list[Any] = []
    try:
        for _ in range(2):
            fds, block = trainer.connect()  # the process is not known yet: it needs the block
            processes.append(PROCESSES.Process(target=act_until, args=(last, fds, block, width, bind, fast)))
        for process in processes:
            process.start()
        deadline = time.monotonic() + TIMEOUT
        while trainer.version < last:
            trainer.send(acknowledge)
            if acknowledge:
                assert trainer.arena.wait(trainer.blocks, trainer.version, deadline - time.monotonic())
        for process in processes:
            process.join(TIMEOUT)
            assert process.exitcode == 0
        assert trainer.slots <= 3
    finally:
        for process in processes:
            process.kill()
            process.join()
        trainer.close()


# --- slots ---


def send_until_usual(trainer: Trainer, worker: Worker) -> None:
    """Send until the worker has mapped all slots: its receiver does that."""
    for _ in range(3):
        trainer.send()
        worker.values()
    worker.seen.clear()


def test_what_is_sent_is_used_by_the_next_forward_and_slots_are_reused(trainer: Trainer) -> None:
    with connected(trainer) as one, connected(trainer) as other:
        for version in range(1, 10):
            assert trainer.send()
            assert one.values() == other.values() == {version}
        assert trainer.slots == 2
        assert one.seen == [[1], [2]]  # the receiver maps each slot; the rest was usual
        assert one.inbox.words.installs == 7


def test_reserve_waits_for_the_end_of_a_forward_instead_of_growing(trainer: Trainer) -> None:
    with connected(trainer) as one, connected(trainer) as other:
        trainer.send()
        with process_gate().hold():
            assert one.inbox.words.version == 1
            trainer.send(blocks=trainer.blocks[1:])
            with process_gate_of(other):
                trainer.send()
                with pytest.raises(SyncTimeout, match=r"worker\(s\) 0, 1 are still inside a forward") as caught:
                    trainer.send(timeout=0.05)
                assert set(caught.value.workers) == {0, 1}
                assert trainer.slots == 3
                freeing = threading.Timer(0.05, other.inbox.leave)
                freeing.start()
                trainer.send()
                freeing.join()
                assert trainer.slots == 3


@contextmanager
def process_gate_of(worker: Worker) -> Iterator[None]:
    """A forward of another process, as far as the words tell."""
    assert worker.hook.poll_update() is False
    try:
        yield
    finally:
        worker.hook.leaving_gate()


def test_a_lease_keeps_a_slot(trainer: Trainer) -> None:
    trainer.connect()
    kept = [trainer.packed() for _ in range(4)]
    for update in kept:
        trainer.publish(update)
    for _ in range(5):
        trainer.send()
    assert [update.buffer.views[0].unique().tolist() for update in kept] == [[1], [2], [3], [4]]
    slots = trainer.slots
    del kept, update
    for _ in range(5):
        trainer.send()
    assert trainer.slots == slots


def test_a_held_slot_is_not_written_between_forwards(trainer: Trainer) -> None:
    with connected(trainer) as worker:
        worker.inbox.hold_between_forwards()
        trainer.send()
        assert worker.values() == {1}
        for _ in range(5):
            trainer.send()
        assert {value for one in worker.model.parameters() for value in one.detach().unique().tolist()} == {1}
        assert worker.inbox.holds and trainer.slots == 3
        assert worker.values() == {6}


def hold_a_forward(fds: Sequence[int], block: int, ready: Any) -> None:
    worker = Worker(fds, block, new_model())
    with process_gate().hold():
        ready.send(worker.inbox.words.version)
        signal.pause()


def test_a_killed_worker_is_noticed_and_its_slots_are_reused(trainer: Trainer) -> None:
    wake = os.eventfd(0)
    reading, writing = PROCESSES.Pipe()
    trainer.send()
    gate = PROCESSES.Pipe()

    def begin() -> None:
        block = gate[1].recv()
        hold_a_forward((*trainer.arena.fds, trainer.arena.signal, wake), block, writing)

    process = PROCESSES.Process(target=begin)
    process.start()
    assert process.pid is not None
    pidfd = os.pidfd_open(process.pid)
    block = trainer.arena.open_block(wake, pidfd, 0)
    trainer.blocks.append(block)
    trainer.send()
    gate[0].send(block)
    assert reading.recv() == 2
    try:
        assert trainer.send()
        assert not trainer.arena.wait([block], 3, 0.0)
        process.kill()
        select.select([pidfd], [], [])
        assert not trainer.send(), "publish looks for processes that have ended"
        waiting = threading.Timer(0.05, trainer.arena.close_block, [block])
        waiting.start()
        assert not trainer.arena.wait([block], 4, TIMEOUT)
        waiting.join()
        assert trainer.send()
        assert trainer.slots <= 3
    finally:
        process.kill()
        process.join()
        os.close(pidfd)
        os.close(wake)


# --- the receiver's part ---


def test_what_is_unusual_is_left_to_the_receiver(trainer: Trainer) -> None:
    with connected(trainer) as worker:
        send_until_usual(trainer, worker)
        update = trainer.packed()
        update.extra, update.requires = b"state", {"other": 7}
        trainer.arena.store_header(update, 1)
        trainer.publish(update)
        with process_gate().hold():
            assert worker.seen == [[trainer.version]]
        for extra, receiver_was_called in ((b"", False), (b"state", True), (b"", False)):
            worker.seen.clear()
            update = trainer.packed()
            update.extra, update.requires = extra, {"other": 7}
            trainer.arena.store_header(update, 1)
            trainer.publish(update)
            assert worker.values() == {trainer.version}
            assert bool(worker.seen) == receiver_was_called, "requirements that were met are met"
        worker.seen.clear()
        update = trainer.packed()
        update.requires = {"other": 8}
        trainer.arena.store_header(update, 2)
        trainer.publish(update)
        with process_gate().hold():
            assert worker.seen == [[trainer.version]]
            assert worker.inbox.update_in(trainer.version, update.buffer.slot).requires == {"other": 8}


def test_a_pending_version_can_be_used_before_it_is_published(trainer: Trainer) -> None:
    with connected(trainer) as worker:
        send_until_usual(trainer, worker)
        prepared = trainer.packed()
        worker.inbox.update_in(prepared.version, prepared.buffer.slot)
        assert worker.inbox.holds, "what is published may require what is not there"
        trainer.send()
        decided = trainer.packed()
        trainer.arena.set_pending(trainer.blocks, decided.version, decided.buffer.slot)
        with process_gate().hold():
            assert worker.seen == [[5, 6]]
        assert worker.values() == {6}
        trainer.publish(decided)
        assert worker.values() == {6}
        assert trainer.arena.installed(trainer.blocks[0]) == 6
        trainer.send()
        assert worker.values() == {7}


def test_a_refused_version_is_told_and_not_tried_again(trainer: Trainer) -> None:
    refused: list[tuple[int, str]] = []
    with connected(trainer, fast=False) as worker:
        worker.inbox.hold_between_forwards()
        worker.inbox.on_refused = lambda update, error: refused.append((update.version, error))
        trainer.send()
        assert worker.values() == {1}
        trainer.send()

        def refuse() -> None:
            (update,) = worker.inbox.poll()
            worker.inbox.settled(update, "no")
            worker.inbox.answer(update, "no", 0.0, 0.0)
            assert worker.inbox.poll() == []

        process_gate().detach(worker.hook)
        process_gate().call(refuse)
        process_gate().attach(worker.hook)
        assert refused == [(2, "no")]
        assert worker.values() == {1}
        trainer.send()
        assert worker.values() == {3}


def test_a_model_that_was_put_into_shared_memory_follows_later_versions(trainer: Trainer) -> None:
    with connected(trainer) as worker:
        for version in range(1, 8):
            trainer.send()
            assert worker.values() == {version}
            if version == 3:
                worker.model.share_memory()


# --- waiting ---


def test_a_wait_ends_by_an_install_attention_or_the_deadline(trainer: Trainer) -> None:
    with connected(trainer) as worker:
        send_until_usual(trainer, worker)
        trainer.send(acknowledge=True)
        assert not trainer.arena.wait(trainer.blocks, trainer.version, 0.01)
        for end in (worker.values, lambda: trainer.arena.attention(trainer.blocks[0])):
            timer = threading.Timer(0.05, end)
            timer.start()
            assert trainer.arena.wait(trainer.blocks, trainer.version, TIMEOUT) is (end == worker.values)
            timer.join()
            trainer.send(acknowledge=True)
        assert not trainer.arena.wait(trainer.blocks, trainer.version, 0.01), "attention is told once"
        wait, apply = trainer.arena.times(trainer.blocks)
        assert wait == 0.0 < apply < TIMEOUT


def test_a_worker_is_woken_if_it_is_awaited_or_wants_to_be(trainer: Trainer) -> None:
    fds, _ = trainer.connect()
    inbox = ArenaInbox([os.dup(fd) for fd in fds], 0, BLOCKS, binds=True, checksum=False)
    for wanted, acknowledge in ((True, False), (False, True), (False, False)):
        inbox.set_wakeups(wanted)
        trainer.send(acknowledge)
        assert bool(select.select([inbox.wake], [], [], 0)[0]) is (wanted or acknowledge)
        inbox.announced(time.perf_counter())
        assert not select.select([inbox.wake], [], [], 0)[0]
    inbox.close()


def test_a_signal_handler_ends_a_wait(trainer: Trainer) -> None:
    class Struck(Exception):
        pass

    def strike(*_: object) -> None:
        raise Struck

    trainer.connect()
    trainer.send(acknowledge=True)
    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(Struck):
            trainer.arena.wait(trainer.blocks, 1, TIMEOUT)
    finally:
        signal.signal(signal.SIGALRM, before)


# --- what the machine refuses ---


def refuse(code: int) -> Any:
    def call(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("call", ["memfd_create", "eventfd", "posix_fallocate"])
def test_a_forbidden_call_is_named_with_a_way_out(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, call, refuse(errno.EPERM))
    with pytest.raises(WeightSyncError, match=rf"{call.removeprefix('posix_')}\(2\), which .* WSYNC_NATIVE=0"):
        SenderArena(BLOCKS)
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_memory_nothing_changes(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    with connected(trainer) as worker:
        trainer.send()
        with monkeypatch.context() as patch, pytest.raises(WeightSyncError, match="no shared memory left"):
            patch.setattr(os, "posix_fallocate", refuse(errno.ENOSPC))
            trainer.send()
        assert trainer.slots == 1
        assert worker.values() == {1}
        trainer.send()
        assert worker.values() == {2}


def test_all_descriptors_are_closed() -> None:
    gc.collect()  # closes what earlier tests have left
    before = len(os.listdir("/proc/self/fd"))
    trainer = Trainer()
    with connected(trainer) as worker:
        trainer.send()
        assert worker.values() == {1}
    trainer.close()
    trainer.arena.close()
    del trainer, worker
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


# --- registered weights ---


def test_registered_weights_are_repointed_to_the_published_slot(trainer: Trainer) -> None:
    own = {name: one.detach().clone() for name, one in snapshot(trainer.model).tensors.items()}
    identities = {name: id(one) for name, one in own.items()}
    registered = RegisteredWeights(own)
    buffers: list[Buffer] = []
    for version in range(1, 6):
        update = trainer.packed()
        trainer.publish(update)
        registered.repoint(update.buffer)
        assert {value for one in own.values() for value in one.unique().tolist()} == {version}
        assert own["0.weight"].data_ptr() == update.buffer.views[trainer.layout.names.index("0.weight")].data_ptr()
        buffers.append(update.buffer)
        if version > 2:
            buffers.clear()
            del update
    assert {name: id(one) for name, one in registered.tensors.items()} == identities
