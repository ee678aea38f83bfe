"""Run a program as a script, in a process that has imported torch: an interpreter of its own would take seconds.

So are the processes that the program starts.
"""

import multiprocessing
import multiprocessing.context
import os
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

FORK_SERVER: Any = multiprocessing.get_context("forkserver")
_HINT = re.compile(r"^wsync: weights go through sockets, more slowly.*\n", re.MULTILINE)  # without the extension
_SERVER_STATE = ("_forkserver_address", "_forkserver_authkey")  # the second one since Python 3.14


def _use_fork_server(state: Mapping[str, Any]) -> None:
    """Have this process start others by the fork server that has started it, also where it asks for "spawn".

    Python would start another server for it, which imports torch anew.
    """
    vars(forkserver._forkserver).update(state, ensure_running=resource_tracker.ensure_running)  # type: ignore
    forkserver.ensure_running = resource_tracker.ensure_running
    multiprocessing.context._concrete_contexts["spawn"] = FORK_SERVER  # type: ignore


def _be_script(
    command: list[str],
    folder: str,
    environment: Mapping[str, str],
    outputs: tuple[str, str],
    server_state: Mapping[str, Any],
) -> None:
    """Run ``command``, the path of a program and its arguments, in this process."""
    _use_fork_server(server_state)
    for descriptor, path in enumerate(outputs, start=1):
        opened = os.open(path, os.O_WRONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    sys.path[:0] = [str(Path(command[0]).parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    runpy.run_path(command[0], run_name="__main__")


def run_program(
    program: Path, *options: str, folder: Path, timeout: float = 250.0, status: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as ``subprocess.run`` does with ``python program``; another exit status is an error.

    What happens as an interpreter ends (``atexit``) does not happen, and what the program's own processes print does
    not come here.

    Args:
        program: its file.
        options: arguments of the program.
        folder: its current folder.
        timeout: seconds until it is killed, which is an error; no program takes as long.
        status: None for any.
        environment: in addition to this process's.
    """
    command = [str(program), *options]
    with tempfile.TemporaryDirectory() as outputs:
        files = [Path(outputs) / name for name in ("stdout", "stderr")]
        for file in files:
            file.touch()
        forkserver.ensure_running()
        server_state = {name: value for name, value in vars(forkserver._forkserver).items() if name in _SERVER_STATE}  # type: ignore
        arguments = (command, str(folder), {**os.environ, **environment}, tuple(map(str, files)), server_state)
        process = FORK_SERVER.Process(target=_be_script, args=arguments)
        process.start()
        process.join(timeout)
        ended = process.exitcode is not None
        process.kill()
        process.join()
        printed = [_HINT.sub("", file.read_text()) for file in files]
        done = subprocess.CompletedProcess(command, process.exitcode, *printed)
    assert ended, f"{command} did not end in {timeout} s: {done.stdout}{done.stderr}"
    assert status in (None, done.returncode), f"{done.returncode}: {done.stdout}{done.stderr}"
    return done


def run_python(
    *command: str | Path, folder: Path, timeout: float = 250.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python, an interpreter of its own, in this folder; the environment is in addition to this process's."""
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=folder, timeout=timeout,
        env={**os.environ, **environment},
    )  # fmt: skip
    done.stderr = _HINT.sub("", done.stderr)
    return done
