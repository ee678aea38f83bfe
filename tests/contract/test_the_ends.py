"""How a worker's loop ends, and how ``connect`` ends when a worker's process has ended before it has connected."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from programs import run_program, run_python
from torch import nn

import wsync

ROOT = Path(__file__).resolve().parents[2]
FORK = multiprocessing.get_context("fork")

LOOP = """
import os, signal, sys
from pathlib import Path
import torch.nn as nn
from torch import multiprocessing as mp
import wsync


def worker(scheme, idx):
    scheme.init_on_receiver("policy", model=nn.Linear(4, 2), worker_idx=idx)
    scheme.connect()
    while scheme.receive() is not None:
        pass
    Path(__file__).with_name(f"worker {idx}").write_text(f"finished: {scheme.finished}, version {scheme.version}")
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
    if end == "raises":
        raise ArithmeticError
    scheme.shutdown()
    [w.join() for w in workers]
    print([w.exitcode for w in workers])


if __name__ == "__main__":
    train(*sys.argv[1:3], int(sys.argv[3]))
"""


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    script = tmp_path / "loop.py"
    script.write_text(LOOP, encoding="utf-8")
    return script


@pytest.mark.parametrize("name", ["shared_mem", "distributed"])
def test_a_shutdown_of_the_trainer_ends_the_documented_loop_without_a_traceback(loop: Path, name: str) -> None:
    done = run_program(loop, name, "shutdown", "2", folder=loop.parent, PYTHONPATH=str(ROOT))
    assert (done.stdout, done.stderr) == ("[0, 0]\n", "")
    assert [path.read_text() for path in loop.parent.glob("worker *")] == ["finished: True, version 2"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("end", "code"), [("killed", -signal.SIGKILL), ("raises", 1)])
def test_the_death_of_the_trainer_is_an_error_in_the_documented_loop(loop: Path, end: str, code: int) -> None:
    done = run_python(loop, "shared_mem", end, "1", folder=loop.parent, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout, [*loop.parent.glob("worker *")]) == (code, "", [])
    assert done.stderr.count("wsync.errors.NotConnected: the sender died") == 1


# --- a worker that ends before it has connected ---


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


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (lambda process: process, r"worker 0 \(process [0-9]+ was ended by SIGKILL\)"),
        (lambda process: process.sentinel, r"worker\(s\) 0 ended before they had connected$"),
    ],
)
def test_a_worker_that_ends_before_it_connects_ends_the_wait(form: Callable[[BaseProcess], Any], said: str) -> None:
    with connecting() as scheme, forked(threading.Event().wait) as process:
        ending = threading.Timer(0.05, process.kill)
        ending.start()
        with pytest.raises(wsync.WorkerDied, match=said) as died:
            scheme.connect(processes=[form(process)])
        assert set(died.value.workers) == {0}


def test_a_process_id_is_refused_with_what_to_pass_instead() -> None:
    with connecting() as scheme, forked(os._exit, 3) as process:
        pid = process.pid or 0
        if os.path.exists(f"/proc/self/fd/{pid}"):
            pytest.skip("the process id is the number of an open descriptor, too")
        with pytest.raises(ValueError, match=rf"worker 0: {pid} is not the descriptor .* pass open\(os.pidfd_open\(id"):
            scheme.connect(processes=[pid])
        with open(os.pidfd_open(pid)) as sentinel, pytest.raises(wsync.WorkerDied, match="before they had connected"):
            scheme.connect(processes=[sentinel])


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
