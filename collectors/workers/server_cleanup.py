"""Preloaded by the fork server that workers are forked from: the server removes the folder of its socket when it ends.

It ends after the process that has started it and all workers, however these have ended: by a second Ctrl-C or SIGKILL,
for example, after which Python removes nothing.
"""

import atexit
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import util

from collectors.workers.socket_paths import room_for_socket

FOLDER = "WSYNC_FORK_SERVER_FOLDER"  # environment variable of the server


@contextmanager
def folder_named() -> Iterator[None]:
    """Put the folder to remove into the environment, for a fork server that is started inside the block.

    Not in a process that ``multiprocessing`` has started: it uses its parent's folder, which that server removes.
    """
    if multiprocessing.parent_process() is not None:
        yield
        return
    with room_for_socket("pymp-12345678/listener-12345678"):
        os.environ[FOLDER] = util.get_temp_dir()
    try:
        yield
    finally:
        os.environ.pop(FOLDER, None)


def _remove(folder: str, server: int) -> None:
    if os.getpid() == server:  # not a process that was forked from it
        shutil.rmtree(folder, ignore_errors=True)


if _folder := os.environ.pop(FOLDER, None):
    atexit.register(_remove, _folder, os.getpid())
