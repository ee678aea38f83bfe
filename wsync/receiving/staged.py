"""What is staged in this process, by transaction. Only the holder of the gate touches it."""

from __future__ import annotations

import os
from typing import Protocol

from wsync.types import Update


class Taker(Protocol):
    """Whom a staged update is for."""

    def install(self, update: Update) -> None:
        """Switch to it."""
        ...


staged: dict[int, list[tuple[Taker, Update]]] = {}
os.register_at_fork(after_in_child=staged.clear)


def keep(transaction: int, taker: Taker, update: Update) -> None:
    """Keep an update ready until its transaction is decided."""
    staged.setdefault(transaction, []).append((taker, update))


def decide(transaction: int, install: bool) -> None:
    """Install all of a transaction, or none of it."""
    for taker, update in staged.pop(transaction, []):
        if install:
            taker.install(update)


def decide_by(taker: Taker, version: int) -> bool:
    """``version`` is decided on: install all of its transaction, if it is staged."""
    for transaction, updates in staged.items():
        if any(one is taker and update.version == version for one, update in updates):
            decide(transaction, install=True)
            return True
    return False


def forget(taker: Taker) -> None:
    """Nobody decides for a model that is its owner's again."""
    for transaction, updates in list(staged.items()):
        updates[:] = [(one, update) for one, update in updates if one is not taker]
        if not updates:
            del staged[transaction]
