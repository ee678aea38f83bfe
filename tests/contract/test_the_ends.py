"""How a worker's loop ends, and how ``connect`` ends when a worker's process has ended before it has connected."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from backends import BuiltIn
from torch import nn

import wsync

ROOT = Path(__file__).resolve().parents[2]
FORK = multiprocessing.get_context("fork")

LOOP = """
import os, signal, sys
import torch.nn as nn
from torch import multiprocessing as mp
import wsync


def worker(scheme, idx):
    scheme.init_on_receiver("policy", model=nn.Linear(4, 2), worker_idx=idx)
    scheme.connect()
    while scheme.receive() is not None:
        pass
    print(f"worker {idx} is finished: {scheme.finished}, version {scheme.version}\\n", end="", flush=True)  # one write
    scheme.shutdown()


def train(name, end, count):
    scheme = wsync.WeightSyncScheme.from_backend(name)
    scheme.init_on_sender("policy", model=nn.Linear(4, 2), num_workers=count)
    workers = [mp.get_context("spawn").Process(target=worker, args=(scheme, i)) for i in range(count)]
    [w.start() for w in workers]
    scheme.connect(processes=workers)
    scheme.send()
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    scheme.shutdown()
    [w.join() for w in workers]
    print([w.exitcode for w in workers])


if __name__ == "__main__":
    train(*sys.argv[1:3], int(sys.argv[3]))
"""


def run_loop(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "loop.py"
    script.write_text(LOOP, encoding="utf-8")
    return subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, timeout=250, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.parametrize("name", ["shared_mem", pytest.param("distributed", marks=pytest.mark.slow)])
def test_a_shutdown_of_the_trainer_ends_the_documented_loop_without_a_traceback(tmp_path: Path, name: str) -> None:
    done = run_loop(tmp_path, name, "shutdown", "2")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        "[0, 0]",
        "worker 0 is finished: True, version 2",
        "worker 1 is finished: True, version 2",
    ]


def test_the_death_of_the_trainer_is_an_error_in_the_documented_loop(tmp_path: Path) -> None:
    done = run_loop(tmp_path, "shared_mem", "killed", "1")
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
    assert done.stderr.count("wsync.errors.NotConnected: the sender died") == 1


# --- a worker that ends before it has connected ---


def end_with(code: int) -> None:
    os._exit(code)


@contextmanager
def connecting(*, num_workers: int = 1, **options: Any) -> Iterator[wsync.WeightSyncScheme]:
    with wsync.SharedMemWeightSyncScheme(timeout=60.0, **options) as scheme:
        scheme.init_on_sender("policy", model=nn.Linear(4, 2), num_workers=num_workers)
        yield scheme


@contextmanager
def forked(target: Callable[..., object], *arguments: Any) -> Iterator[BaseProcess]:
    process = FORK.Process(target=target, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


FORMS: dict[str, Callable[[BaseProcess], Any]] = {
    "process": lambda process: process,
    "sentinel": lambda process: process.sentinel,
}


@pytest.mark.parametrize("form", FORMS)
def test_a_worker_that_ends_before_it_connects_ends_the_wait(form: str) -> None:
    with connecting() as scheme, forked(threading.Event().wait) as process:
        ending = threading.Timer(0.05, process.kill)
        ending.start()
        with pytest.raises(wsync.WorkerDied, match=rf"worker 0 \(process {process.pid} was ended by SIGKILL\)") as died:
            scheme.connect(processes=[FORMS[form](process)])
        assert set(died.value.workers) == {0}


def leave_a_child(forked_one: int, until_closed: tuple[int, int]) -> None:
    """Fork a child that has copies of all descriptors, and keeps them until ``until_closed`` is; wait to be killed."""
    read_end, write_end = until_closed
    os.close(write_end)
    if os.fork() == 0:
        os.write(forked_one, b"x")
        os.read(read_end, 1)
        os._exit(0)
    signal.pause()


@pytest.mark.parametrize("form", FORMS)
def test_a_worker_that_ends_before_it_connects_ends_the_wait_although_its_own_child_lives(form: str) -> None:
    with ExitStack() as opened:
        has_forked, forked_one, *until_closed = *os.pipe(), *os.pipe()
        for descriptor in (has_forked, forked_one, *until_closed):
            opened.callback(os.close, descriptor)
        with connecting() as scheme, forked(leave_a_child, forked_one, until_closed) as process:
            assert os.read(has_forked, 1)
            threading.Timer(0.05, process.kill).start()
            with pytest.raises(wsync.WorkerDied, match=rf"worker 0 \(process {process.pid} was ended by SIGKILL\)"):
                scheme.connect(processes=[FORMS[form](process)])


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    with connecting() as scheme, forked(threading.Event().wait) as process:
        os.kill(process.pid or 0, signal.SIGRTMIN + 2)
        with pytest.raises(wsync.WorkerDied, match=rf"was ended by signal {signal.SIGRTMIN + 2}\)"):
            scheme.connect(processes=[process])


def test_the_exit_code_of_a_child_that_has_ended_before_connect_is_told() -> None:
    with connecting() as scheme, forked(end_with, 3) as process:
        assert wait([process.sentinel], 60)
        with pytest.raises(wsync.WorkerDied, match=rf"worker 0 \(process {process.pid} ended with exit code 3\)"):
            scheme.connect(processes=[process])
        assert process.exitcode == 3


def test_a_process_id_is_refused_with_what_to_pass_instead() -> None:
    with connecting() as scheme, forked(end_with, 3) as process:
        pid = process.pid or 0
        if os.path.exists(f"/proc/self/fd/{pid}"):
            pytest.skip("the process id is the number of an open descriptor, too")
        with pytest.raises(ValueError, match=rf"worker 0: {pid} is not the descriptor .* pass open\(os.pidfd_open\(id"):
            scheme.connect(processes=[pid])
        with open(os.pidfd_open(pid)) as sentinel, pytest.raises(wsync.WorkerDied, match="ended with exit code 3"):
            scheme.connect(processes=[sentinel])


def test_every_backend_tells_the_exit_code(backend: BuiltIn) -> None:
    with backend.make_scheme(timeout=60.0) as scheme, forked(end_with, 3) as process:
        scheme.init_on_sender("policy", model=nn.Linear(4, 2), num_workers=2)
        with pytest.raises(wsync.WorkerDied, match=rf"worker 1 \(process {process.pid} ended with exit code 3\)"):
            scheme.connect(processes={1: process})


def test_a_program_that_was_started_by_subprocess() -> None:
    with (
        connecting() as scheme,
        subprocess.Popen([sys.executable, "-c", "raise SystemExit(4)"]) as program,
        pytest.raises(wsync.WorkerDied, match=rf"worker 0 \(process {program.pid} ended with exit code 4\)"),
    ):
        scheme.connect(processes=[program])


def test_a_program_that_has_been_waited_for_already_has_ended() -> None:
    with connecting() as scheme, subprocess.Popen([sys.executable, "-c", ""]) as program:
        os.waitpid(program.pid, 0)
        with pytest.raises(wsync.WorkerDied, match=rf"worker 0 \(process {program.pid} has ended\)"):
            scheme.connect(processes=[program])


def test_a_sentinel_that_is_no_pidfd_is_named_as_a_descriptor() -> None:
    ended = os.eventfd(1)
    try:
        with connecting() as scheme, pytest.raises(wsync.WorkerDied, match=rf"\(descriptor {ended} has ended\)"):
            scheme.connect(processes=[ended])
    finally:
        os.close(ended)


def wait_for_its_end(process: BaseProcess | subprocess.Popen[bytes]) -> None:
    """In a forked child: connect to a worker that the parent has started. Exit with 0 if the error is right."""
    with connecting() as scheme:
        threading.Timer(0.3, os.kill, (process.pid, signal.SIGKILL)).start()
        try:
            scheme.connect(processes=[process])
        except wsync.WorkerDied as error:
            os._exit(0 if "worker 0 (process" in str(error) and "has ended" in str(error) else 1)


@pytest.mark.parametrize("library", ["multiprocessing", "subprocess"])
def test_a_forked_trainer_waits_for_a_process_that_its_parent_has_started(library: str) -> None:
    with ExitStack() as opened:
        if library == "subprocess":
            process = opened.enter_context(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        else:
            process = opened.enter_context(forked(threading.Event().wait))
        trainer = FORK.Process(target=wait_for_its_end, args=(process,))
        trainer.start()
        process.wait(60) if isinstance(process, subprocess.Popen) else process.join(60)
        trainer.join(60)
        assert trainer.exitcode == 0


def test_a_process_of_two_workers_is_reported_for_both() -> None:
    with wsync.SharedMemWeightSyncScheme(timeout=60.0) as scheme, forked(end_with, 3) as process:
        scheme.init_on_sender("policy", model=nn.Linear(4, 2), num_workers=2)
        with pytest.raises(wsync.WorkerDied) as raised:
            scheme.connect(processes=[process, process])
        assert sorted(raised.value.workers) == [0, 1]


def test_a_lack_of_descriptors_is_not_called_a_wrong_process() -> None:
    with connecting() as scheme, forked(threading.Event().wait) as process, ExitStack() as opened:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, limits[1]))
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        with suppress(OSError):
            while True:
                opened.callback(os.close, os.eventfd(0))
        with pytest.raises(OSError, match="Too many open files"):
            scheme.connect(processes=[process])


def test_a_pidfd_leaves_the_exit_code_to_the_parent() -> None:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "raise SystemExit(5)"], os.environ)
    pidfd = os.pidfd_open(pid)
    try:
        ended = rf"worker 0 \(descriptor {pidfd} ended with exit code 5\)"
        with connecting() as scheme, pytest.raises(wsync.WorkerDied, match=ended):
            scheme.connect(processes=[pidfd])
    finally:
        os.close(pidfd)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


def work(scheme: wsync.WeightSyncScheme, index: int) -> None:
    scheme.init_on_receiver("policy", model=nn.Linear(4, 2), worker_idx=index)
    scheme.connect()
    while scheme.receive() is not None:
        pass
    scheme.shutdown()


def test_processes_that_live_are_not_in_the_way_and_leave_no_descriptor() -> None:
    with connecting() as scheme:
        process = multiprocessing.get_context("spawn").Process(target=work, args=(scheme, 0))
        process.start()
        gc.collect()  # closes what earlier tests have left
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(ValueError, match=r"one for each|entries"):
            scheme.connect(processes=[process, process])
        assert len(os.listdir("/proc/self/fd")) == before
        scheme.connect(processes=[process.sentinel])
        report = scheme.send()
        assert report is not None and dict(report.workers) == {0: 2}
        scheme.shutdown()
        process.join()
        assert process.exitcode == 0


@pytest.mark.parametrize(
    ("processes", "error", "said"),
    [
        ([], ValueError, "0 entries for 1 worker"),
        ([2**40], ValueError, f"worker 0: {2**40} is not the descriptor of an open pipe"),
        ({3: 1}, ValueError, r"there is no worker 3: there are 1"),
        (["worker"], TypeError, "worker 0 is a multiprocessing.Process.*not 'worker'"),
        ("worker", TypeError, "processes is a list"),
        ([FORK.Process()], ValueError, "worker 0 has not been started"),
        ([-1], ValueError, "worker 0: -1 is not the descriptor of an open pipe"),
    ],
)
def test_what_is_no_process_is_refused(processes: Any, error: type[Exception], said: str) -> None:
    with connecting() as scheme, pytest.raises(error, match=said):
        scheme.connect(processes=processes)
