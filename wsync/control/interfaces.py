"""The interfaces of this folder: a connection, and the source and the callbacks of ``WorkerConnections``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from wsync.control.messages import Message
from wsync.control.receiver_thread import MessageHandler


class Connection(Protocol):
    """One side of the connection between a sender and one worker.

    Any thread may call ``send`` and ``flush``; a lock inside keeps messages whole. One thread at a time calls
    ``receive``: on the sender the thread that holds the channel's lock (``SenderSideChannel``), or in a fast update the
    sender's lock; in a worker the thread that connects, and afterwards the receiver thread.
    """

    @property
    def peer(self) -> str:
        """A description of the other process, for error messages."""
        ...

    @property
    def descriptors(self) -> Sequence[int]:
        """Descriptors that become readable when a message arrives or the peer exits; ``fileno()`` first."""
        ...

    @property
    def socket_fd(self) -> int:
        """The descriptor of the stream socket that carries the messages; -1 if there is no such socket.

        For the compiled fast path, which sends and receives whole messages on the socket itself: on the sender under
        the sender's lock; in a worker the receiver thread receives, and the thread that installs answers, in the gate.
        """
        ...

    @property
    def busy(self) -> bool:
        """Whether a background thread is sending earlier messages, or has failed to: the fast path must not send."""
        ...

    @property
    def local_host(self) -> str:
        """The IP address by which the peer reaches this side; loopback for a Unix socket."""
        ...

    def fileno(self) -> int:
        """Return the descriptor that is readable when ``receive`` has something to return."""
        ...

    def send(self, message: Message, *, may_drop: bool = False) -> None:
        """Send one message, without waiting for the peer to read it.

        Args:
            message: the message.
            may_drop: drop it if the peer reads too slowly. For an ``UPDATE`` that only wakes the peer, which then reads
                the arena: earlier messages, which it has not read yet, wake it as well. Also for an ``ABORT``: without
                a commit nothing is installed.

        Raises:
            ConnectionError: the peer has disconnected; or this is a forked child of the process that connected.
        """
        ...

    def flush(self, deadline: float | None = None) -> None:
        """Wait until all messages of earlier calls have been sent, so that ``close`` cannot lose them.

        Any thread may call it. It returns at the deadline, whether or not they have been sent.

        Raises:
            ConnectionError: the connection has broken.
        """
        ...

    def receive(self) -> Message | None:
        """Return the next message, once ``fileno()`` is readable.

        Returns:
            None if the peer has disconnected, has sent something unreadable, or has sent nothing for five seconds in
            the middle of a message.

        Raises:
            NotConnected: the peer did not prove that it has the token.
        """
        ...

    def attach(self, handler: MessageHandler) -> None:
        """In a worker: from now on ``handler.on_readable()`` is called for each message, and when the peer exits.

        The handler is called by the receiver thread; with RPC by the thread of the incoming call, and for messages that
        have arrived before, by the thread that calls this.
        """
        ...

    def detach(self, handler: MessageHandler) -> None:
        """Undo ``attach``. On return no call of the handler is running, unless the handler itself called ``detach``."""
        ...

    def peer_is_alive(self) -> bool:
        """Return whether the peer is alive, if its exit makes no descriptor readable (RPC); otherwise always True.

        Polled by threads that wait in ``receive``, ``pull`` or before a forward.
        """
        ...

    def has_ended(self) -> bool:
        """Return whether the peer has closed the connection or exited; what it sent before may not be read yet.

        Called by ``connect`` in a worker that is connected already.
        """
        ...

    def interrupt(self) -> None:
        """End the connection as if the peer had disconnected: ``receive`` returns None. Any thread may call it."""
        ...

    def close(self) -> None:
        """Close this side. Idempotent. Any thread may call it: on the sender a finalizer may do so in any thread."""
        ...


class ConnectionSource(Protocol):
    """Where workers connect: a ``Listener``, or the RPC backend's equivalent.

    The thread that calls ``connect`` or readmits a worker calls the methods, under the lock of the sender's channel
    (``SenderSideChannel``). Any thread may call ``close``, because a finalizer may close the channel.
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

    Called by the thread that is calling a method of ``WorkerConnections``, with the channel's lock held, except that
    ``WorkerConnections.close`` may run without it.
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
            SyncTimeout: this was not finished at ``deadline``.
            WorkerFailed: the set-up of the worker's transport raised an error.
            Exception: whatever ``create_transport`` raised.
        """
        ...

    def on_answer(self, worker: int, message: Message) -> None:
        """Process a message of a worker, e.g. send the next version after an answer.

        Called once per message, by ``WorkerConnections.process``, after an ``ACK``, ``PREPARED`` or ``FAILED`` was
        stored for ``wait_acks``.
        """
        ...

    def on_disconnected(self, worker: int) -> None:
        """Release what the worker used, e.g. its slot in shared memory.

        Called once per connection that was accepted, after either side has closed it.
        """
        ...
