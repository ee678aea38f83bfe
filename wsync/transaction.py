"""Several models at once, on every worker or on none: prepared and checked everywhere, then committed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from wsync.errors import WorkerError
from wsync.scheme import WeightSyncScheme
from wsync.sending.transactions import Transaction
from wsync.types import LAST_VERSION, SyncReport


def synchronize(
    updates: Mapping[WeightSyncScheme, Any], worker_ids: int | Sequence[int] | None = None
) -> dict[str, SyncReport]:
    """Send an update of several models, all or nothing.

    Every worker first checks every model's new weights and keeps them beside the current ones. When all have confirmed,
    each worker gets one commit for all its models: no forward sees some of them old and some new. If one refuses, all
    keep the versions that they have. After the commit the survivors switch, even if others die meanwhile.

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
    number = LAST_VERSION + secrets.randbits(62)  # no version
    carried = {scheme: weights for scheme, weights in updates.items() if scheme.sends_weights}
    senders = {str(scheme.model_id): (scheme.sender, weights) for scheme, weights in carried.items()}
    if len(senders) < len(carried):
        raise ValueError(f"each scheme must have a model_id of its own, not {[s.model_id for s in carried]}")
    with ExitStack() as stack:  # another thread's send must not come between prepare and commit
        ordered = sorted((sender for sender, _ in senders.values()), key=id)  # one order, against deadlocks
        parts = {sender: stack.enter_context(sender.transaction(number)) for sender in ordered}
        return _synchronize({name: (parts[sender], weights) for name, (sender, weights) in senders.items()}, worker_ids)


def _for_all(parts: Sequence[Transaction], decide: Callable[[Transaction], None]) -> None:
    """Commit or abort all parts, also if a signal handler raises: by then some workers may have installed them all."""
    for index, part in enumerate(parts):
        try:
            decide(part)
        except BaseException:  # also Ctrl-C: all models or none
            try:
                decide(part)
            finally:
                _for_all(parts[index + 1 :], decide)
            raise


def _synchronize(
    parts: Mapping[str, tuple[Transaction, Any]], worker_ids: int | Sequence[int] | None
) -> dict[str, SyncReport]:
    name = ""
    try:
        for name, (part, weights) in parts.items():  # noqa: B007  the error names the model
            part.prepare(weights, worker_ids)
    except BaseException as error:
        _for_all([part for part, _ in parts.values()], Transaction.abort)
        if isinstance(error, WorkerError):
            message = f"'{name}': {error}"
            raise type(error)(message, error.workers, error.version, error.failed) from None
        raise
    _for_all([part for part, _ in parts.values()], Transaction.commit)
    reports: dict[str, SyncReport] = {}
    errors: list[WorkerError] = []
    for model_id, (part, _) in parts.items():
        try:
            reports[model_id] = part.finish()
        except WorkerError as error:
            errors.append(error)
    if errors:
        first = errors[0]
        message = f"it was committed, so the other workers have all of {sorted(parts)}: {first}"
        causes = {w: c for error in errors for w, c in error.workers.items()}
        failed = [worker for error in errors for worker in error.failed]
        raise type(first)(message, causes, first.version, failed)
    return reports
