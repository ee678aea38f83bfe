"""The two ends of a line across a network: TCP for words; for weights ``torch.distributed``, or memory (``same_host``).

Neither a store nor a group can be waited for together with a deadline, a death and other lines, and a gloo ``recv``
that timed out cannot be taken up again; so words go by a socket beside the group, and a transfer is waited for only
when it was announced.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

from torch.distributed import ProcessGroup

from wsync.errors import NotConnected
from wsync.network.group import UsersPair
from wsync.network.meeting import BACKENDS, Meeting, MeetingPlace, UsersPlace, device_of
from wsync.network.pair import Incoming
from wsync.network.receiver import GroupReceiver
from wsync.network.same_host import Whereabouts
from wsync.network.sender import GroupSender
from wsync.network.tcp import NetEndpoint, NetLine, NetListener, dial

_TAGS = 1 << 31  # that gloo knows


@dataclass(frozen=True, slots=True)
class Seed:
    """What a worker needs to find the sender, and the pair with it. Travels in a pickled scheme.

    Attributes:
        endpoint: where the sender listens.
        meeting: where pairs are formed; None if they are in a group of the user's.
        rank: the sender's, in the user's group.
        tag: from which on messages in the user's group have theirs.
    """

    endpoint: NetEndpoint
    meeting: Meeting | None
    rank: int = 0
    tag: int = 0

    def tag_of(self, generation: int) -> int:
        """The tag of a worker's messages: who comes back does not take what was left untaken when it went."""
        return (self.tag + generation) % _TAGS

    def dump(self) -> str:
        """As JSON, for a store in which processes meet."""
        end, meeting = self.endpoint, self.meeting
        memory = None if meeting is None or meeting.memory is None else astuple(meeting.memory)
        where = None if meeting is None else [meeting.host, meeting.port, meeting.backend, memory]
        return json.dumps([[end.host, end.port, end.token.hex()], where, self.rank, self.tag])

    @classmethod
    def load(cls, text: str) -> Seed:
        """What was dumped.

        Raises:
            ValueError: it is something else.
        """
        try:
            (host, port, token), where, rank, tag = json.loads(text)
            seed = cls(NetEndpoint(host, port, bytes.fromhex(token)), _meeting(where), rank, tag)
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError("this does not say where a sender is") from error
        end, meeting = seed.endpoint, seed.meeting
        places = [(end.host, end.port), *([] if meeting is None else [(meeting.host, meeting.port)])]
        if not all(isinstance(host, str) and type(port) is int and 0 < port < 65536 for host, port in places):
            raise ValueError("this does not say where a sender is")
        known = meeting is None or (isinstance(meeting.backend, str) and meeting.backend in BACKENDS)
        if type(rank) is not int or type(tag) is not int or not known:
            raise ValueError("this does not say how a sender sends")
        return seed


def _meeting(where: Any) -> Meeting | None:
    """What was dumped; TypeError or ValueError if it is something else."""
    if where is None:
        return None
    host, port, backend, memory = where
    if memory is None:
        return Meeting(host, port, backend)
    pid, descriptor, name, base = memory
    if not all(type(number) is int and number >= 0 for number in (pid, descriptor, base)) or not base:
        raise ValueError("this is no memory's place")
    return Meeting(host, port, backend, Whereabouts(pid, descriptor, str(name), base))


FindSenders = Callable[[int, float | None], Iterable[Seed]]
"""``(worker, deadline) -> seeds``: the worker joins the first of these senders that is there."""


def network_sender(
    num_workers: int,
    host: str,
    backend: str,
    group: ProcessGroup | None = None,
    *,
    shared_memory: bool,
    checksum: bool | None,
) -> tuple[GroupSender, Seed]:
    """The trainer's end, listening on ``host``; lines are in ``group``, or are formed as ``MeetingPlace`` does.

    Raises:
        NotConnected: this machine has no such address.
        ValueError: no such backend.
    """
    if group is not None:
        door = NetListener(host)
        seed = Seed(door.endpoint, None, group.rank(), zlib.crc32(door.endpoint.token) >> 1)
        users = UsersPlace(group, seed.tag_of, device_of(backend))
        return GroupSender(num_workers, door, users, checksum=checksum), seed
    place = MeetingPlace(host, backend, num_workers, shared_memory=shared_memory)
    door = NetListener(host)
    return GroupSender(num_workers, door, place, checksum=checksum), Seed(door.endpoint, place.meeting)


def network_receiver(
    find: FindSenders,
    *,
    backend: str,
    retains: bool,
    timeout: float | None,
    group: ProcessGroup | None = None,
) -> GroupReceiver:
    """A worker's end; ``find(worker, deadline)`` says where the sender may be, when it connects."""
    route = _Route(find, group)
    return GroupReceiver(
        route.dial,
        route.pair,
        retains=retains,
        device=device_of(backend),
        timeout=timeout,
        ahead=backend == "gloo" and group is None,
    )


class _Route:
    """A worker's way to the sender, looked for when it connects."""

    def __init__(self, find: FindSenders, group: ProcessGroup | None) -> None:
        self._find = find
        self._group = group
        self._seed: Seed | None = None

    def dial(self, worker: int, deadline: float | None) -> NetLine:
        gone: NotConnected | None = None
        for seed in self._find(worker, deadline):
            self._seed = seed
            try:
                return dial(seed.endpoint, worker, deadline)
            except NotConnected as error:
                gone = error
        raise gone or NotConnected(f"worker {worker}: nobody says where a sender is")

    def pair(self, worker: int, generation: int, deadline: float | None) -> Callable[[], Incoming]:
        assert self._seed is not None, "dial() comes first"
        if self._seed.meeting is not None:
            return self._seed.meeting.join(worker, generation, deadline)
        if self._group is None:
            raise NotConnected(f"worker {worker}: the sender was given a process group; give this end the same one")
        return partial(UsersPair, self._group, self._seed.rank, self._seed.tag_of(generation))
