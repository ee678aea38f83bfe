"""What ``WorkerConnections`` is given: a source of connections, and callbacks for what happens on them."""

from __future__ import annotations

from typing import Protocol

from wsync.control.connection import Connection
from wsync.control.messages import Message


class ConnectionSource(Protocol):
    """Where workers connect: a ``Listener``, or the RPC backend's equivalent.

    Called under the channel's lock, by the thread that has called ``connect`` or readmits a worker; ``close``: by any.
    """

    @property
    def passes_descriptors(self) -> bool:
        """Whether its connections can carry open file descriptors."""
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

    Called by the thread that is calling a method of ``WorkerConnections``, under the lock that it holds.
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
        """Prepare the worker for its first update, e.g. form the process group.

        Called once per connection, by ``wait_for_workers``, after the ``ACCEPTED`` message was sent.

        Raises:
            SyncTimeout: this was not finished at ``deadline``, or failed.
        """
        ...

    def on_answer(self, worker: int, message: Message) -> None:
        """Process an answer of a worker, e.g. start sending the next version to it.

        Called once per message, by ``read`` and the methods that use it (``drain``, ``wait_acks``), after the
        answer was stored for ``wait_acks``.
        """
        ...

    def on_disconnected(self, worker: int) -> None:
        """Release what the worker used, e.g. its slot in shared memory.

        Called once per connection, after either side has closed it.
        """
        ...
