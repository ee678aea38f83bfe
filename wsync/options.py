"""The options that every scheme has, and the arguments that say how many workers there are."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, Literal, TypedDict

from wsync.transforms.chain import Transform
from wsync.weights.source import per_worker

__all__ = ["SchemeOptions"]


class SchemeOptions(TypedDict, total=False):
    """What a scheme's ``__init__`` hands on to ``WeightSyncScheme``: ``**options: Unpack[SchemeOptions]``."""

    timeout: float | None
    bind: bool
    send_transform: Transform | Sequence[Transform] | None
    receive_transform: Transform | Sequence[Transform] | None
    initiator: Literal["sender", "receiver"]
    max_staleness: int | None


def full_signature(scheme: type) -> inspect.Signature:
    """Return the signature of ``scheme``, which ``help`` shows, and from which configs are made.

    ``**options: Unpack[SchemeOptions]`` stands for those, any other ``**options`` for all arguments of the next class.
    """
    classes = [one for one in scheme.__mro__ if "__init__" in vars(one)]
    own = list(inspect.signature(classes[0].__init__).parameters.values())[1:]
    if not own or own[-1].kind is not inspect.Parameter.VAR_KEYWORD:
        return inspect.Signature(own)
    options, known = own.pop(), {parameter.name for parameter in own}
    for name, parameter in full_signature(classes[1]).parameters.items():
        handed_on = "SchemeOptions" not in str(options.annotation) or name in SchemeOptions.__annotations__
        if handed_on and name not in known:
            own.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    return inspect.Signature(own)


def agreed_count(
    num_workers: int | None,
    devices: Sequence[Any] | None,
    params_map: Mapping[int, Any] | None,
    workers: Sequence[Any],
    options: Mapping[str, int],
) -> int:
    """Return the number of workers on which the arguments of ``init_on_sender`` agree; 1 if none says it.

    ``workers`` are the context's; ``options`` are further numbers, by name. TypeError, ValueError: they are wrong.
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
    given = {name: int(count) for name, count in counts.items() if count is not None}
    if len(set(given.values())) > 1:
        raise ValueError("how many workers? " + ", ".join(f"{name}: {count}" for name, count in given.items()))
    count = next(iter(given.values()), 1)
    if count < 1:
        raise ValueError(f"num_workers is at least 1, not {count}")
    everyone = list(range(count))
    indices = sorted(worker.worker_idx for worker in workers)
    if indices and indices != everyone:
        raise ValueError(f"the context's workers have the indices 0 to {count - 1}, not {indices}")
    if params_map is not None and sorted(per_worker(params_map) or ()) != everyone:
        raise ValueError(
            f"params_map is {{worker_idx: weights}} for workers 0 to {count - 1}, not for {list(params_map)}"
        )
    return count
