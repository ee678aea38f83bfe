"""Joins a trainer as one of its workers, by a socket, whatever carries weights to its other workers."""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np

from wsync_reader.layout import Layout, NotConnected, SyncTimeout, Weights, checksum_of, require, with_difference
from wsync_reader.receiving import Reader, lock
from wsync_reader.wire import Address, Link


class SocketReader(Reader):
    """A worker of the trainer at an address."""

    def __init__(self, address: Address, model: str, worker: int) -> None:
        super().__init__(f"worker {worker}: the trainer at {address}", worker)
        self._address, self._model, self._waker = address, model, -1  # an eventfd, while there is a connection

    def wake(self) -> None:
        if self._waker >= 0:
            os.eventfd_write(self._waker, 1)

    def follow(self, deadline: float | None) -> None:
        with lock:
            self._waker = waker = os.eventfd(1, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # 1: look first
        try:
            with self._address.connect(deadline) as sock:
                session = _Session(self, Link(sock, waker, deadline, lambda: session.attend(waker)))
                session.run(self._model, self._address)
        except OSError as error:
            if isinstance(error, TimeoutError) and not self.version:
                raise SyncTimeout(f"{self.where} did not answer in time: has connect() been called there?") from error
            raise NotConnected(f"{self.where} has ended, is not reached, or has another key ({error})") from error
        finally:
            with lock:
                self._waker = -1
                os.close(waker)


class _Session:
    """One connection, from the handshake to its end."""

    _settings: SimpleNamespace | None = None  # of the trainer, once it has accepted this worker
    _layout: Layout | None = None
    _base: tuple[int, np.ndarray] | None = None  # the version to which a difference may come
    _received = _newest = _fetched = 0  # the newest version that is here, that there is, and that was asked for
    _said = (0, 0)

    def __init__(self, owner: SocketReader, link: Link) -> None:
        self._owner, self._link, self._prepared = owner, link, dict[int, Weights]()  # undecided ones, by version

    def _use(self, encoded: bytes) -> None:
        try:
            self._layout = Layout.decode(encoded) if encoded else None
        except ValueError as error:
            self._link.send("Fits", error=f"{type(error).__name__}: {error}")
            raise
        self._link.send("Fits")

    def attend(self, waker: int) -> None:
        """Look why the reader was woken; ConnectionError: it is closed, and the trainer was told so."""
        os.eventfd_read(waker)
        if self._settings is not None:
            self._report(self._settings)
        if self._owner.stop.is_set():
            if self._settings is not None:
                self._link.send("Goodbye")
            raise ConnectionError("this end was shut down")

    def _report(self, settings: SimpleNamespace) -> None:
        """Tell the trainer what has changed, or ask for what is waited for."""
        has = self._owner.has
        if self._said != (said := (max(has, self._received), has)):
            self._said = said
            self._link.send("State", received=said[0], ready=has, installed=has)
        wanted = settings.on_request and (self._owner.wanted or has < settings.first)
        if wanted and self._newest > max(has, self._fetched):
            self._fetched = self._newest
            self._link.send("Fetch", number=self._newest)

    def run(self, model: str, address: Address) -> None:
        """Join, then read and answer until the trainer shuts down; LayoutMismatch: weights cannot be numpy arrays."""
        self._link.greet(model, self._owner.worker, address)
        settings = self._link.receive()
        if settings.differences:
            require("zstandard", "delta")  # now, rather than with the first difference
        self._use(settings.layout)
        self._owner.begin(settings.sender, ready=not settings.first)
        self._link.deadline, self._settings = None, settings
        while True:
            self._report(settings)
            message = self._link.receive()
            match message.type:
                case "Offer" if not message.medium and message.slot < 0 and self._layout is not None:
                    self._take(message, self._layout, keep=settings.differences)
                case "Decide":
                    if (prepared := self._prepared.pop(message.version, None)) is not None and message.commit:
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

    def _take(self, offer: SimpleNamespace, layout: Layout, *, keep: bool) -> None:
        """Read a version, check it, stage it; or tell the trainer why not. ``keep`` it, for a difference to it."""
        if offer.size > layout.nbytes or (offer.size < layout.nbytes and not offer.base):
            raise ConnectionError(f"an update of {offer.size} bytes, and the layout has {layout.nbytes}")
        flat = np.empty(offer.size, np.uint8)
        self._link.read_into(flat.data)
        base, self._base = self._base, None
        try:
            if offer.base:
                if base is None or base[0] != offer.base:
                    raise ValueError(f"a difference to version {offer.base}, which is not here")
                flat = with_difference(base[1], flat)
            if offer.checksum and checksum_of(flat, offer.extra) != offer.checksum:  # `extra` is a pickle: not read
                raise ValueError(f"version {offer.version} arrived corrupt: its checksum differs")
        except ValueError as error:
            self._link.send("Refused", version=offer.version, error=f"ValueError: {error}", last=not offer.undecided)
            return
        self._base = (offer.version, flat) if keep else None
        weights = Weights(layout, flat, offer.version, self._owner.sender, offer.requires)
        self._received = offer.version
        if offer.undecided:
            self._prepared[offer.version] = weights
        else:
            self._owner.stage(weights)

    def _differing(self, digests: dict[str, int]) -> str:
        """Return why these are not the digests of what is installed; empty if they are."""
        own: Any = self._owner.newest or {}
        wrong = [f"'{name}'" for name, one in digests.items() if name not in own or own.digest(name) != one]
        has = f"LayoutMismatch: it has version {self._owner.version}, with other values, or none, of "
        return has + "; ".join(wrong[:8]) if wrong else ""
