"""Our side of a case, by configuration: which scheme, alone or in a collector."""

from __future__ import annotations

from contextlib import AbstractContextManager

import wsync
from bench.cases import Case
from bench.collecting import update_side
from bench.sides import MakeScheme, Side, send_side

NAME = "wsync"


def make_scheme(case: Case) -> wsync.WeightSyncScheme:
    """The scheme of a case."""
    if case.backend == "shared_mem":
        return wsync.SharedMemWeightSyncScheme(timeout=case.timeout, acknowledge=case.acknowledge)
    return wsync.WeightSyncScheme.from_backend(case.backend, timeout=case.timeout)


def make_side(case: Case, trainer: int, make_scheme: MakeScheme = make_scheme) -> AbstractContextManager[Side]:
    """A ``MakeSide``, with any scheme."""
    kind = send_side if case.kind == "send" else update_side
    return kind(case, make_scheme, trainer)
