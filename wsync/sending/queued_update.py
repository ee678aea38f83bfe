"""An update on its way to workers, in the arena or by their transports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from wsync.checksum import CHECKSUM, checksum_of
from wsync.control.messages import TRANSACTION, Kind
from wsync.errors import WeightSyncError
from wsync.weights.packing import Buffer

_MAX_EXTRA = 1000 << 20  # bytes of extra state, or of a difference, in one message


@dataclass(slots=True, eq=False)
class QueuedUpdate:
    """A version to be sent.

    Attributes:
        kind: ``UPDATE``, or ``PREPARE`` in a transaction.
        buffer: the packed weights; unchanged while the update is queued or being sent.
        extra: the modules' extra state.
        transaction: its number, for ``PREPARE``.
        checksum: empty until it is computed.
        formatted: the weights in the strategy's format, once a ``TransportBackend`` was given them.
        carried: how many bytes of weights a worker was sent for it, the largest number of all workers.
        with_weights: the payload of ``UPDATE_WITH_WEIGHTS``; empty until it is needed.
        differences: to older versions, as far as they were needed; None where one would not be smaller. By version and
            slot: workers may have different weights of one version.
    """

    kind: Kind
    version: int
    buffer: Buffer
    extra: bytes = b""
    transaction: int = 0
    checksum: bytes = b""
    formatted: Any = None
    carried: int = 0
    with_weights: bytes = b""
    differences: dict[tuple[int, int], bytes | None] = field(default_factory=dict)

    @property
    def transaction_prefix(self) -> bytes:
        """The beginning of a ``PREPARE`` payload: the transaction; empty outside a transaction."""
        return TRANSACTION.pack(self.transaction) if self.kind is Kind.PREPARE else b""

    def payload(self, *, checked: bool) -> bytes:
        """Return the rest of the payload: the checksum if ``checked``, and the extra state."""
        if checked and not self.checksum:
            self.checksum = CHECKSUM.pack(checksum_of(self.buffer.flat, self.extra))
        return (self.checksum if checked else b"") + self.extra

    def payload_with_weights(self, *, checked: bool) -> bytes:
        """Return ``payload`` followed by the packed weights; made once for all workers."""
        if not self.with_weights:
            self.with_weights = b"".join([self.payload(checked=checked), self.buffer.flat.numpy().data])
        return self.with_weights

    def difference_to(self, base: QueuedUpdate | None, make: MakeDifference | None) -> bytes | None:
        """Return what is sent in place of this update to a worker that has ``base``; None: the full weights."""
        if make is None or base is None:
            return None
        known, key = self.differences, (base.version, base.buffer.slot)
        if key not in known:
            found = make(base, self)
            known[key] = found if found is not None and len(found) <= _MAX_EXTRA else None
        return known[key]


MakeDifference = Callable[[QueuedUpdate, QueuedUpdate], bytes | None]
"""``(base, update) -> difference``: see ``Delta.difference``."""


def check_extra(extra: bytes) -> None:
    """Check that extra state fits into one message.

    Raises:
        WeightSyncError: it does not.
    """
    if len(extra) > _MAX_EXTRA:
        raise WeightSyncError(
            f"the modules' extra state has {len(extra) / 2**20:.0f} MiB; a message carries up to "
            f"{_MAX_EXTRA / 2**20:.0f}: register large values as buffers"
        )
