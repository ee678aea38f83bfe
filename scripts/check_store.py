"""Many readers of one store: every one gets every version that it can, none torn.

    python scripts/check_store.py [--readers 64] [--versions 50] [--kib 64]

Readers are processes that a fork server starts. Prints how long after ``send`` the readers had the last version. The
exit status is 1 if a reader had a torn version, or did not get the last one.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import time
from typing import Any

import torch
import typer
from torch import nn

import wsync

PATIENCE = 60.0  # seconds


class Filled(nn.Module):
    """Two parameters, which are full of the number of the version."""

    def __init__(self, kib: int) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(kib * 128))
        self.second = nn.Parameter(torch.zeros(kib * 128))

    def forward(self) -> tuple[float, float, float, float]:
        """Return the ends of both."""
        first, second = self.first.detach(), self.second.detach()
        return float(first[0]), float(first[-1]), float(second[0]), float(second[-1])


def read(url: str, kib: int, last: int, results: Any) -> None:
    """A reader: forwards until it has the last version, or no new one has come for a minute."""
    torch.set_num_threads(1)
    model, torn, versions = Filled(kib), 0, set[float]()
    with wsync.StoreWeightSyncScheme(url) as scheme:
        scheme.init_on_receiver("policy", model=model, worker_idx=0)
        scheme.connect()
        results.put("ready")
        until = time.monotonic() + PATIENCE
        while scheme.version < last and time.monotonic() < until:
            if scheme.receive(1.0) is not None:
                until = time.monotonic() + PATIENCE
            values = model()
            torn += len(set(values)) > 1
            versions.add(values[0])
        results.put((time.time(), torn, len(versions), scheme.version))


def main(readers: int = 64, versions: int = 50, kib: int = 64) -> None:
    """Publish ``versions`` versions to ``readers`` readers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["wsync"])
    with tempfile.TemporaryDirectory() as url, wsync.StoreWeightSyncScheme(url) as scheme:
        source, results = Filled(kib), context.Queue()
        scheme.init_on_sender("policy", model=source, num_workers=1)
        scheme.connect()
        processes = [context.Process(target=read, args=(url, kib, versions, results)) for _ in range(readers)]
        for process in processes:
            process.start()
        for _ in processes:
            assert results.get(timeout=300) == "ready"
        sends: list[float] = []
        for version in range(2, versions + 1):
            for parameter in source.parameters():
                parameter.data.fill_(version)
            began = time.perf_counter()
            scheme.send()
            sends.append(time.perf_counter() - began)
        ended = time.time()
        found = [results.get(timeout=5 * PATIENCE) for _ in processes]
        for process in processes:
            process.join()
    late = sorted(moment - ended for moment, *_ in found)
    print(f"{readers} readers, {versions} versions of {kib} KiB: send p50 {statistics.median(sends) * 1e3:.1f} ms")
    middle, longest = late[len(late) // 2] * 1e3, late[-1] * 1e3
    print(f"the last version was in the median reader {middle:.0f} ms after send, in the last one {longest:.0f} ms")
    torn, fewest = sum(torn for _, torn, *_ in found), min(count for *_, count, _ in found)
    behind = sum(version < versions for *_, version in found)
    print(f"torn: {torn}; versions seen by a reader: {fewest} or more; readers without the last version: {behind}")
    if torn or behind:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
