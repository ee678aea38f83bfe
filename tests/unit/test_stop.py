"""The first signal is a request to stop; a second SIGINT has its usual effect."""

import os
import signal
import threading

import pytest

from learning.loop import StopRequest


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_is_a_request(number: signal.Signals, status: int) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert (stop.requested, stop.exit_status) == (False, 0)
        os.kill(os.getpid(), number)
        assert (stop.requested, stop.exit_status) == (True, status)
        assert (signal.getsignal(number) is before) == (number is signal.SIGINT)
    assert signal.getsignal(number) is before


def test_the_second_signal_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_57_10_a_repeated_sigterm_is_one_request_and_sigusr1_asks_for_a_checkpoint() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (stop.wants_checkpoint, stop.requested) == (True, False)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.exit_status == 128 + signal.SIGTERM


def test_a_callback_is_called_once() -> None:
    calls: list[str] = []
    with StopRequest() as stop:
        stop.add_callback(lambda: calls.append("before"))
        os.kill(os.getpid(), signal.SIGTERM)
        stop.add_callback(lambda: calls.append("after"))
    assert calls == ["before", "after"]


def test_outside_the_main_thread_signals_are_not_caught() -> None:
    seen = []

    def work() -> None:
        with StopRequest() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
