"""Trainers for the tests: real ones, in processes of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = os.environ.get("WSYNC_PYTHON", str(ROOT / ".venv" / "bin" / "python"))  # it has torch
SECRET = "a secret of these tests"


class Trainer:
    """Runs Python in another process."""

    def __init__(self) -> None:
        given = {**os.environ, "PYTHONPATH": str(ROOT), "WSYNC_AUTHKEY": SECRET}
        command = [PYTHON, str(HERE / "trainer.py")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=given
        )
        self._number = 0  # of the newest line
        self._read()

    def begin(self, code: str) -> None:
        """Have it run something; ``end`` returns the value of the last expression."""
        assert self.process.stdin is not None
        self._number += 1
        self.process.stdin.write(json.dumps([self._number, code]) + "\n")

    def end(self) -> Any:
        said = self._read()
        assert said["error"] is None, said["error"]
        return said["result"]

    def error(self) -> str:
        """As ``end``, of something that has to fail: the error."""
        said = self._read()
        assert said["error"] is not None, said
        return said["error"]

    def do(self, code: str) -> Any:
        self.begin(code)
        return self.end()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        while True:  # a test that has failed may have left some
            line = self.process.stdout.readline()
            assert line, "the trainer has ended"
            if (said := json.loads(line))["number"] == self._number:
                return said

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="session")
def long_lived() -> Iterator[Trainer]:
    made = Trainer()
    yield made
    made.kill()


@pytest.fixture
def trainer(long_lived: Trainer) -> Trainer:
    """A trainer that other tests use as well, since torch takes seconds to import."""
    long_lived.do("scheme = schemes = None")
    return long_lived


@pytest.fixture
def mortal() -> Iterator[Trainer]:
    """A trainer that this test may kill."""
    made = Trainer()
    yield made
    made.kill()


@pytest.fixture(autouse=True)
def the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WSYNC_AUTHKEY", SECRET)


@pytest.fixture(autouse=True, scope="session")
def no_torch() -> Iterator[None]:
    yield
    assert "torch" not in sys.modules and "wsync" not in sys.modules
