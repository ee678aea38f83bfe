"""Our side of a case, by configuration: which scheme, alone or in a collector."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import wsync
from bench.cases import NETWORK, Case
from bench.collecting import update_side
from bench.sides import MakeScheme, Side, send_side

NAME = "wsync"


def make_scheme(case: Case) -> wsync.WeightSyncScheme:
    """The scheme of a case."""
    options: dict[str, Any] = {"timeout": case.timeout}
    if case.backend == "shared_mem":
        options["acknowledge"] = case.acknowledge
    if case.checksum is not None:
        options["checksum"] = case.checksum
    if case.backend in NETWORK:
        options["shared_memory"] = case.shared_memory
    return wsync.WeightSyncScheme.from_backend(case.backend, **options)


def make_side(case: Case, trainer: int, make_scheme: MakeScheme = make_scheme) -> AbstractContextManager[Side]:
    """A ``MakeSide``, with any scheme."""
    kind = send_side if case.kind == "send" else update_side
    return kind(case, make_scheme, trainer)
