"""Several models at once, on every worker or on none: prepared and checked everywhere, then committed.

What makes the parts arrive together in a worker is that each update names the versions of the others that it requires,
and that every later update does so, too (``wsync.control.session.choose``). So each connection brings the decision for
its own model, and a worker that joins later, or whose connection was lost in between, needs no rule of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

from wsync.errors import WorkerError
from wsync.scheme import WeightSyncScheme
from wsync.update import SyncReport
from wsync.workers import raise_causes


def synchronize(
    updates: Mapping[WeightSyncScheme, Any], worker_ids: int | Sequence[int] | None = None
) -> dict[str, SyncReport]:
    """Send an update of several models, all or nothing.

    Every worker first checks every model's new weights and keeps them beside the current ones. When all have confirmed,
    it is decided that all workers switch: no forward sees some models old and some new. If one refuses, all keep the
    versions that they have. After the decision the survivors switch, even if others die meanwhile.
    Inference engines switch each at its own moment: ``docs/engines.md``.

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
    senders = {str(scheme.model_id): scheme.sender for scheme in carried}
    if len(senders) < len(carried):
        raise ValueError(f"each scheme must have a model_id of its own, not {[s.model_id for s in carried]}")
    requires: dict[str, int] = {}  # by sender, the version that is its part
    reports: dict[str, Any] = {}
    errors: dict[str, WorkerError] = {}  # by model
    with ExitStack() as stack:
        for sender in sorted(senders.values(), key=id):  # one order, against deadlocks
            stack.enter_context(sender.exclusive())  # another thread's send must not come between
        parts = {
            model_id: stack.enter_context(closing(sender.take_part(weights, worker_ids, requires)))
            for (model_id, sender), weights in zip(senders.items(), carried.values(), strict=True)
        }
        for part in parts.values():
            next(part)  # it is packed
        for part in parts.values():
            next(part)  # it is on its way
        for model_id, part in parts.items():  # its workers have checked it
            raise_causes(next(part), f"'{model_id}': the update was applied nowhere, because of what happened")
        for part in parts.values():  # the decision: nothing is waited for between the last answer and it
            next(part)
        for part in parts.values():
            next(part)  # it is committed
        for model_id, part in parts.items():
            try:
                reports[model_id] = next(part)
            except WorkerError as error:
                errors[model_id] = error
    if errors:
        first, others = next(iter(errors.values())), f"the other workers have all of {sorted(parts)}"
        message = "\n".join(
            [f"it was committed, so {others}", *(f"'{name}': {error}" for name, error in errors.items())]
        )
        causes = {w: c for error in errors.values() for w, c in error.workers.items()}
        raise type(first)(message, causes, first.version, [w for error in errors.values() for w in error.failed])
    return reports
