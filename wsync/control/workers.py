"""A sender's connections to its workers: registration, acknowledgements, deaths."""

from __future__ import annotations

import logging
import select
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from wsync.control.callbacks import ConnectionCallbacks
from wsync.control.connection import Connection
from wsync.control.early_joins import EarlyJoins
from wsync.control.listener import Listener
from wsync.control.messages import Kind, Message, why_ended, why_not_connected, why_rejected
from wsync.deadlines import NOW, deadline_in, earlier, milliseconds, remaining, wait_readable
from wsync.errors import NotConnected, SyncTimeout, WorkerDied, join_indices
from wsync.types import Ack

_log = logging.getLogger(__name__)
_ANSWERS = frozenset((Kind.ACK, Kind.PREPARED, Kind.FAILED))
_EXPECTED_KINDS = _ANSWERS | {Kind.SLOT_FREED, Kind.REQUEST}  # others end the connection
_SETUP_TIMEOUT = 20.0  # seconds for the set-up of a worker that connects while others are awaited
_LEAVE_TIMEOUT = 5.0  # seconds to get the queued messages, and then a LEAVE, into the sockets of all workers


class WorkerConnections:
    """The connections to all workers of one sender.

    Messages are read only in a method of this object (except in fast updates and ``reading_directly``), by a thread
    with the channel's lock: in a method of the scheme, or the send loop. A finalizer may call ``close`` without it.

    Args:
        listener: where workers connect; closed with this object.
        num_workers: the number of workers.
        callbacks: notified as workers connect, answer and disconnect.

    Attributes:
        early_joins: the replacements that are connected although no ``readmit`` has accepted them yet.
    """

    def __init__(self, listener: Listener, num_workers: int, callbacks: ConnectionCallbacks) -> None:
        self._listener = listener
        self._num_workers = num_workers
        self._callbacks = callbacks
        self._connections: dict[int, Connection] = {}
        self._given_up: set[int] = set()  # given to ``give_up`` since ``wait_for_workers`` last began
        self.early_joins = EarlyJoins()
        self._worker_of: dict[int, int] = {}  # descriptor -> worker
        self._callback_of: dict[int, Callable[[], None]] = {}  # descriptor -> callback, see watch()
        self._poll = select.poll()  # not epoll: its set keeps closed connections that a forked child has open
        self._answers: dict[int, Ack] = {}
        self._deaths: dict[int, Ack] = {}  # each with ``died=True``
        self._ready: set[int] = set()  # readable descriptors that ``read`` has not processed yet

    @property
    def workers(self) -> Collection[int]:
        """The workers that are connected and alive."""
        return self._connections.keys()

    @property
    def fast_path_descriptors(self) -> bytes:
        """All sockets, then all pidfds (an ``array("i")``); empty if one is missing, or an outbox is busy."""
        each = [one.descriptors for _, one in sorted(self._connections.items()) if not one.busy]
        if len(each) < self._num_workers or any(len(both) != 2 for both in each):
            return b""
        return array("i", [fd for column in zip(*each, strict=True) for fd in column]).tobytes()

    @property
    def awaited_descriptors(self) -> Collection[int]:
        """The descriptors that ``read`` waits for."""
        return [*self._worker_of, *self._callback_of]

    def watch(self, descriptor: int, callback: Callable[[], None]) -> None:
        """From now on ``read`` calls ``callback`` when ``descriptor`` is readable, e.g. a transfer thread's eventfd."""
        self._callback_of[descriptor] = callback
        self._poll.register(descriptor, select.POLLIN)

    def wait_for_workers(self, workers: Collection[int], sentinels: Mapping[int, int], deadline: float | None) -> None:
        """Accept connections until all of ``workers`` are connected.

        ``sentinels``: ``{worker: descriptor}``, readable once the worker's process has exited.

        Raises:
            NotConnected, SyncTimeout: this object was closed; or workers, which are named, did not connect in time.
            WorkerDied: a worker's process exited first, a worker died after it had connected, or was given up.
            Exception: of ``on_accepted`` for one of ``workers`` (for another worker, it is logged); or of the listener.
        """
        self.process_arrived_messages()  # notices deaths, so that replacements are accepted
        self._given_up.clear()
        self.early_joins.discard(*workers)
        # After the deadline, workers in the listener's queue are still accepted, until an accept() returns none.
        missing, last_accept_worked = set(workers) - self._connections.keys(), True
        while missing:
            if self._listener.fileno() < 0:
                raise NotConnected("the scheme was shut down while it connected")
            watched = {worker: sentinels[worker] for worker in missing if worker in sentinels}
            descriptors = [self._listener.fileno(), *watched.values(), *self.awaited_descriptors]
            ready = wait_readable(descriptors, earlier(deadline, deadline_in(0.1)))  # 0.1 s: give_up() does not wake it
            if given_up := dict.fromkeys(missing & self._given_up, "disconnect() was called before it had connected"):
                raise WorkerDied(f"worker(s) {join_indices(given_up)}: disconnect() was called", given_up)
            died_early = {worker: "died before it had connected" for worker, fd in watched.items() if fd in ready}
            if died_early and self._listener.fileno() not in ready:  # it may have connected before it ended
                raise WorkerDied(f"worker(s) {join_indices(died_early)} died before they had connected", died_early)
            if remaining(deadline) == 0.0 and not (last_accept_worked and self._listener.fileno() in ready):
                _log.debug("workers that did not connect in time: %s", join_indices(missing))
                raise SyncTimeout(why_not_connected(missing, watched), dict.fromkeys(missing, "did not connect"))
            if not {*self._worker_of, *self._callback_of}.isdisjoint(ready):  # workers that have connected already
                self.read(NOW)
            if self._listener.fileno() in ready:
                last_accept_worked = (worker := self._accept(workers, deadline)) >= 0
                missing.discard(worker)
            # Not those that answered (FAILED, for example) before they were lost: wait_acks() reports their answers.
            lost = set(workers) - {*missing, *self._connections, *self._answers}
            if deaths := {one: death.error for one, death in self._deaths.copy().items() if one in lost}:
                causes = "".join(f"\nworker {worker}: {cause}" for worker, cause in sorted(deaths.items()))
                raise WorkerDied(f"worker(s) {join_indices(deaths)} were lost after they had connected{causes}", deaths)

    def _accept(self, awaited: Collection[int], deadline: float | None) -> int:
        """Register the worker of one new connection; return its index, or -1 if no worker was registered."""
        if (arrival := self._listener.accept()) is None:
            return -1
        connection, hello = arrival
        worker = hello.worker
        if wait_readable(connection.descriptors, NOW):  # the worker has gone: a live one sends nothing before ACCEPTED
            connection.close()
            return -1
        self.process_arrived_messages()  # notices the death of the worker that it replaces
        taken_by = self._connections[worker].peer_name if worker in self._connections else ""
        if reason := why_rejected(hello, self._num_workers, taken_by):
            _log.debug("rejected worker %d: %s", worker, reason)
            with suppress(ConnectionError):  # it has disconnected
                connection.send(Message(Kind.REJECTED, worker, payload=reason.encode()))
            connection.close()
            return -1
        rejoined = self.early_joins.has_connected(worker)
        self._answers.pop(worker, None)
        death = self._deaths.pop(worker, None)  # of the worker that it replaces; may be unreported
        try:
            accepted = self._callbacks.accepted_message(worker, rejoined)
            self._connections[worker] = connection  # not before: the callback may send, and ACCEPTED has to be first
            for fd in connection.descriptors:
                self._worker_of[fd] = worker
                self._poll.register(fd, select.POLLIN)
            try:
                connection.send(accepted)
            except ConnectionError:  # it has disconnected: treated as never connected
                self._undo_join(worker, death)
                return -1
            self.early_joins.note_connection(worker, None if worker in awaited else accepted.version)
            _log.debug("worker %d %s as %s", worker, "rejoined" if rejoined else "joined", connection.peer_name)
            limit = deadline if worker in awaited else earlier(deadline, deadline_in(_SETUP_TIMEOUT))
            self._callbacks.on_accepted(worker, limit)
        except BaseException as error:  # also KeyboardInterrupt: the worker is not set up then
            self._undo_join(worker, death)
            connection.close()  # also if it was not registered yet
            if worker in awaited or not isinstance(error, Exception):
                raise
            _log.warning("worker %d could not be set up, while others were awaited: %s", worker, error)
            return -1
        return worker

    def _undo_join(self, worker: int, death: Ack | None) -> None:
        if death is not None:
            self._deaths.setdefault(worker, death)
        self.disconnect(worker)
        self._callbacks.on_disconnected(worker)  # again: disconnect() does nothing if it was not registered yet

    def disconnect(self, worker: int) -> None:
        """Close the connection to a worker; its later messages are ignored. Records no death. Idempotent."""
        if (connection := self._connections.get(worker)) is None:
            return
        try:  # a signal handler may raise after any call
            del self._connections[worker]
            self.early_joins.discard(worker)
            for fd in connection.descriptors:
                self._forget(fd)
            connection.close()
        finally:
            self._callbacks.on_disconnected(worker)

    def _forget(self, fd: int) -> None:
        with suppress(KeyError):  # inside ``reading_directly``, or not registered yet
            self._poll.unregister(fd)
        self._ready.discard(fd)
        self._worker_of.pop(fd, None)

    def mark_dead(self, worker: int, cause: str) -> None:
        """Record that a worker is treated as dead, for the reason ``cause``, and close its connection."""
        _log.debug("worker %d is treated as dead: %s", worker, cause)
        self._deaths.setdefault(worker, Ack(worker, 0, died=True, error=cause))  # before disconnect(), which may raise
        self.disconnect(worker)

    def give_up(self, worker: int) -> None:
        """Do as ``mark_dead``, while another thread waits for this worker: its wait ends. Any thread; takes no lock."""
        self._given_up.add(worker)
        if (connection := self._connections.get(worker)) is not None:
            self._deaths[worker] = Ack(worker, 0, died=True, error="disconnect() was called for it")
            connection.interrupt()

    def send(self, worker: int, message: Message, *, may_drop: bool = False) -> None:
        """Send to a worker, see ``Connection.send``; a broken connection is noticed and reported by the next read."""
        if (connection := self._connections.get(worker)) is not None:
            with suppress(ConnectionError):
                connection.send(message, may_drop=may_drop)

    def store(self, ack: Ack) -> None:
        """Store an acknowledgement or a death that did not come through ``read``, e.g. a failed transfer."""
        (self._deaths if ack.died else self._answers)[ack.worker] = ack

    def process_arrived_messages(self) -> None:
        """Process all messages that have arrived, without waiting."""
        while self.read(NOW):
            pass

    def wait_acks(self, workers: Collection[int], version: int, deadline: float | None) -> list[Ack]:
        """Return and remove each worker's answer to ``version`` or newer, or its death; no entry if none has come."""
        expired = False
        while True:
            acks = [ack for worker in workers if (ack := self._answer_of(worker, version))]
            if len(acks) == len(workers) or expired or not self.read(deadline):
                for ack in acks:
                    (self._deaths if ack.died else self._answers).pop(ack.worker)
                    self.early_joins.set_answered(ack.worker)
                return acks
            expired = deadline != NOW and remaining(deadline) == 0.0  # NOW: until nothing is left to read

    def _answer_of(self, worker: int, version: int) -> Ack | None:
        """Return the worker's answer to ``version``, else its death: an answer takes precedence over a death."""
        ack = self._answers.get(worker)
        return ack if ack is not None and ack.version >= version else self._deaths.get(worker)

    @contextmanager
    def reading_directly(self, worker: int) -> Iterator[Connection]:
        """While the block runs, ``read`` leaves one worker's messages to the caller, e.g. to form a process group."""
        connection = self._connections[worker]
        descriptors = list(connection.descriptors)
        for fd in descriptors:
            self._poll.unregister(fd)
        try:
            yield connection
        finally:
            if self._connections.get(worker) is connection:
                for fd in descriptors:
                    self._poll.register(fd, select.POLLIN)

    def read(self, deadline: float | None) -> bool:
        """Wait for messages and process one of each worker that has sent any; False at the deadline.

        A callback may call this again: the inner call then processes the messages that are left.
        """
        self._ready = self._ready or {fd for fd, _ in self._poll.poll(milliseconds(deadline))}
        if not self._ready:
            return False
        try:
            while self._ready:
                self._process(self._ready.pop())
        finally:
            self._ready.clear()  # after an error, poll again: the fast path may read what is left
        return True

    def _process(self, fd: int) -> None:
        """Process one message from ``fd``, or the exit of its process, or call its callback."""
        if fd in self._callback_of:
            return self._callback_of[fd]()
        connection = self._connections.get(worker := self._worker_of.get(fd, -1))
        if connection is None:  # a finalizer has closed it in another thread, or a signal handler raised meanwhile
            return self._forget(fd)
        readable = True
        if fd != connection.fileno():  # the worker's process has exited, but may have answered before: read that first
            self._ready.discard(connection.fileno())  # the next poll() reports it again, if there is more to read
            readable = bool(wait_readable([connection.fileno()], NOW))
        self.process(worker, connection.receive() if readable else None)

    def process(self, worker: int, message: Message | None) -> None:
        """Process what ``read`` or ``reading_directly`` received from a worker; None: its connection has ended."""
        connection = self._connections.get(worker)
        if connection is None or (message is not None and message.kind is Kind.SETUP_KEY):  # a late one is ignored
            return
        if message is None or message.kind not in _EXPECTED_KINDS:
            return self.mark_dead(worker, why_ended(connection.peer_name, message))
        known = self._answers.get(worker)
        if message.kind in _ANSWERS and (known is None or known.version <= message.version):  # not an older answer
            error = message.payload.decode(errors="replace") if message.kind is Kind.FAILED else ""
            self._answers[worker] = Ack(worker, message.version, error, wait=message.wait, apply=message.apply)
        self._callbacks.on_message(worker, message)

    def close(self, *, finished: bool = False) -> None:
        """Close all connections, and accept no more. Idempotent. If ``finished``, send ``LEAVE`` to all first."""
        with ExitStack() as steps:  # the steps run as this block ends, the last one first, even if a handler raises
            steps.callback(self._listener.close)
            steps.callback(self._callback_of.clear)
            for worker in list(self._connections):  # not disconnect(): these deaths end a wait_acks() in progress
                steps.callback(self.mark_dead, worker, "the scheme was shut down")
            for worker in list(self._connections) if finished else ():
                self.send(worker, Message(Kind.LEAVE, worker, 1))
            deadline = deadline_in(_LEAVE_TIMEOUT)
            for connection in list(self._connections.values()) if finished else ():
                with suppress(ConnectionError):  # the worker has died
                    connection.flush(deadline)
