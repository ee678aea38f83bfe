"""The updates that are prepared in this process, by transaction. All functions are called inside the gate."""

from __future__ import annotations

import os
from typing import Protocol

from wsync.types import Update


class UpdateReceiver(Protocol):
    """A ``Receiver``, as a commit needs it."""

    def install(self, update: Update) -> None:
        """Install a committed update in the model. Called inside the gate."""
        ...


updates_by_transaction: dict[int, list[tuple[UpdateReceiver, Update]]] = {}
os.register_at_fork(after_in_child=updates_by_transaction.clear)


def keep(transaction: int, receiver: UpdateReceiver, update: Update) -> None:
    """Keep an update until its transaction is committed or aborted."""
    updates_by_transaction.setdefault(transaction, []).append((receiver, update))


def decide(transaction: int, commit: bool) -> None:
    """Install all updates of a transaction (``commit``), or drop them."""
    for receiver, update in updates_by_transaction.pop(transaction, []):
        if commit:
            receiver.install(update)


def commit_if_prepared(receiver: UpdateReceiver, version: int) -> bool:
    """Commit the transaction in which ``version`` of ``receiver`` is prepared, if there is one.

    Returns:
        True if it has been committed: the updates of all its receivers are installed. False if there is none.
    """
    for transaction, updates in updates_by_transaction.items():
        if any(one is receiver and update.version == version for one, update in updates):
            decide(transaction, commit=True)
            return True
    return False


def forget(receiver: UpdateReceiver) -> None:
    """Drop all updates of a receiver that is closed."""
    for transaction, updates in list(updates_by_transaction.items()):
        updates[:] = [(one, update) for one, update in updates if one is not receiver]
        if not updates:
            del updates_by_transaction[transaction]
