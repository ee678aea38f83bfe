"""Flips a byte of an update after it was packed: at the last moment at which the trainer has it in hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from stage import VICTIM, Stage

from wsync.local.arena import Arena
from wsync.local.sender import LocalSender
from wsync.network.same_host import HostOutgoing
from wsync.network.sender import GroupSender


class _Switch:
    """The victim's switch: what it is pointed to is damaged first."""

    def __init__(self, switch: Any, arena: Arena) -> None:
        self._switch = switch
        self._arena = arena

    def publish(self, version: int, slot: int, *rest: Any) -> bool:
        flip(self._arena.views(slot)[0].view(torch.uint8))
        return self._switch.publish(version, slot, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._switch, name)


class _Pair:
    """The victim's pair: what it is sent is a damaged copy; or, from shared memory, damaged for all."""

    def __init__(self, pair: Any) -> None:
        self._pair = pair
        self._sent: list[torch.Tensor] = []  # until it has gone

    def send(self, flat: torch.Tensor, works: list[Any]) -> None:
        damaged = flip(flat if isinstance(self._pair, HostOutgoing) else flat.clone())
        self._sent.append(damaged)
        self._pair.send(damaged, works)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pair, name)


def flip(data: torch.Tensor) -> torch.Tensor:
    """One bit."""
    data[len(data) // 2] ^= 1
    return data


@contextmanager
def corrupt(stage: Stage) -> Iterator[None]:
    """What is sent to the victim meanwhile is damaged."""
    end: Any = stage.scheme.sender._end
    if isinstance(end, LocalSender):
        switches = end.arena.switches
        real: Any = switches[VICTIM]
        switches[VICTIM] = _Switch(real, end.arena)  # pyright: ignore[reportArgumentType]
        yield
        switches[VICTIM] = real
        return
    assert isinstance(end, GroupSender)
    lane = end._lanes[VICTIM]
    pair: Any = lane.pair
    damaged = _Pair(pair)
    lane.pair = damaged  # pyright: ignore[reportAttributeAccessIssue]
    yield
    lane.pair = pair
