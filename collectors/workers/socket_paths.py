"""Temporary folders for sockets: a socket's path has at most 107 bytes, and ``TMPDIR`` may leave too few."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST = 107  # bytes, without the zero at the end: unix(7)


@contextmanager
def room_for_socket(name: str) -> Iterator[None]:
    """Let ``tempfile`` use ``/tmp`` inside, if ``name`` in the usual temporary folder is too long for a socket."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(f"{usual}/{name}")) > LONGEST:
        tempfile.tempdir = "/tmp"
    try:
        yield
    finally:
        tempfile.tempdir = usual
