"""What ``WorkerConnections`` uses: where connections come from, and what is called as workers connect and answer."""

from __future__ import annotations

from typing import Protocol

from wsync.control.connection import Connection
from wsync.control.messages import Message


class ConnectionSource(Protocol):
    """Where workers connect: a ``Listener``, or another rendezvous."""

    @property
    def passes_descriptors(self) -> bool:
        """Whether its connections can carry open descriptors."""
        ...

    def fileno(self) -> int:
        """Return a descriptor that is readable when ``accept`` has something to do."""
        ...

    def accept(self) -> tuple[Connection, Message] | None:
        """Return an authenticated connection and its ``HELLO``, if there is one; never waits."""
        ...

    def close(self) -> None:
        """Accept no more connections. Idempotent."""
        ...


class ConnectionCallbacks(Protocol):
    """Called by ``WorkerConnections`` as workers connect, answer and disconnect.

    Each call is made inside a call of a ``WorkerConnections`` method, by the thread that called it.
    """

    def accept_message(self, worker: int, rejoined: bool) -> Message:
        """Return the ``ACCEPTED`` message for a worker, e.g. with the layout of the weights.

        Called once per connection, by ``wait_for_workers``, before the message is sent.

        Args:
            worker: its index.
            rejoined: whether it replaces a worker that has disconnected.
        """
        ...

    def on_accepted(self, worker: int, deadline: float | None) -> None:
        """Do what has to precede the worker's first update, e.g. form the process group.

        Called once per connection, by ``wait_for_workers``, after the ``ACCEPTED`` message was sent.

        Raises:
            SyncTimeout, WorkerDied: it could not be done.
        """
        ...

    def on_answer(self, worker: int, message: Message) -> None:
        """Process an answer of a worker, e.g. start sending the version that waits for it.

        Called once per message, by ``read`` and the methods that read (``drain``, ``wait_acks``), after an
        acknowledgement was stored for ``wait_acks``.
        """
        ...

    def on_disconnected(self, worker: int) -> None:
        """Release what the worker used, e.g. its slot in shared memory.

        Called once per connection, by any method that closes it, after it was closed by either side.
        """
        ...
