"""The first signal is a request to stop; the second one has its usual effect."""

import os
import pty
import signal
import sys
import threading
from pathlib import Path

import pytest

from learning.run import StopRequest

ROOT = str(Path(__file__).resolve().parents[2])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_is_a_request(number: signal.Signals, status: int) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert (stop.requested, stop.exit_status) == (False, 0)
        os.kill(os.getpid(), number)
        assert (stop.requested, stop.exit_status) == (True, status)
        assert signal.getsignal(number) is (signal.SIG_IGN if number == signal.SIGHUP else before)
    assert signal.getsignal(number) is before


def test_the_second_signal_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt), StopRequest():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_the_second_signal_interrupts_although_a_library_has_put_the_first_ones_handler_back() -> None:
    with pytest.raises(KeyboardInterrupt), StopRequest():
        kept = signal.getsignal(signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        signal.signal(signal.SIGINT, kept)
        os.kill(os.getpid(), signal.SIGINT)


def test_a_callback_is_called_once() -> None:
    calls: list[str] = []
    with StopRequest() as stop:
        stop.add_callback(lambda: calls.append("before"))
        os.kill(os.getpid(), signal.SIGTERM)
        stop.add_callback(lambda: calls.append("after"))
    assert calls == ["before", "after"]


IN_A_TERMINAL = """
import signal
import sys
from learning.run import stop_requests

with stop_requests() as stop:
    print("ready", flush=True)
    while not stop.requested:
        signal.pause()
    for _ in range(100):
        print("the terminal is gone", flush=True)
        signal.raise_signal(signal.SIGHUP)
    open(sys.argv[1], "w").close()
"""


def test_a_run_whose_terminal_is_closed_ends_in_order(tmp_path: Path) -> None:
    """The system sends SIGHUP, a shell sends it again, and writes to the terminal would be errors."""
    ended = tmp_path / "ended"
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, [sys.executable, "-c", IN_A_TERMINAL, str(ended)], {**os.environ, "PYTHONPATH": ROOT})
    assert b"ready" in os.read(terminal, 100)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0 and ended.exists()


def test_a_run_under_nohup_ignores_a_hangup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_signals_are_not_caught() -> None:
    seen = []

    def work() -> None:
        with StopRequest() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]
