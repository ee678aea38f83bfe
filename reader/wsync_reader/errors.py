"""The exceptions, by the names that they have in ``wsync``."""

from __future__ import annotations


class WeightSyncError(RuntimeError):
    """Base of everything that can go wrong on the way from a trainer to a reader."""


class NotConnected(WeightSyncError):
    """There is no version yet; or the trainer has ended, cannot be reached, or has refused this reader."""


class LayoutMismatch(WeightSyncError, ValueError):
    """Weights cannot be numpy arrays, or do not fit the model of an adapter; nothing was changed."""


class SyncTimeout(WeightSyncError, TimeoutError):
    """The deadline passed before the trainer answered, or before there was a version."""
