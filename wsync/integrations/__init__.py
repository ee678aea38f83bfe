"""wsync inside other libraries, one module each, which imports its library: ``docs/integrations.md`` has examples."""

from __future__ import annotations

from collections.abc import Callable

import wsync
from wsync.errors import NotConnected, WorkerError

OnWorkerError = Callable[[WorkerError | NotConnected], object]


def send(scheme: wsync.WeightSyncScheme, on_worker_error: OnWorkerError | None) -> wsync.SyncReport | None:
    """Send; give ``on_worker_error`` what says that workers have died, failed or are late, or that none is left.

    If that is None, raise it.
    """
    try:
        return scheme.send()
    except (WorkerError, NotConnected) as error:
        if on_worker_error is None:
            raise
        on_worker_error(error)
        return None
