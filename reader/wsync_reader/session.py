"""Joins a trainer as one of its workers, by a socket, whatever carries weights to its other workers.

    trainer   Offer, weights ──→ reader: checked → staged → State (received, ready, installed) ──→ trainer

The trainer knows what the reader has, names it if it dies, and counts it in all that ``send`` promises. If the
connection is lost, the reader keeps its version and joins again; the trainer then gives it the newest one.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np

from wsync_reader.layout import Layout, NotConnected, SyncTimeout, Weights, checksum_of
from wsync_reader.receiving import Reader, Stopped, lock
from wsync_reader.wire import Address, Link


class SocketReader(Reader):
    """A worker of the trainer at an address."""

    def __init__(self, address: Address, model: str, worker: int) -> None:
        super().__init__(f"worker {worker}: the trainer at {address}", worker)
        self._address, self._model = address, model
        self._waker = -1  # an eventfd, while there is a connection

    def wake(self) -> None:
        if self._waker >= 0:
            os.eventfd_write(self._waker, 1)

    def follow(self, deadline: float | None) -> None:
        with lock:
            self._waker = waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            with self._address.connect(deadline) as sock:
                session = _Session(self, Link(sock, waker, deadline, lambda: session.attend(waker)))
                session.begin(self._model, self._address)
                session.run()
        except OSError as error:
            if isinstance(error, TimeoutError) and not self.version:
                raise SyncTimeout(f"{self.where} did not answer in time: has connect() been called there?") from error
            text = f"{self.where} has ended, cannot be reached, or was given another key ({error})"
            raise NotConnected(text) from error
        finally:
            with lock:
                self._waker = -1
                os.close(waker)


class _Session:
    """One connection, from the handshake to its end."""

    def __init__(self, owner: SocketReader, link: Link) -> None:
        self._owner, self._link = owner, link
        self._begun = False
        self._layout: Layout | None = None
        self._prepared: dict[int, Weights] = {}  # undecided ones
        self._received = 0  # the newest version that is here
        self._base: tuple[int, np.ndarray] | None = None  # to which a difference may come
        self._newest = self._fetched = 0  # the newest version that there is, and that was asked for
        self._said = (0, 0)

    def begin(self, model: str, address: Address) -> None:
        """Join; LayoutMismatch: the weights cannot be numpy arrays."""
        self._link.greet(model, self._owner.worker, address)
        self._settings = settings = self._link.receive()
        if settings.differences:
            import zstandard  # noqa: F401  now, rather than with the first difference
        self._use(settings.layout)
        self._owner.begin(settings.sender, ready=not settings.first)
        self._link.deadline, self._begun = None, True

    def _use(self, encoded: bytes) -> None:
        try:
            self._layout = Layout.decode(encoded) if encoded else None
        except ValueError as error:
            self._link.send("Fits", error=f"{type(error).__name__}: {error}")
            raise
        self._link.send("Fits")

    def attend(self, waker: int) -> None:
        """The reader has installed something, is waited for, or is closed: tell the trainer."""
        os.eventfd_read(waker)
        if self._begun:
            self._report()
        if self._owner.stop.is_set():
            if self._begun:
                self._link.send("Goodbye")
            raise Stopped

    def _report(self) -> None:
        has, settings = self._owner.has, self._settings
        if self._said != (said := (max(has, self._received), has)):
            self._said = said
            self._link.send("State", received=said[0], ready=has, installed=has)
        wanted = settings.on_request and (self._owner.wanted or has < settings.first)
        if wanted and self._newest > max(has, self._fetched):
            self._fetched = self._newest
            self._link.send("Fetch", number=self._newest)

    def run(self) -> None:
        """Read and answer until the trainer shuts down."""
        while True:
            self._report()
            message = self._link.receive()
            match message.type:
                case "Offer" if not message.medium and message.slot < 0 and self._layout is not None:
                    self._take(message, self._layout)
                case "Decide":
                    prepared = self._prepared.pop(message.version, None)
                    if message.commit and prepared is not None:
                        self._owner.stage(prepared)
                case "Newest":
                    self._newest = max(self._newest, message.version)
                case "NewLayout":
                    self._use(message.layout)
                case "Verify":
                    error = self._differing(message.digests)
                    self._link.send("Fits", error=error, verify=message.number, used=self._owner.used)
                case "Goodbye":
                    return
                case _:
                    raise ConnectionError(f"a reader cannot take this {message.type}: is the trainer of its version?")

    def _take(self, offer: SimpleNamespace, layout: Layout) -> None:
        """Read a version, check it and stage it; or tell the trainer why not."""
        if offer.size > layout.nbytes or (offer.size < layout.nbytes and not offer.base):
            raise ConnectionError(f"an update of {offer.size} bytes, and the layout has {layout.nbytes}")
        flat = np.empty(offer.size, np.uint8)
        self._link.read_into(flat.data)
        base, self._base = self._base, None
        try:
            if offer.base:
                if base is None or base[0] != offer.base:
                    raise ValueError(f"a difference to version {offer.base}, which is not here")
                flat = _with_difference(base[1], flat)
            if offer.checksum and checksum_of(flat, offer.extra) != offer.checksum:  # `extra` is a pickle: not read
                raise ValueError(f"version {offer.version} arrived corrupt: its checksum differs")
        except ValueError as error:
            self._link.send("Refused", version=offer.version, error=f"ValueError: {error}", last=not offer.undecided)
            return
        if self._settings.differences:
            self._base = offer.version, flat
        weights = Weights(layout, flat, offer.version, self._owner.sender, offer.requires)
        self._received = offer.version
        if offer.undecided:
            self._prepared[offer.version] = weights
        else:
            self._owner.stage(weights)

    def _differing(self, digests: dict[str, int]) -> str:
        """Return why these are not the digests of what is installed; empty if they are."""
        weights: Any = self._owner.newest
        wrong = [f"'{name}'" for name, one in digests.items() if name not in weights or weights.digest(name) != one]
        shown = "; ".join(wrong[:8]) + f"; and {len(wrong) - 8} more" * (len(wrong) > 8)
        has = f"LayoutMismatch: it has version {self._owner.version}, with other values, or none, of {shown}"
        return has if wrong else ""


def _with_difference(base: np.ndarray, payload: np.ndarray) -> np.ndarray:
    """Return the version that ``payload`` (``wsync.transforms``) is away from ``base``; ValueError: it is malformed."""
    import zstandard

    planes = np.empty(len(base), np.uint8)
    width, frame = int(payload[0]), payload[1:].data
    try:
        if width not in (1, 2, 4, 8) or zstandard.frame_content_size(frame) != len(base):
            raise ValueError(f"the difference is not one of {len(base)} bytes")
        with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
            if reader.readinto(planes.data) != len(base):
                raise ValueError("the difference is malformed: it ends too early")
    except zstandard.ZstdError as error:
        raise ValueError(f"the difference is malformed: {error}") from error
    changed = np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1)
    return (base.view(np.uint64) ^ changed.view(np.uint64)).view(np.uint8)
