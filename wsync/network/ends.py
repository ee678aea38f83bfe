"""The two ends of a line across a network: TCP for words, ``torch.distributed`` for weights.

Neither a store nor a group can be waited for together with a deadline, a death and other lines, and a gloo ``recv``
that timed out cannot be taken up again; so words go by a socket beside the group, and a transfer is waited for only
when it was announced.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch.distributed import ProcessGroup

from wsync.errors import NotConnected
from wsync.network.group import BACKENDS, Meeting, MeetingPlace, Pair, UsersPair
from wsync.network.receiver import GroupReceiver
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
        where = None if meeting is None else [meeting.host, meeting.port, meeting.backend]
        return json.dumps([[end.host, end.port, end.token.hex()], where, self.rank, self.tag])

    @classmethod
    def load(cls, text: str) -> Seed:
        """What was dumped.

        Raises:
            ValueError: it is something else.
        """
        try:
            (host, port, token), where, rank, tag = json.loads(text)
            seed = cls(
                NetEndpoint(host, port, bytes.fromhex(token)), None if where is None else Meeting(*where), rank, tag
            )
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


FindSenders = Callable[[int, float | None], Iterable[Seed]]
"""``(worker, deadline) -> seeds``: the worker joins the first of these senders that is there."""


def device_of(backend: str) -> torch.device:
    """Where ``backend`` has weights packed and received."""
    return torch.device("cuda" if backend == "nccl" else "cpu")


def network_sender(
    num_workers: int, host: str, backend: str, group: ProcessGroup | None = None, *, checksum: bool
) -> tuple[GroupSender, Seed]:
    """The trainer's end, listening on ``host``; pairs are in ``group``, or in groups of their own.

    Raises:
        NotConnected: this machine has no such address.
        ValueError: no such backend.
    """
    if group is not None:
        door = NetListener(host)
        seed = Seed(door.endpoint, None, group.rank(), zlib.crc32(door.endpoint.token) >> 1)

        def pair(worker: int, generation: int, deadline: float | None) -> Callable[[], Pair]:
            return lambda: UsersPair(group, worker + (worker >= seed.rank), seed.tag_of(generation))

        return GroupSender(num_workers, door, pair, lambda: None, device_of(backend), checksum=checksum), seed
    place = MeetingPlace(host, backend)
    door = NetListener(host)
    sender = GroupSender(num_workers, door, place.pair, place.close, device_of(backend), checksum=checksum)
    return sender, Seed(door.endpoint, place.meeting)


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

    def pair(self, worker: int, generation: int, deadline: float | None) -> Callable[[], Pair]:
        assert self._seed is not None, "dial() comes first"
        if self._seed.meeting is not None:
            return self._seed.meeting.join(worker, generation, deadline)
        if self._group is None:
            raise NotConnected(f"worker {worker}: the sender was given a process group; give this end the same one")
        return partial(UsersPair, self._group, self._seed.rank, self._seed.tag_of(generation))
