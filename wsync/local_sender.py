"""The trainer's end of the lines to workers on its own machine: sockets for words, an arena for weights.

Shared by the backends whose workers run on the trainer's machine. They differ in one word, ``retains``: whether a model
stays bound to the slot that it was given (shared memory), or copies it out (multiprocess).
"""

from __future__ import annotations

import pickle
import select
import struct
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from wsync.arena import Arena
from wsync.errors import NotConnected, SyncTimeout, WorkerDied
from wsync.layout import Layout
from wsync.rendezvous import (
    PROTOCOL,
    Connection,
    Endpoint,
    Kind,
    Listener,
    Message,
    deadline_in,
    remaining,
    wait_readable,
)
from wsync.transport import Buffer
from wsync.types import ANY_VERSION, Ack

_SWITCH_TIMEOUT = 5.0  # seconds; it is held for a microsecond, unless its holder was stopped right then
STAGED = struct.Struct("<QI")  # transaction, slot


class LocalSender:
    """The trainer's end (a ``SenderEnd``).

    Args:
        num_workers: how many workers there can be.
        retains: whether workers stay bound to slots.
    """

    def __init__(self, num_workers: int, *, retains: bool) -> None:
        self._num_workers = num_workers
        self._retains = retains
        self._listener = Listener()
        self._peers: dict[int, Connection] = {}
        self._gone: set[int] = set()
        self._owner: dict[int, int] = {}  # descriptor -> worker
        self._poll = select.poll()
        self._arena: Arena | None = None
        self._layout: Layout | None = None
        self._latest = (0, -1)  # version and slot of the newest publish: for who joins late
        self._reserved: set[int] = set()
        self._staged: dict[int, dict[int, int]] = {}  # transaction -> worker -> slot
        self._answers: dict[int, Ack] = {}
        self._departed: dict[int, Ack] = {}

    @property
    def endpoint(self) -> Endpoint:
        """Where workers find this end."""
        return self._listener.endpoint

    @property
    def workers(self) -> Collection[int]:
        """Those that are connected and alive."""
        return self._peers.keys()

    @property
    def arena(self) -> Arena:
        """The slots."""
        if self._arena is None:
            raise NotConnected("there are no shared weights yet: connect() or send() makes them")
        return self._arena

    def prepare(self, layout: Layout) -> None:
        """Make the arena, and tell those who are connected already."""
        self._layout = layout
        self._arena = Arena(layout, self._num_workers)
        for worker, peer in self._peers.items():
            peer.send(self._greeting(Kind.LAYOUT, worker))

    def _greeting(self, kind: Kind, worker: int) -> Message:
        fds = () if self._arena is None else self._arena.fds
        return Message(kind, worker, PROTOCOL, pickle.dumps((self._num_workers, self._layout)), fds=fds)

    def admit(self, workers: Collection[int], sentinels: Mapping[int, int], deadline: float | None) -> None:
        """Let workers in until all of ``workers`` are there."""
        missing = set(workers) - self._peers.keys()
        watched = {sentinels[worker]: worker for worker in missing if worker in sentinels}
        while missing:
            ready = wait_readable([self._listener.fileno(), *watched], deadline)
            if not ready:
                raise SyncTimeout(
                    f"worker(s) {_names(missing)} did not connect in time: "
                    "each worker must call connect(worker_idx=…) while the sender does",
                    {worker: "never connected" for worker in missing},
                )
            if self._listener.fileno() in ready:
                missing.discard(self._let_in())
                watched = {fd: worker for fd, worker in watched.items() if worker in missing}
                continue
            dead = {watched[fd]: "died before it had connected" for fd in ready}
            raise WorkerDied(f"worker(s) {_names(dead)} died before they had connected", dead)

    def _let_in(self) -> int:
        """Greet who is at the door; its index, or -1 if it was turned away."""
        visitor = self._listener.accept()
        if visitor is None:
            return -1
        connection, hello = visitor
        worker = hello.worker
        problem = ""
        if hello.version != PROTOCOL:
            problem = f"it speaks protocol {hello.version}, the sender {PROTOCOL}: two versions of wsync"
        elif not 0 <= worker < self._num_workers:
            problem = f"worker_idx {worker} is out of range: there are {self._num_workers} workers"
        elif worker in self._peers and not wait_readable([self._peers[worker].pidfd], deadline_in(0)):
            problem = f"worker_idx {worker} is taken by process {self._peers[worker].pid}"
        if problem:
            connection.send(Message(Kind.REFUSED, worker, payload=problem.encode()))
            connection.close()
            return -1
        self._forget(worker)
        if worker in self._gone:
            self._gone.discard(worker)
            self._switch(worker, *self._latest, acknowledge=True)
        self._answers.pop(worker, None)
        self._departed.pop(worker, None)
        self._peers[worker] = connection
        for fd in (connection.fileno(), connection.pidfd):
            self._owner[fd] = worker
            self._poll.register(fd, select.POLLIN)
        connection.send(self._greeting(Kind.WELCOME, worker))
        return worker

    def _forget(self, worker: int) -> None:
        peer = self._peers.pop(worker, None)
        if peer is None:
            return
        for fd in (peer.fileno(), peer.pidfd):
            self._poll.unregister(fd)
            del self._owner[fd]
        peer.close()
        self._gone.add(worker)
        if self._arena is not None:
            self._arena.switches[worker].leave()

    def reserve(self, workers: Collection[int], deadline: float | None) -> Buffer:
        """A slot that no switch names and no forward uses."""
        arena = self.arena
        while True:
            named = self._named()
            slot = arena.free_slot(named | self._in_use())
            if slot is not None:
                break
            if arena.slots < len(named) + (2 if self._retains else 1):
                slot = arena.grow()
                break
            self._await_free(deadline)
        self._reserved.add(slot)
        return Buffer(arena.views(slot), slot)

    def release(self, buffers: Sequence[Buffer]) -> None:
        """Free slots that were reserved and not published."""
        self._reserved.difference_update(buffer.slot for buffer in buffers)

    def _named(self) -> set[int]:
        """Slots that a worker may yet begin to use."""
        named = self._reserved | ({self._latest[1]} if self._retains else set())
        for worker, switch in enumerate(self.arena.switches):
            version, slot = switch.published()
            if worker not in self._gone and version and (self._retains or switch.taken() < version):
                named.add(slot)
        return named

    def _in_use(self) -> set[int]:
        return {slot for worker in self._peers for slot in self.arena.switches[worker].used()}

    def _await_free(self, deadline: float | None) -> None:
        """Wait until one of the forwards that block all slots has ended, or its worker has died."""
        left = remaining(deadline)
        blocking = [worker for worker in self._peers if self.arena.switches[worker].await_free(left)]
        if blocking and not self._read(deadline):
            raise SyncTimeout(
                f"no slot came free in time: worker(s) {_names(blocking)} are still inside a forward, or stopped",
                {worker: "holds its weights in a forward that does not end" for worker in blocking},
            )

    def published_views(self) -> list[Sequence[Tensor]]:
        """The slots that workers are pointed to, each once, as tensors in the layout's order."""
        published = [switch.published() for switch in self.arena.switches]
        return [self.arena.views(slot) for slot in sorted({slot for version, slot in published if version})]

    def publish(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], acknowledge: bool) -> None:
        """Point the switches to a packed slot; call those who are to answer, or want to be called."""
        self.arena.write_extra(buffer.slot, extra)
        self._latest = (version, buffer.slot)
        for worker in workers:
            self._switch(worker, version, buffer.slot, acknowledge)
        self._reserved.discard(buffer.slot)

    def _switch(self, worker: int, version: int, slot: int, acknowledge: bool) -> None:
        try:
            wants_call = self.arena.switches[worker].publish(version, slot, acknowledge, _SWITCH_TIMEOUT)
        except SyncTimeout as error:
            self._answers[worker] = Ack(worker, ANY_VERSION, error=f"could not be switched: {error}")
            return
        if (acknowledge or wants_call) and worker in self._peers:
            self._say(worker, Message(Kind.NEWS, worker, version))

    def _say(self, worker: int, message: Message) -> None:
        """Send; a line that has broken is noticed, and reported, by the next read."""
        try:
            if message.payload:
                self._peers[worker].send(message)
            else:
                self._peers[worker].call(message)
        except ConnectionError:
            return

    def stage(self, buffer: Buffer, version: int, extra: bytes, workers: Collection[int], transaction: int) -> None:
        """Have workers check a packed slot; it stays reserved until the decision."""
        self.arena.write_extra(buffer.slot, extra)
        for worker in workers:
            self._staged.setdefault(transaction, {})[worker] = buffer.slot
            if worker in self._peers:
                payload = STAGED.pack(transaction, buffer.slot)
                self._say(worker, Message(Kind.STAGE, worker, version, payload))

    def decide(self, version: int, workers: Collection[int], transaction: int) -> None:
        """The switch is the decision: a worker that sees one of a transaction's versions in it installs them all."""
        staged = self._staged.pop(transaction)
        for worker in workers:
            self._latest = (version, staged[worker])
            self._switch(worker, version, staged[worker], acknowledge=True)
        self._reserved.difference_update(staged.values())

    def drop(self, workers: Collection[int], transaction: int) -> None:
        """Have workers forget what was staged, and free its slots."""
        staged = self._staged.pop(transaction, {})
        for worker in workers:
            if worker in self._peers:
                self._say(worker, Message(Kind.DROP, worker, payload=STAGED.pack(transaction, 0)))
        self._reserved.difference_update(staged.values())

    def collect(self, workers: Collection[int], version: int, deadline: float | None) -> list[Ack]:
        """Wait for an answer, an error or the death of each of ``workers``."""
        while True:
            acks = [ack for worker in workers if (ack := self._answer(worker, version))]
            if len(acks) == len(workers) or not self._read(deadline):
                for ack in acks:
                    (self._departed if ack.died else self._answers).pop(ack.worker)
                return acks

    def _answer(self, worker: int, version: int) -> Ack | None:
        """What ``worker`` said to ``version``; only if it said nothing, that it is gone."""
        ack = self._answers.get(worker)
        return ack if ack is not None and ack.version >= version else self._departed.get(worker)

    def _read(self, deadline: float | None) -> bool:
        """Take in what workers say, once somebody does; False at the deadline."""
        left = remaining(deadline)
        ready = self._poll.poll(None if left is None else -(-left * 1000 // 1))
        if not ready:
            return False
        # Lines before process descriptors: a worker that answered and then died has answered.
        for fd, _ in sorted(ready, key=lambda pair: pair[0] == self._pidfd_of(pair[0])):
            worker = self._owner.get(fd)
            if worker is None:
                continue
            peer = self._peers[worker]
            message = None if fd == peer.pidfd else peer.receive()
            if message is None:
                self._forget(worker)
                self._departed[worker] = Ack(worker, 0, died=True, error=f"its process ({peer.pid}) died")
            elif message.kind is Kind.BYE:
                self._forget(worker)
                self._departed[worker] = Ack(worker, 0, died=True, error="it has shut down its end")
            elif message.kind is not Kind.FREED:
                error = message.payload.decode() if message.kind is Kind.FAILED else ""
                self._answers[worker] = Ack(worker, message.version, error, False, message.wait, message.apply)
        return True

    def _pidfd_of(self, fd: int) -> int:
        worker = self._owner.get(fd)
        return -1 if worker is None else self._peers[worker].pidfd

    def close(self) -> None:
        """Hang up on every worker, shut the door, and let the memory go."""
        for worker in list(self._peers):
            self._forget(worker)
        self._listener.close()
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def _names(workers: Collection[int]) -> str:
    return ", ".join(str(worker) for worker in sorted(workers))
