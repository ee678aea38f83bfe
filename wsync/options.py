"""The options that every scheme has: they are described, and have their defaults, in ``WeightSyncScheme``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Literal, TypedDict, Unpack

from wsync.transforms.chain import Transform


class SchemeOptions(TypedDict, total=False):
    """What the ``__init__`` of a backend's scheme hands on: ``**options: Unpack[SchemeOptions]``."""

    send_transform: Transform | Sequence[Transform] | None
    receive_transform: Transform | Sequence[Transform] | None
    initiator: Literal["sender", "receiver"]
    max_staleness: int | None


def full_signature(scheme: type, base: type) -> inspect.Signature:
    """Return the signature of ``scheme`` with the keyword arguments of ``base`` for ``**options`` of the above type.

    It is what ``help`` shows, and what configs are made from.
    """
    own = list(inspect.signature(scheme.__init__).parameters.values())[1:]
    named = [one for one in own if one.annotation not in ("Unpack[SchemeOptions]", Unpack[SchemeOptions])]
    known, common = {one.name for one in named}, inspect.signature(base.__init__).parameters
    added = [common[name] for name in SchemeOptions.__annotations__ if name not in known]
    return inspect.Signature(named if len(named) == len(own) else [*named, *added])
