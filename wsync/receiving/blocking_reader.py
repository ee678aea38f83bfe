"""A worker's updates from a ``TransportBackend``: calls of its ``receive_weights``."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import torch

from wsync.checksum import checksum_of
from wsync.deadlines import deadline_in, remaining
from wsync.loops.tensors import copy_all
from wsync.receiving.events import Failed
from wsync.receiving.transport_reader import TransportReader
from wsync.transport import TransportBackend
from wsync.transport_setup import close_transport
from wsync.types import Update
from wsync.weights.packing import Buffer
from wsync.weights.snapshot import Snapshot, snapshot
from wsync.weights.strategy import WeightStrategy

# Calls of receive_weights after UPDATE or PREPARE, while they return other versions. BEGIN_RECEIVE has one more.
_ATTEMPTS = 8


@dataclass(slots=True)
class _Arriving:
    """A version for which ``receive_weights`` was called.

    Attributes:
        filled: whether the buffer has what the last call returned.
        mismatched: whether a call has returned weights with another checksum.
        complete: whether the buffer has the checksum.
        error: the traceback of the last call; empty if it did not raise.
        deadline: by when it must have arrived.
    """

    buffer: Buffer
    checksum: int
    extra: bytes
    deadline: float | None
    filled: bool = False
    mismatched: bool = False
    complete: bool = False
    error: str = ""

    def check(self) -> None:
        """Set ``complete`` and ``mismatched``."""
        self.complete = checksum_of(self.buffer.flat, self.extra) == self.checksum
        self.mismatched |= not self.complete


class BlockingReader(TransportReader):
    """Receives a version's weights at its ``BEGIN_RECEIVE`` message, and uses them at its ``UPDATE`` or ``PREPARE``.

    ``receive_weights`` runs in the process's receiver thread: while it waits, messages for other models wait too.

    Args:
        transport: connected; owned by this object.
        strategy: the format in which the transport is given a buffer.
        binds, timeout: see ``TransportReader``.
    """

    def __init__(
        self, transport: TransportBackend, strategy: WeightStrategy, *, binds: bool, timeout: float | None
    ) -> None:
        super().__init__(torch.device("cpu"), binds=binds, timeout=timeout)
        self._transport = transport
        self._method = f"{type(transport).__name__}.receive_weights"  # as errors name it
        self._strategy = strategy
        self._arriving: dict[int, _Arriving] = {}  # by version; at most one
        # Weights that arrived for a version that was then aborted, and do not have its checksum. A transport that is a
        # stream may have delivered the next version already.
        self._filled: Buffer | None = None
        self._ended = False  # whether ``end_call`` was called

    def on_begin_receive(self, version: int, payload: bytes) -> None:
        """Process a ``BEGIN_RECEIVE`` message."""
        if version <= self._received or version in self._arriving:
            return
        for older in self._arriving.values():  # its UPDATE was never sent
            self._drop(older)
        checksum, extra = self._split(payload)
        filled, self._filled = self._filled, None
        arriving = _Arriving(
            filled or self._take_buffer(), checksum, extra, deadline_in(self._share(0.8)), filled=filled is not None
        )
        if arriving.filled:
            arriving.check()
        if not arriving.complete:
            self._call(arriving)
        self._arriving = {version: arriving}

    def on_decision(self, transaction: int, commit: bool) -> bool:
        """See ``TransportReader``. An ``ABORT`` may have a ``BEGIN_RECEIVE``'s version instead of a transaction."""
        super().on_decision(transaction, commit)
        arriving = self._arriving.pop(transaction, None)
        if arriving is None:
            return False
        self._drop(arriving)
        return True

    def _drop(self, arriving: _Arriving) -> None:
        """Free the buffer of a version that is not wanted any more, or keep it as ``_filled``."""
        if arriving.filled and not arriving.complete and self._filled is None:
            self._filled = arriving.buffer
        else:
            self._free(arriving.buffer.slot)

    def _share(self, fraction: float) -> float | None:
        """Return a part of the timeout. All calls together must end before the sender's own timeout."""
        return None if self._timeout is None else fraction * self._timeout

    def _call(self, arriving: _Arriving) -> bool:
        """Call ``receive_weights`` once; return whether it returned anything. Its error is kept."""
        layout, buffer = self._require_layout(), arriving.buffer
        own = self._strategy.extract_weights(dict(zip(layout.names, buffer.views, strict=True)))
        arriving.error, arriving.filled = "", False
        left, least = remaining(arriving.deadline), self._share(0.1)
        timeout = None if left is None or least is None else max(left, least)
        try:
            received = self._transport.receive_weights(timeout, weights=own, strategy=self._strategy)
            if received is None:
                return False
            if received is not own:  # its extra state is not used: that came with the announcement
                copy_all(buffer.views, layout.order(Snapshot(snapshot(received).tensors)))
        except Exception as error:  # of any class; the trainer raises it as WorkerFailed
            if self._ended:
                raise ConnectionError from error  # this worker shuts down: to the trainer, that is the reason
            arriving.error = f"{self._method} raised, or did not return weights:\n{traceback.format_exc()}"
            return False
        arriving.filled = True
        arriving.check()
        return True

    def _receive(self, version: int, payload: bytes) -> Update | Failed | None:
        """Return the version that is arriving; call ``receive_weights`` again while it returned another version."""
        arriving = self._arriving.pop(version, None)
        if arriving is None:
            return None
        for _ in range(_ATTEMPTS):
            if arriving.complete or not self._call(arriving):
                break
        buffer = arriving.buffer
        if arriving.complete:
            self._received = version
            return Update(version, buffer.views, arriving.extra, buffer.slot)
        self._free(buffer.slot)
        reason = f"did not arrive: {self._method} returned " + ("" if arriving.filled else "None")
        if arriving.mismatched:
            earlier = "" if arriving.filled else ", and before that "
            reason += f"{earlier}weights with another checksum: they are corrupt, or of another version"
        return Failed(version, arriving.error or f"version {version} {reason}")

    def end_call(self) -> None:
        """Close the transport, so that ``receive_weights`` ends in the receiver thread. Called at shutdown."""
        self._ended = True
        close_transport(self._transport)

    def close(self) -> None:
        """See ``TransportReader``."""
        close_transport(self._transport)
        super().close()
