"""The updates that are prepared in this process, by transaction. All functions are called inside the gate."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from wsync.types import ANY_VERSION, Update

if TYPE_CHECKING:
    from wsync.receiving.updating import ModelUpdater

updates_by_transaction: dict[int, list[tuple[ModelUpdater, Update]]] = {}
os.register_at_fork(after_in_child=updates_by_transaction.clear)


def keep(transaction: int, updater: ModelUpdater, update: Update) -> None:
    """Keep an update until its transaction is committed or aborted."""
    updates_by_transaction.setdefault(transaction, []).append((updater, update))


def decide(transaction: int, commit: bool) -> None:
    """Install all updates of a transaction (``commit``), or drop them."""
    updates = updates_by_transaction.get(transaction, [])
    while updates:
        updater, update = updates[0]
        if commit and update.version > updater.version:
            updater.install(update)
        del updates[0]  # after the install, in which a signal handler may raise: the next call goes on
    updates_by_transaction.pop(transaction, None)


def commit_if_prepared(updater: ModelUpdater, version: int) -> bool:
    """Commit the transaction in which ``version`` of ``updater`` is prepared, if there is one.

    Otherwise drop the updates of ``updater`` with older versions: the sender has committed them, and has published
    ``version`` before this process has seen the commit.

    Returns:
        True if it has been committed: the updates of all its models are installed. False if there is none.
    """
    for transaction, updates in updates_by_transaction.items():
        if any(one is updater and update.version == version for one, update in updates):
            decide(transaction, commit=True)
            return True
    drop(updater, version)
    return False


def drop(updater: ModelUpdater, before: int = ANY_VERSION) -> None:
    """Drop the updates of an updater that are older than version ``before``; by default all."""
    for transaction, updates in list(updates_by_transaction.items()):
        updates[:] = [(one, update) for one, update in updates if one is not updater or update.version >= before]
        if not updates:
            del updates_by_transaction[transaction]
