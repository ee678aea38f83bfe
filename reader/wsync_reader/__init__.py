"""Receives the weights that a trainer sends with ``wsync``, as numpy arrays, without torch: see ``open``."""

import time

from wsync_reader.layout import LayoutMismatch, NotConnected, SyncTimeout, Weights, WeightSyncError
from wsync_reader.receiving import Reader, gate
from wsync_reader.session import SocketReader
from wsync_reader.store import StoreReader
from wsync_reader.wire import Address

__version__ = "0.1.0"  # that of wsync: a trainer and its readers are of one version
__all__ = ["LayoutMismatch", "NotConnected", "Reader", "SyncTimeout", "WeightSyncError", "Weights", "gate", "open"]


def open(where: str, *, model: str = "policy", worker: int = 0, key: str = "", timeout: float | None = 60.0) -> Reader:
    """Begin to receive a model's weights, and wait for a first version. The reader is a context manager, which closes.

    Args:
        where: a store, as the trainer's ``StoreWeightSyncScheme`` has it (a folder, ``"file:///runs/1"``,
            ``"https://…"``, ``"s3://…"``); or a trainer: ``"tcp://10.0.0.1:29400"``, the host as its scheme has it, or
            the text of its ``scheme.address``.
        model: the trainer's ``model_id``.
        worker: this worker's index, with a trainer: each reader is one of its ``num_workers``.
        key: with ``tcp://``, the secret; by default that in ``WSYNC_AUTHKEY``.
        timeout: seconds for all that; None for no limit.

    NotConnected: no trainer is there, or it has refused this reader. SyncTimeout: there was no version in time.
    LayoutMismatch: a dtype that numpy cannot have. WeightSyncError: the store is damaged, or cannot be read.
    ValueError: ``where`` or ``model`` is no such thing. ModuleNotFoundError: names what has to be installed.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    if where.startswith(("tcp://", "{")):
        return SocketReader(Address.of(where, key), model, worker).start(deadline)
    return StoreReader(where, model, worker).start(deadline)
