"""The worker's side of an ``RPCCollector``: a member of the RPC group that connects to the trainer over TCP."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import closing, suppress

from collectors.distributed import rpc_group
from collectors.worker import serve
from collectors.workers.connections import Address, Disconnected, Greeting, connect
from collectors.workers.pool import work


def enlist(address: tuple[str, int, bytes], worker_idx: int, key: bytes) -> None:
    """Start a worker in a thread of this process. Called by the trainer, in a process that a user has started."""
    arguments = (address, worker_idx, key, lambda _: None)
    threading.Thread(target=work, args=arguments, name="collector-worker", daemon=True).start()


def main(address: Address, worker_idx: int, key: bytes, size: int, store: rpc_group.Address, timeout: float) -> None:
    """Run a worker in a process that the trainer has started: join the group, connect, execute commands.

    The process ends once the trainer has left the group, and closes the connection.
    """
    rpc_group.join_group(f"worker{worker_idx}", worker_idx + 1, size, store, timeout)
    with closing(connect(address, Greeting(worker_idx, key))) as connection:
        serve(connection)
        if connection.told_to_end:
            sys.stderr.flush()
            # torch logs errors when the trainer leaves the group first; this process has nothing more to log.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            with suppress(Disconnected):
                connection.send("ended")
                while True:
                    connection.receive()
    rpc_group.leave_group()
