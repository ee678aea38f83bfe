"""Several models at once, on every worker or on none: prepared and checked everywhere, then committed.

What makes the parts arrive together in a worker is that each update names the versions of the others that it requires,
and that every later update does so, too (``wsync.control.session.choose``). So each connection brings the decision for
its own model, and a worker that joins later, or whose connection was lost in between, needs no rule of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from wsync.errors import WorkerError
from wsync.scheme import WeightSyncScheme
from wsync.sender import Prepared, Sender
from wsync.update import SyncReport
from wsync.workers import raise_causes


def synchronize(
    updates: Mapping[WeightSyncScheme, Any], worker_ids: int | Sequence[int] | None = None
) -> dict[str, SyncReport]:
    """Send an update of several models, all or nothing.

    Every worker first checks every model's new weights and keeps them beside the current ones. When all have confirmed,
    it is decided that all workers switch: no forward sees some models old and some new. If one refuses, all keep the
    versions that they have. After the decision the survivors switch, even if others die meanwhile.

    Args:
        updates: ``{scheme: weights}``, schemes that are connected; weights as for ``send``. A scheme that carries
            nothing (``NoWeightSyncScheme``) is left out.
        worker_ids: one, several, or (None) all workers.

    Returns:
        ``{model_id: report}``.

    Raises:
        ValueError: two schemes have one model_id; nothing was applied anywhere.
        LayoutMismatch: weights that do not fit; nothing was applied anywhere.
        WorkerDied, WorkerFailed, SyncTimeout: a worker could not prepare them, and nothing was applied anywhere; or, if
            the message says that it was committed, the other workers have all of them.
    """
    carried = {scheme: weights for scheme, weights in updates.items() if scheme.sends_weights}
    senders = {str(scheme.model_id): (scheme.sender, weights) for scheme, weights in carried.items()}
    if len(senders) < len(carried):
        raise ValueError(f"each scheme must have a model_id of its own, not {[s.model_id for s in carried]}")
    with ExitStack() as stack:  # another thread's send must not come between prepare and commit
        for sender in sorted((sender for sender, _ in senders.values()), key=id):  # one order, against deadlocks
            stack.enter_context(sender.exclusive())
        return _synchronize(senders, worker_ids)


def _synchronize(senders: Mapping[str, tuple[Sender, Any]], worker_ids: Any) -> dict[str, SyncReport]:
    parts: dict[str, tuple[Sender, Prepared]] = {}
    committed = False
    try:
        for model_id, (sender, weights) in senders.items():
            parts[model_id] = sender, sender.prepare(weights, worker_ids)
        requires = {sender.name: prepared.sent.version for sender, prepared in parts.values()}
        for sender, prepared in parts.values():
            sender.offer(prepared, requires)
        for model_id, (sender, prepared) in parts.items():
            raise_causes(sender.check(prepared), f"'{model_id}': the update was applied nowhere, because of a worker")
        committed = True  # the decision: nothing is waited for between the last answer and it
        for sender, prepared in parts.values():
            sender.announce_commit(prepared)
        for sender, prepared in parts.values():
            sender.commit(prepared)
    finally:
        if not committed:
            for sender, prepared in parts.values():
                sender.abort(prepared)
    reports: dict[str, SyncReport] = {}
    errors: list[WorkerError] = []
    for model_id, (sender, prepared) in parts.items():
        try:
            reports[model_id] = sender.finish(prepared)
        except WorkerError as error:
            errors.append(error)
    if errors:
        first = errors[0]
        message = f"it was committed, so the other workers have all of {sorted(parts)}: {first}"
        causes = {w: c for error in errors for w, c in error.workers.items()}
        raise type(first)(message, causes, first.version, [worker for error in errors for worker in error.failed])
    return reports
