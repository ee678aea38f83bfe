"""What ``WorkerConnections`` calls as workers connect, answer and disconnect."""

from __future__ import annotations

from typing import Protocol

from wsync.control.messages import Message


class ConnectionCallbacks(Protocol):
    """Called by ``WorkerConnections`` as workers connect, answer and disconnect.

    Called by the thread that is calling a method of ``WorkerConnections``, with the channel's lock held, except that
    ``WorkerConnections.close`` may run without it.
    """

    def accepted_message(self, worker: int, rejoined: bool) -> Message:
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
            SyncTimeout: this was not finished at ``deadline``.
            WorkerFailed: the set-up of the worker's transport raised an error.
            Exception: whatever ``create_transport`` raised.
        """
        ...

    def on_message(self, worker: int, message: Message) -> None:
        """Process a message of a worker, e.g. send the next version after an answer.

        Called by ``WorkerConnections.process``, for each ``SLOT_FREED``, each ``REQUEST``, and each answer (``ACK``,
        ``PREPARED``, ``FAILED``); an answer is stored for ``wait_acks`` first.
        """
        ...

    def on_disconnected(self, worker: int) -> None:
        """Release what the worker used, e.g. its slot in shared memory.

        Called once or twice when this side closes a connection for which ``accepted_message`` was called: before or
        after the socket is closed.
        """
        ...
