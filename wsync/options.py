"""The options that every scheme has: they are described, and have their defaults, in ``WeightSyncScheme``."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral
from typing import Any, Literal, TypedDict, Unpack

from wsync.transforms.chain import Transform
from wsync.weights.source import per_worker

__all__ = ["SchemeOptions"]


class SchemeOptions(TypedDict, total=False):
    """What the ``__init__`` of a backend's scheme hands on: ``**options: Unpack[SchemeOptions]``."""

    send_transform: Transform | Sequence[Transform] | None
    receive_transform: Transform | Sequence[Transform] | None
    initiator: Literal["sender", "receiver"]
    max_staleness: int | None


def full_signature(scheme: type) -> inspect.Signature:
    """Return the signature of ``scheme``, in which ``**options`` is replaced by what it stands for.

    ``**options: Unpack[SchemeOptions]`` stands for those; with any other annotation, for all arguments of the class
    that ``scheme`` derives from. The signature is what ``help`` shows, and what configs are made from.
    """
    found: list[inspect.Parameter] = []
    passed_on: Container[str] | None = None  # None: all
    for one in scheme.__mro__:
        if "__init__" not in vars(one):
            continue
        own, known = list(inspect.signature(one.__init__).parameters.values())[1:], [one.name for one in found]
        options = [parameter for parameter in own if parameter.kind is parameter.VAR_KEYWORD]
        for parameter in own:
            if parameter.name in known or parameter in options or (passed_on and parameter.name not in passed_on):
                continue
            found.append(parameter.replace(kind=parameter.KEYWORD_ONLY) if known else parameter)
        if not options:
            break
        if options[0].annotation in ("Unpack[SchemeOptions]", Unpack[SchemeOptions]):
            passed_on = SchemeOptions.__annotations__
    return inspect.Signature(found)


def check_option_names(scheme: type, options: Iterable[str]) -> None:
    """Raise TypeError if ``scheme`` lacks one of these arguments; names a similar one, or all of them."""
    known = inspect.signature(scheme).parameters
    unknown = [name for name in options if name not in known]
    if unknown and not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
        similar = get_close_matches(unknown[0], known, 1)
        hint = f"did you mean '{similar[0]}'?" if similar else f"there are {', '.join(known)}"
        raise TypeError(f"{scheme.__name__} has no argument '{unknown[0]}': {hint}")


def check_pull_options(initiator: str, max_staleness: int | None) -> None:
    """Raise ValueError if ``initiator`` or ``max_staleness`` is wrong, or they do not go together."""
    if initiator not in ("sender", "receiver"):
        raise ValueError(f"initiator is 'sender' or 'receiver', not {initiator!r}")
    if max_staleness is not None and (initiator == "sender" or max_staleness < 0):
        raise ValueError("max_staleness is a number of versions, 0 or more, and needs initiator='receiver'")


def agreed_count(
    num_workers: int | None,
    devices: Sequence[Any] | None,
    params_map: Mapping[int, Any] | None,
    workers: Sequence[Any],
    options: Mapping[str, int],
) -> int:
    """Return the number of workers on which all given arguments of ``init_on_sender`` agree; 1 if none names it.

    ``workers`` are those of the context; ``options`` are further numbers, by name.

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
    count = 1 if count is None else int(count)
    if count < 1:
        raise ValueError(f"num_workers is at least 1, not {count}")
    indices = sorted(worker.worker_idx for worker in workers)
    if indices and indices != list(range(count)):
        raise ValueError(f"the context's workers have the indices 0 to {count - 1}, not {indices}")
    if params_map is not None and set(per_worker(params_map) or ()) != set(range(count)):
        raise ValueError(
            f"params_map is {{worker_idx: weights}} for workers 0 to {count - 1}, not for {list(params_map)}"
        )
    return count


def single_count(counts: Mapping[str, int | None]) -> int | None:
    """Return the number on which all of ``counts`` agree; None if all are None; ValueError: they do not."""
    given = {name: count for name, count in counts.items() if count is not None}
    if len(set(given.values())) > 1:
        raise ValueError("how many workers? " + ", ".join(f"{name}: {count}" for name, count in given.items()))
    return next(iter(given.values()), None)
