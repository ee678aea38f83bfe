"""Messages and batches between the trainer and a worker, over a connection of ``wsync.control``."""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
from typing import Any

import torch

from collectors.batch_layout import BatchLayout
from wsync.control import Connection, Kind, Message

_PAUSE = 50  # milliseconds without progress after which the trainer looks after its other workers


class WorkerConnection:
    """One end of the connection between the trainer and a worker.

    A message is a name and a picklable value; it is unpickled only after the connection has been authenticated. Over a
    Unix socket both ends map the memory of the batches; its descriptor comes with ``ready``. Otherwise each end has
    buffers of its own, and the bytes of a batch follow its message.

    Args:
        connection: owned by this object.

    Attributes:
        shares_memory: whether it is a Unix socket. What one end has sent can then be read by the other at once.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.shares_memory = connection.passes_descriptors
        self._unread = memoryview(b"")  # what is missing of the batch that is being received

    def fileno(self) -> int:
        """Return the descriptor that is readable when ``receive`` has something to return."""
        return self._connection.fileno()

    def send(self, name: str, value: Any = None, fds: tuple[int, ...] = ()) -> None:
        """Send a message, with copies of the descriptors ``fds`` (over a Unix socket).

        Raises:
            ConnectionError: the other end is gone.
        """
        self._connection.send(Message(Kind.DATA, payload=pickle.dumps((name, value)), fds=fds))

    def receive(self) -> tuple[str, Any, tuple[int, ...]]:
        """Wait for a message; return its name, its value and the descriptors that came with it.

        Raises:
            EOFError: the other end is gone.
            NotConnected: the other end is not the one that the address belongs to.
        """
        message = self._connection.receive()
        if message is None:
            raise EOFError("the other end of the connection is gone")
        return *pickle.loads(message.payload), message.fds

    def close(self) -> None:
        """Close this end. Idempotent."""
        self._connection.close()

    # --- the worker's end ---

    def remove_time_limits(self) -> None:
        """Let no read and no write fail because it makes no progress: the trainer may be busy for long."""
        with socket.socket(fileno=socket.dup(self._connection.fileno())) as sock:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, 0))

    def send_ready(self, layout: BatchLayout, count: int, num_envs: int) -> list[torch.Tensor]:
        """Report that the worker is built; return its ``count`` buffers, ``uint8[layout.nbytes]``."""
        if not self.shares_memory:
            self.send("ready", (layout, count, num_envs))
            return layout.allocate(count)
        memory = layout.create_memory(count)
        try:
            self.send("ready", (layout, count, num_envs), (memory,))
        except BaseException:  # also Ctrl-C: the descriptor has no other owner yet
            os.close(memory)
            raise
        return layout.map_memory(memory, count)

    def send_batch(self, index: int, buffer: torch.Tensor) -> None:
        """Report that the buffer ``index`` is full, and transfer it.

        Raises:
            ConnectionError: the trainer is gone.
        """
        self.send("batch", index)
        if not self.shares_memory:
            self._connection.flush()  # the bytes must not overtake a message
            left, descriptor = _bytes_of(buffer), self._connection.fileno()
            while left:
                left = left[os.write(descriptor, left) :]

    def send_error(self, kind: str, traceback: str) -> None:
        """Report an error, an event of this kind; the worker ends afterwards.

        Raises:
            ConnectionError: the trainer is gone.
        """
        self.send(kind, traceback)
        self._connection.flush()  # ``close`` does not wait for a long message

    # --- the trainer's end ---

    def open_buffers(self, layout: BatchLayout, count: int, fds: tuple[int, ...]) -> list[torch.Tensor]:
        """Return the ``count`` buffers of a worker; its ``ready`` came with ``fds``."""
        return layout.map_memory(fds[0], count) if self.shares_memory else layout.allocate(count)

    def receive_batch(self, buffer: torch.Tensor) -> bool:
        """Receive the bytes of a batch, right after its message; return whether it is complete.

        If it is not, because the worker pauses, call this again with the same buffer before any other method.

        Raises:
            EOFError: the worker is gone.
        """
        if self.shares_memory:
            return True
        descriptor = self._connection.fileno()
        self._unread = self._unread or _bytes_of(buffer)
        readable = select.poll()
        readable.register(descriptor, select.POLLIN)
        while self._unread and readable.poll(_PAUSE):
            count = os.readv(descriptor, [self._unread])
            if not count:
                raise EOFError("the worker ended within a batch")
            self._unread = self._unread[count:]
        return not self._unread


def _bytes_of(buffer: torch.Tensor) -> memoryview:
    array: Any = buffer.numpy()  # supports the buffer protocol, which its type does not declare
    return memoryview(array)
