"""Ctrl-C in the middle of a step: the next call goes on, and nothing is half done."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from memory_transport import FromMemory, Scheme
from small_models import Refusing
from stopping import end_of, wait_until_asleep
from torch import Tensor, nn

import wsync
from wsync.control import Connection, Kind, Message
from wsync.receiving import prepared_updates
from wsync.sending.channel import SenderSideChannel
from wsync.shm.arena import WorkerArena
from wsync.testing.models import fill

TIMEOUT = 20.0


def model_of(value: float) -> nn.Linear:
    return fill(nn.Linear(2, 1), value)


def join(stack: ExitStack, sender: wsync.WeightSyncScheme, count: int, **receiver: Any) -> list[wsync.WeightSyncScheme]:
    """Connect workers in this process."""
    workers = [stack.enter_context(pickle.loads(pickle.dumps(sender))) for _ in range(count)]
    connecting = []
    for index, worker in enumerate(workers):
        worker.init_on_receiver(sender.model_id, **receiver or {"model": model_of(0)}, worker_idx=index)
        connecting.append(threading.Thread(target=worker.connect))
        connecting[-1].start()
    sender.connect()
    for thread in connecting:
        thread.join()
    return workers


def join_two_models(
    stack: ExitStack, make_sender: Callable[[], wsync.WeightSyncScheme], count: int
) -> tuple[list[wsync.WeightSyncScheme], list[wsync.WeightSyncScheme]]:
    """Connect ``count`` workers for each of the models "a" and "b"; return the senders and the workers."""
    senders, workers = [stack.enter_context(make_sender()) for _ in range(2)], []
    for name, sender in zip("ab", senders, strict=True):
        sender.init_on_sender(name, model=model_of(1), num_workers=count)
        workers += join(stack, sender, count)
    return senders, workers


@contextmanager
def gate_held() -> Iterator[None]:
    """While the block runs, another thread holds the gate: workers in this process cannot install."""
    held, released = threading.Event(), threading.Event()

    def hold() -> None:
        with wsync.gate():
            held.set()
            released.wait(TIMEOUT)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(TIMEOUT)
    try:
        yield
    finally:
        released.set()
        holder.join()


def interrupt(
    patch: pytest.MonkeyPatch, method: str, when: Callable[..., bool] = lambda *_: True, after: bool = False
) -> None:
    """The main thread's next call of a connection's method, if ``when(*args)`` is true, raises KeyboardInterrupt."""
    original = getattr(Connection, method)

    def interrupted(connection: Connection, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() or not when(*args):
            return original(connection, *args, **kwargs)
        patch.undo()
        if after:
            original(connection, *args, **kwargs)
        raise KeyboardInterrupt

    patch.setattr(Connection, method, interrupted)


def test_a_decided_transaction_reaches_all_workers_and_models(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        senders, workers = join_two_models(stack, lambda: wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT), 2)
        interrupt(monkeypatch, "send", lambda message: message.kind is Kind.UPDATE)
        with pytest.raises(KeyboardInterrupt):
            wsync.synchronize({sender: model_of(2) for sender in senders})
        with wsync.gate():  # what is published is installed on the way in
            assert [worker.model.bias.item() for worker in workers] == [2] * 4
        for sender in senders:
            sender.send(model_of(3))
        assert [worker.model.bias.item() for worker in workers] == [3] * 4


@pytest.mark.parametrize("refused", [False, True], ids=["commit", "abort"])
def test_a_decision_that_is_interrupted_in_the_first_model(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    kind = Kind.ABORT if refused else Kind.COMMIT
    with ExitStack() as stack:
        senders, workers = join_two_models(stack, lambda: Scheme(FromMemory, timeout=TIMEOUT), 1)
        given: dict[wsync.WeightSyncScheme, nn.Module] = {senders[0]: model_of(2)}
        given[senders[1]] = nn.Linear(3, 1) if refused else model_of(2)
        interrupt(monkeypatch, "send", lambda message: message.kind is kind)
        with pytest.raises(KeyboardInterrupt):
            wsync.synchronize(given)
        for value in (3, 4):
            for sender in senders:
                sender.send(model_of(value))
        assert [worker.model.bias.item() for worker in workers] == [4, 4]
        for sender in senders:
            assert isinstance(channel := sender.sender.channel, SenderSideChannel)
            assert channel.fast_calls(acknowledge=True) is not None, "no buffer is left reserved"


def test_a_refusal_that_comes_after_its_transaction_was_aborted_is_not_reported_again() -> None:
    with ExitStack() as stack:
        sender = stack.enter_context(wsync.SharedMemWeightSyncScheme(timeout=0.5))
        sender.init_on_sender("policy", model=Refusing(), num_workers=1)
        join(stack, sender, 1, model=Refusing())
        with gate_held(), pytest.raises(wsync.SyncTimeout):
            wsync.synchronize({sender: Refusing(7)})
        sender.timeout = TIMEOUT
        for _ in range(2):
            sender.send_async(Refusing())
            sender.wait_async()


def test_a_request_that_is_lost_in_the_trainer_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    original, lost = Connection.receive, threading.Event()

    def receive(connection: Connection) -> Message | None:
        message = original(connection)
        if message is not None and message.kind is Kind.REQUEST and not lost.is_set():
            lost.set()
            raise RuntimeError("the request is lost")
        return message

    with ExitStack() as stack:
        sender = stack.enter_context(Scheme(FromMemory, initiator="receiver", timeout=TIMEOUT))
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        (worker,) = join(stack, sender, 1)
        monkeypatch.setattr(Connection, "receive", receive)
        pulling = threading.Thread(target=worker.pull, daemon=True)
        pulling.start()
        assert lost.wait(TIMEOUT)
        sender.send(model_of(2))
        pulling.join(TIMEOUT)
        assert not pulling.is_alive() and worker.model.bias.item() == 2


def test_a_commit_that_is_published_over_before_the_worker_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    holding, original = ExitStack(), SenderSideChannel.commit

    def commit(channel: SenderSideChannel, transaction: int) -> None:
        if channel is senders[0].sender.channel:  # the first of the two
            holding.enter_context(gate_held())
        original(channel, transaction)

    with ExitStack() as stack:
        senders, workers = join_two_models(stack, lambda: wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT), 1)
        for sender in senders:
            sender.timeout = 1.0
        monkeypatch.setattr(SenderSideChannel, "commit", commit)
        with holding:
            with pytest.raises(wsync.SyncTimeout, match="committed"):
                wsync.synchronize({sender: model_of(2) for sender in senders})
            for sender in senders:
                sender.send_async(model_of(3))
        for sender in senders:
            sender.wait_async()
        with wsync.gate():
            assert [worker.model.bias.item() for worker in workers] == [3, 3]
        assert not prepared_updates.updates_by_transaction


def test_the_end_of_a_send_weights_is_noticed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        sender = stack.enter_context(Scheme(FromMemory, timeout=TIMEOUT))
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        (worker,) = join(stack, sender, 1)
        interrupt(monkeypatch, "send", lambda message: message.kind is Kind.UPDATE)
        with pytest.raises(KeyboardInterrupt):
            for value in range(2, 100):  # the send-loop thread may notice the end of some of them first
                sender.send(model_of(value))
        sender.send(model_of(100))
        assert worker.model.bias.item() == 100


@pytest.mark.parametrize("after", [True, False], ids=["closed", "open"])
def test_a_death_is_reported_by_the_next_call(monkeypatch: pytest.MonkeyPatch, after: bool) -> None:
    with ExitStack() as stack:
        sender = stack.enter_context(wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT))
        sender.init_on_sender("policy", model=model_of(1), num_workers=2)
        first, second = join(stack, sender, 2)
        second.shutdown()
        interrupt(monkeypatch, "close", after=after)
        with pytest.raises(KeyboardInterrupt):
            sender.send(model_of(2))
        with pytest.raises(wsync.WorkerDied):
            sender.send(model_of(3))
        sender.send(model_of(4))
        assert first.model.bias.item() == 4


def test_an_install_on_request_is_finished_by_the_next_forward() -> None:
    taken: list[str] = []

    def load(pairs: Iterable[tuple[str, Tensor]]) -> None:
        taken.extend(f"{name} {tensor.flatten()[0].item():g}" for name, tensor in pairs)
        if len(taken) == 4:
            raise KeyboardInterrupt

    with ExitStack() as stack:
        sender = stack.enter_context(wsync.SharedMemWeightSyncScheme(initiator="receiver", timeout=TIMEOUT))
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        (worker,) = join(stack, sender, 1, load=load)
        sender.send(model_of(2))
        with pytest.raises(KeyboardInterrupt):
            worker.pull()
        with wsync.gate():
            assert worker.version == 2
        assert taken == ["weight 1", "bias 1", *2 * ["weight 2", "bias 2"]]


def test_a_wait_for_what_was_sent_goes_on_after_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        sender = stack.enter_context(Scheme(FromMemory, timeout=TIMEOUT))
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        (worker,) = join(stack, sender, 1)
        with wsync.gate():  # the worker cannot install it yet
            sender.send_async(model_of(2))
            end_of("wsync-send-loop")  # it would read the answer
            interrupt(monkeypatch, "receive", lambda *_: threading.current_thread() is threading.main_thread())
        with pytest.raises(KeyboardInterrupt):
            sender.wait_async()
        report = sender.wait_async()
        assert report is not None and report.version == 2 and worker.model.bias.item() == 2


def strike_when_asleep(thread: int) -> None:
    wait_until_asleep(thread)
    os.kill(os.getpid(), signal.SIGUSR1)


def test_a_shutdown_by_a_signal_handler_ends_the_send_that_it_interrupts() -> None:
    with ExitStack() as stack:
        sender = stack.enter_context(wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT))
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        join(stack, sender, 1)
        stack.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, lambda *_: sender.shutdown()))
        striker = threading.Thread(target=strike_when_asleep, args=[threading.get_native_id()])
        with gate_held():
            striker.start()
            with pytest.raises(wsync.WorkerDied, match="shut down"):
                sender.send(model_of(2))
        striker.join()


def test_a_send_that_is_interrupted_as_it_waits_counts_as_sent() -> None:
    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    with ExitStack() as stack:
        sender = stack.enter_context(wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT))
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        (worker,) = join(stack, sender, 1)
        stack.callback(signal.signal, signal.SIGUSR1, signal.signal(signal.SIGUSR1, strike))
        striker = threading.Thread(target=strike_when_asleep, args=[threading.get_native_id()])
        with gate_held():
            striker.start()
            with pytest.raises(KeyboardInterrupt):
                sender.send(model_of(2))
        striker.join()
        assert sender.sent_version == 2
        worker.receive(TIMEOUT)
        assert worker.version == 2


def test_a_shutdown_that_is_interrupted_between_two_workers_reaches_both_when_it_is_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ExitStack() as stack:
        sender = stack.enter_context(wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT))
        sender.init_on_sender("policy", model=model_of(1), num_workers=2)
        workers = join(stack, sender, 2)
        interrupt(monkeypatch, "send", lambda message: message.kind is Kind.LEAVE)
        with pytest.raises(KeyboardInterrupt):
            sender.shutdown()
        sender.shutdown()
        for worker in workers:
            with pytest.raises(wsync.NotConnected):  # the trainer seems to have died
                while True:
                    worker.receive(TIMEOUT)


def test_a_disconnect_that_is_interrupted_leaves_no_worker_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        sender = stack.enter_context(wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT))
        sender.init_on_sender("policy", model=model_of(1), num_workers=2)
        first, _ = join(stack, sender, 2)
        interrupt(monkeypatch, "close", after=True)
        with pytest.raises(KeyboardInterrupt):
            sender.disconnect(1)
        report = sender.send(model_of(2))
        assert report is not None and {*report.workers} == {0} and first.model.bias.item() == 2


def test_an_update_that_is_interrupted_before_it_is_published_does_not_count_as_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def strike(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with ExitStack() as stack:
        sender = stack.enter_context(Scheme(FromMemory, timeout=TIMEOUT))
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        (worker,) = join(stack, sender, 1)
        sender.send(model_of(2))
        monkeypatch.setattr(SenderSideChannel, "reserve", strike)
        with pytest.raises(KeyboardInterrupt):
            sender.send(model_of(3))
        assert sender.sent_version == 2
        worker.shutdown()
        other = stack.enter_context(pickle.loads(pickle.dumps(sender)))
        other.init_on_receiver("policy", model=model_of(0), worker_idx=0)
        joining = threading.Thread(target=other.connect)
        joining.start()
        sender.readmit(0)  # the version that it is given is the one that it has to answer
        joining.join()
        assert other.model.bias.item() == 2


def test_a_slot_that_a_worker_cannot_map_is_an_error_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(arena: WorkerArena, slot: int) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with ExitStack() as stack:
        sender = stack.enter_context(wsync.SharedMemWeightSyncScheme(timeout=TIMEOUT))
        sender.init_on_sender("policy", model=model_of(1), num_workers=1)
        (worker,) = join(stack, sender, 1)
        with monkeypatch.context() as patch:
            patch.setattr(WorkerArena, "map_slot", refuse)
            with gate_held():
                for value in (2, 3):  # the second one needs a third slot
                    sender.send_async(model_of(value))
            with pytest.raises(wsync.WorkerFailed, match=r"could not be mapped.*Too many open files"):
                sender.wait_async()
        sender.send(model_of(5))
        assert worker.model.bias.item() == 5
