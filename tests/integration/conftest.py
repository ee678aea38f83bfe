"""Pipes for the environments of ``stepping``."""

import os

import pytest


@pytest.fixture
def steps(tmp_path):
    """The path of a pipe, and its reading end."""
    path = str(tmp_path / "steps")
    os.mkfifo(path)
    reading = os.open(path, os.O_RDWR)
    yield path, reading
    os.close(reading)


@pytest.fixture
def gate(tmp_path):
    """The path of a pipe for ``Held``, and its writing end."""
    path = str(tmp_path / "gate")
    os.mkfifo(path)
    writing = os.open(path, os.O_RDWR)
    yield path, writing
    os.close(writing)
