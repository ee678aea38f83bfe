"""Several models at once, on every worker or on none: staged and checked everywhere, then switched."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from wsync.errors import WorkerError
from wsync.scheme import WeightSyncScheme
from wsync.sending.in_flight import InFlight
from wsync.sending.sender import Sender
from wsync.types import SyncReport


def synchronize(
    updates: Mapping[WeightSyncScheme, Any], worker_ids: int | Sequence[int] | None = None
) -> dict[str, SyncReport]:
    """Send an update of several models, all or nothing.

    Every worker first checks every model's new weights and keeps them beside the live ones. When all have said yes,
    the decision reaches each worker as one word, for all its models: no forward sees some of them old and some new.
    If anybody says no, everybody goes on with the versions before. Once it is decided the survivors switch, whoever
    dies meanwhile.

    Args:
        updates: ``{scheme: weights}``, schemes that are connected; weights as for ``send``. One that carries nothing
            (``NoWeightSyncScheme``) is left out.
        worker_ids: one, several, or (None) all workers.

    Returns:
        ``{model_id: report}``.

    Raises:
        ValueError: two schemes have one model_id; nothing was applied anywhere.
        LayoutMismatch: weights that do not fit; nothing was applied anywhere.
        WorkerDied, WorkerFailed, SyncTimeout: somebody could not stage them, and nothing was applied anywhere; or, if
            the message says that it had been decided, the others have all of them.
    """
    transaction = secrets.randbits(63)
    carried = {scheme: weights for scheme, weights in updates.items() if scheme.carries}
    senders = {str(scheme.model_id): (scheme.sender, weights) for scheme, weights in carried.items()}
    if len(senders) < len(carried):
        raise ValueError(f"each scheme must have a model_id of its own, not {[s.model_id for s in carried]}")
    with ExitStack() as alone:  # another thread's send must not come between staging and decision
        for sender in sorted((sender for sender, _ in senders.values()), key=id):  # everybody in one order
            alone.enter_context(sender.alone())
        return _synchronize(senders, worker_ids, transaction)


def _synchronize(
    senders: Mapping[str, tuple[Sender, Any]], worker_ids: int | Sequence[int] | None, transaction: int
) -> dict[str, SyncReport]:
    """As ``synchronize``, by senders that nobody else uses meanwhile."""
    staged: dict[str, tuple[Sender, InFlight]] = {}
    try:
        for model_id, (sender, weights) in senders.items():
            staged[model_id] = (sender, sender.stage(weights, worker_ids, transaction))
    except BaseException:
        for sender, _ in senders.values():
            sender.drop(transaction)
        raise
    for sender, posted in staged.values():
        sender.decide(posted, transaction)
    reports: dict[str, SyncReport] = {}
    errors: list[WorkerError] = []
    for model_id, (sender, posted) in staged.items():
        try:
            reports[model_id] = sender.settle(posted)
        except WorkerError as error:
            errors.append(error)
    if errors:
        first = errors[0]
        message = f"it had been decided, so the other workers have all of {sorted(staged)}: {first}"
        causes = {w: c for error in errors for w, c in error.workers.items()}
        refused = [worker for error in errors for worker in error.refused]
        raise type(first)(message, causes, first.version, refused)
    return reports
