"""Where weights arrive in a worker: buffers, and transfers into them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wsync.errors import NotConnected
from wsync.network.group import finish, patience
from wsync.network.pair import Incoming, Work
from wsync.types import Update
from wsync.weights.layout import Layout
from wsync.wire.checksum import CHECKSUM, damage
from wsync.wire.plan import Plan


@dataclass(slots=True)
class Berth:
    """A buffer.

    Attributes:
        flat: all of it, ``uint8[nbytes]``.
        views: one tensor per entry of the layout.
        used: whether something is in it, or on its way.
    """

    flat: Tensor
    views: Sequence[Tensor]
    used: bool = False

    @property
    def content(self) -> Any:
        """Its bytes, to be read in the main memory; None on a GPU. PyTorch moves them if the model is shared."""
        return self.flat.numpy() if self.flat.is_cpu else None


class Landing:
    """A worker's line of tensors, and the buffers that they come into.

    The transfer of the next version is begun before it is announced, into a buffer that nobody uses; so weights arrive
    without a round trip.

    Args:
        device: where weights arrive.
        timeout: seconds that a transfer which was announced may take; None for no limit.
        ahead: begin a transfer before it is announced.
    """

    def __init__(self, device: torch.device, timeout: float | None, *, ahead: bool) -> None:
        self._device = device
        self._patience = patience(timeout)
        self._ahead = ahead
        self.layout: Layout | None = None
        self.checksum = False
        self.taken = 0  # the newest version that was announced, and has arrived
        self.berths: list[Berth] = []
        self._pair: Incoming | None = None
        self._incoming: tuple[int, list[Work]] | None = None  # the transfer, once it has begun; nobody took it
        self._here = 0, -1  # the version that was fetched last, and the buffer that it is in
        self._lock = threading.Lock()  # the acting thread installs, too
        self._fetching = threading.Lock()  # and may come first

    def join(self, pair: Incoming) -> None:
        """From here on ``pair`` is the line: nothing more comes by the one before, and what has come may come again."""
        with self._lock:
            if self._incoming is not None:
                self.berths[self._incoming[0]].used = False
            if self._pair is not None:
                self._pair.close()
            self._incoming, self._here, self._pair, self.taken = None, (0, -1), pair, 0

    def prepare(self, plan: Plan) -> None:
        """What will come, and whether with a checksum."""
        if plan.layout is not None:
            far = self._pair is not None and not self._pair.in_memory
            self.layout, self.checksum = plan.layout, far if plan.checksum is None else plan.checksum
            self.expect()

    def expect(self) -> None:
        """Begin the next transfer, if that is done before it is announced.

        Raises:
            RuntimeError: the line of tensors has broken.
        """
        if self._ahead and self.layout is not None:
            self._begin()

    def _begin(self) -> None:
        """Begin a transfer; harmless when repeated, also where a signal has struck."""
        with self._lock:
            if self._pair is None:
                return
            if self._incoming is None:
                index = self._free_berth()
                self.berths[index].used, self._incoming = True, (index, [])
            index, works = self._incoming
            if not works:
                self._pair.receive(self.berths[index].flat, works)

    def _free_berth(self) -> int:
        if self.layout is None:
            raise NotConnected("weights were announced before their layout")
        for index, berth in enumerate(self.berths):
            if not berth.used:
                return index
        flat = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=self._device)
        self.berths.append(Berth(flat, self.layout.views(flat)))
        return len(self.berths) - 1

    def pointed(self) -> bool:
        """Whether something may have been announced that nobody ``took``: see ``Incoming``."""
        return self._pair is not None and (self._here[0] > self.taken or self._pair.pointed())

    def fetch(self, version: int) -> int:
        """What was announced, when it has arrived: which buffer it is in; -1 if that was announced, and taken, before.

        It can be fetched once more, until it is ``took``: a signal may strike whoever does so.

        Raises:
            NotConnected: nobody knows what it is.
            RuntimeError: the line of tensors has broken.
        """
        with self._fetching:
            if version <= self.taken:
                return -1
            if self._here[0] != version:
                self._begin()
                assert self._incoming is not None, "begun just now"
                index, works = self._incoming
                finish(works[0], self._patience, self._device)
                self._here = version, index  # from here on a model may be bound to it
            return self._here[1]

    def took(self, version: int) -> None:
        """What was fetched is somebody's; the next transfer goes elsewhere. Harmless when repeated."""
        if version > self.taken:
            self._incoming, self.taken = None, version

    def take(self, version: int) -> int:
        """Both at once."""
        index = self.fetch(version)
        if index >= 0:
            self.took(version)
        return index

    def read(self, index: int, version: int, said: bytes) -> Update:
        """The version that has arrived in a buffer; ``said`` is its checksum, if there is one, and the extra state.

        Raises:
            ValueError: there is no checksum where one was promised.
        """
        berth = self.berths[index]
        if not self.checksum:
            return Update(version, berth.views, said, index)
        if len(said) < CHECKSUM.size:
            raise ValueError(f"{len(said)} bytes where {CHECKSUM.size} of a checksum were expected")
        (checksum,), extra = CHECKSUM.unpack_from(said), said[CHECKSUM.size :]
        return Update(version, berth.views, extra, index, damage=damage(version, berth.flat, extra, checksum))

    def free(self, index: int) -> None:
        """A buffer is used no more."""
        if index >= 0:
            with self._lock:
                self.berths[index].used = False

    def close(self) -> None:
        """Let transfers, line and memory go."""
        with self._lock:
            if self._pair is not None:
                self._pair.close()
            self._incoming = self._pair = self.layout = None
            self.berths.clear()
