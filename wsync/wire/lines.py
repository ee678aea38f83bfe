"""A sender's conversations with its workers: who is let in, what they answer, and who has gone."""

from __future__ import annotations

import select
from array import array
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Protocol

from wsync.deadlines import NOW, milliseconds, wait_readable
from wsync.errors import SyncTimeout, WorkerDied
from wsync.types import Ack
from wsync.wire.words import PROTOCOL, Door, Kind, Line, Message

_ANSWERS = frozenset((Kind.ACK, Kind.STAGED, Kind.FAILED, Kind.FREED))


class Owner(Protocol):
    """A sender's end, as its lines see it."""

    def joining(self, worker: int, again: bool) -> Message:
        """Somebody is let in (``again``, if in a predecessor's place): the welcome, to be sent next."""
        ...

    def joined(self, worker: int, deadline: float | None) -> None:
        """The welcome was sent; what has to be done next with this worker, until ``deadline``.

        Raises:
            SyncTimeout, WorkerDied: it could not be done.
        """
        ...

    def left(self, worker: int) -> None:
        """The line to ``worker`` is closed, from whichever end."""
        ...

    def answered(self, worker: int, message: Message) -> None:
        """It has said something, beyond what is kept as its answer."""
        ...


class Lines:
    """The lines to all workers, and the door through which workers come.

    Args:
        door: where they knock.
        num_workers: how many there can be.
        owner: is told of what happens.
    """

    def __init__(self, door: Door, num_workers: int, owner: Owner) -> None:
        self._door = door
        self._num_workers = num_workers
        self._owner = owner
        self._lines: dict[int, Line] = {}
        self._gone: set[int] = set()  # who were connected once, and have no successor yet
        self._of: dict[int, int] = {}  # descriptor -> worker
        self._poll = select.poll()  # not an epoll: a forked child would share that
        self._answers: dict[int, Ack] = {}
        self._departed: dict[int, Ack] = {}
        self._reads = 0

    @property
    def workers(self) -> Collection[int]:
        """Those that are connected and alive."""
        return self._lines.keys()

    @property
    def descriptors(self) -> bytes:
        """Of all lines, then of all processes, as an ``array("i")``; empty if one is missing, or has no process."""
        signs = [self._lines[worker].signs for worker in range(self._num_workers) if worker in self._lines]
        if len(signs) < self._num_workers or any(len(both) != 2 for both in signs):
            return b""
        return array("i", [fd for column in zip(*signs, strict=True) for fd in column]).tobytes()

    @property
    def signs(self) -> Collection[int]:
        """Descriptors, one of which is readable when a worker has said something, or has gone."""
        return self._of.keys()

    def signs_of(self, worker: int) -> Collection[int]:
        """Those of one that is connected."""
        return self._lines[worker].signs

    def admit(self, workers: Collection[int], sentinels: Mapping[int, int], deadline: float | None) -> None:
        """Let workers in until all of ``workers`` are there.

        Raises:
            SyncTimeout: some never came; the message names them.
            WorkerDied: a worker's ``sentinel`` fired first.
        """
        self.listen()  # some may have died, and have successors at the door
        missing = set(workers) - self._lines.keys()
        watched = {sentinels[worker]: worker for worker in missing if worker in sentinels}
        while missing:
            ready = wait_readable([self._door.fileno(), *watched], deadline)
            if not ready:
                raise SyncTimeout(
                    f"worker(s) {names(missing)} did not connect in time: "
                    "each worker must call connect(worker_idx=…), or init_on_worker(…), while the sender waits",
                    {worker: "never connected" for worker in missing},
                )
            if self._door.fileno() in ready:
                missing.discard(self._let_in(deadline))
                watched = {fd: worker for fd, worker in watched.items() if worker in missing}
                continue
            dead = {watched[fd]: "died before it had connected" for fd in ready}
            raise WorkerDied(f"worker(s) {names(dead)} died before they had connected", dead)

    def _let_in(self, deadline: float | None) -> int:
        """Greet who is at the door; its index, or -1 if it was turned away, or has left."""
        visitor = self._door.accept()
        if visitor is None:
            return -1
        line, hello = visitor
        worker = hello.worker
        if wait_readable(line.signs, NOW):  # until it is welcomed it has nothing to say: it has died, or given up
            line.close()
            return -1
        self.listen()  # its predecessor may have died
        problem = ""
        if hello.version != PROTOCOL:
            problem = f"it speaks protocol {hello.version}, the sender {PROTOCOL}: two versions of wsync"
        elif not 0 <= worker < self._num_workers:
            problem = f"worker_idx {worker} is out of range: there are {self._num_workers} workers"
        elif worker in self._lines:
            problem = f"worker_idx {worker} is taken by {self._lines[worker].peer}"
        if problem:
            with suppress(ConnectionError):  # it has not waited for this
                line.send(Message(Kind.REFUSED, worker, payload=problem.encode()))
            line.close()
            return -1
        again = worker in self._gone
        self._gone.discard(worker)
        self._answers.pop(worker, None)
        self._departed.pop(worker, None)
        welcome = self._owner.joining(worker, again)
        self._lines[worker] = line
        for fd in line.signs:
            self._of[fd] = worker
            self._poll.register(fd, select.POLLIN)
        try:
            line.send(welcome)
        except ConnectionError:  # it has knocked and left: as if it had not come
            self.forget(worker)
            if not again:
                self._gone.discard(worker)
            return -1
        self._owner.joined(worker, deadline)
        return worker

    def forget(self, worker: int) -> None:
        """Hang up on a worker."""
        line = self._lines.pop(worker, None)
        if line is None:
            return
        for fd in line.signs:
            self._poll.unregister(fd)
            del self._of[fd]
        line.close()
        self._gone.add(worker)
        self._owner.left(worker)

    def lose(self, worker: int, cause: str) -> None:
        """Take it that a worker is gone, and hang up."""
        self.forget(worker)
        self._departed[worker] = Ack(worker, 0, died=True, error=cause)

    def say(self, worker: int, message: Message) -> None:
        """Send; a line that has broken is noticed, and reported, by the next read."""
        line = self._lines.get(worker)
        if line is None:
            return
        try:
            if message.payload:
                line.send(message)
            else:
                line.call(message)
        except ConnectionError:
            return

    def note(self, ack: Ack) -> None:
        """Take it that a worker has answered so, or has gone."""
        (self._departed if ack.died else self._answers)[ack.worker] = ack

    def listen(self) -> None:
        """Take in everything that has been said."""
        while self.read(NOW):
            pass

    def collect(self, workers: Collection[int], version: int, deadline: float | None) -> list[Ack]:
        """Wait for an answer, an error or the death of each of ``workers``; one each, of those who have by then."""
        while True:
            acks = [ack for worker in workers if (ack := self._answer(worker, version))]
            if len(acks) == len(workers) or not self.read(deadline):
                for ack in acks:
                    (self._departed if ack.died else self._answers).pop(ack.worker)
                return acks

    def _answer(self, worker: int, version: int) -> Ack | None:
        """What ``worker`` said to ``version``; only if it said nothing, that it is gone."""
        ack = self._answers.get(worker)
        return ack if ack is not None and ack.version >= version else self._departed.get(worker)

    def read(self, deadline: float | None) -> bool:
        """Take in what workers say, once somebody does; False at the deadline."""
        ready = self._poll.poll(milliseconds(deadline))
        if not ready:
            return False
        self._reads += 1
        this = self._reads
        # Lines before process descriptors: a worker that answered and then died has answered.
        for fd, _ in sorted(ready, key=self._is_sentinel) if len(ready) > 1 else ready:
            worker = self._of.get(fd)
            if worker is None:
                continue
            line = self._lines[worker]
            message = None if fd != line.fileno() else line.receive()
            if message is None or message.kind not in _ANSWERS:
                self.lose(worker, _why(line, message))
                continue
            known = self._answers.get(worker)  # what it says once more may come after something newer
            if message.kind is not Kind.FREED and (known is None or known.version <= message.version):
                error = message.payload.decode(errors="replace") if message.kind is Kind.FAILED else ""
                self._answers[worker] = Ack(worker, message.version, error, wait=message.wait, apply=message.apply)
            self._owner.answered(worker, message)
            if self._reads != this:
                return True  # the owner has read meanwhile: what else was ready may be so no more
        return True

    def _is_sentinel(self, ready: tuple[int, int]) -> bool:
        fd, _ = ready
        worker = self._of.get(fd)
        return worker is not None and self._lines[worker].fileno() != fd

    def close(self) -> None:
        """Hang up on every worker, and shut the door; harmless when repeated."""
        for worker in list(self._lines):
            self.forget(worker)
        self._door.close()


def _why(line: Line, message: Message | None) -> str:
    """For what reason a line has ended."""
    if message is None:
        return f"{line.peer} died"
    return f"{line.peer} " + ("has shut down its end" if message.kind is Kind.BYE else f"said {message.kind.name}")


def names(workers: Collection[int]) -> str:
    """Indices, for people."""
    return ", ".join(str(worker) for worker in sorted(workers))
