"""The number of workers, on which all arguments of ``init_on_sender`` agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from wsync.sending.source import per_worker


def agreed_count(
    num_workers: int | None,
    devices: Sequence[Any] | None,
    params_map: Mapping[int, Any] | None,
    workers: Sequence[Any],
    options: Mapping[str, int],
) -> int:
    """Return the number of workers on which all given arguments agree; 1 if none names it.

    Args:
        num_workers: the number itself.
        devices: one for each worker.
        params_map: weights for each worker, by index.
        workers: the workers of the context.
        options: the options of the scheme, those that have one entry for each worker: their names and lengths.

    Raises:
        TypeError: one is no number, or no list.
        ValueError: they contradict one another.
    """
    if num_workers is not None and not isinstance(num_workers, Integral):
        raise TypeError(f"num_workers is a whole number, not {num_workers!r}")
    if devices is not None and (isinstance(devices, str) or not isinstance(devices, Sequence)):
        raise TypeError(f"devices is a list, one for each worker, not {devices!r}")
    counts = {
        "num_workers": num_workers,
        "devices": None if devices is None else len(devices),
        "params_map": None if params_map is None else len(params_map),
        "the context's workers": len(workers) or None,
        **options,
    }
    count = single_count(counts)
    count = 1 if count is None else count
    if count < 1:
        raise ValueError(f"num_workers is at least 1, not {count}")
    indices = sorted(worker.worker_idx for worker in workers)
    if indices and indices != list(range(count)):
        raise ValueError(f"the context's workers have the indices 0 to {count - 1}, not {indices}")
    if params_map is not None and set(per_worker(params_map) or ()) != set(range(count)):
        raise ValueError(
            f"params_map is {{worker_idx: weights}} for workers 0 to {count - 1}, not for {list(params_map)}"
        )
    return int(count)


def single_count(counts: Mapping[str, int | None]) -> int | None:
    """Return the number on which all of ``counts``, by the name of the argument, agree; None if all are None.

    Raises:
        ValueError: they contradict one another.
    """
    given = {name: count for name, count in counts.items() if count is not None}
    if len(set(given.values())) > 1:
        raise ValueError("how many workers? " + ", ".join(f"{name}: {count}" for name, count in given.items()))
    return next(iter(given.values()), None)
