"""Many readers of one store: every one gets every version that it can, none torn.

    python scripts/check_store.py [--readers 64] [--versions 50] [--kib 64]

Readers are processes that a fork server starts. Prints how long after ``send`` the readers had the last version. The
exit status is 1 if a reader had a torn version, or did not get the last one.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import typer
from harness.models import RevealingModel, fill
from harness.processes import worker_processes
from harness.torn import PATIENCE, read_store

import wsync


def main(readers: int = 64, versions: int = 50, kib: int = 64) -> None:
    """Publish ``versions`` versions to ``readers`` readers."""
    with tempfile.TemporaryDirectory() as url, wsync.StoreWeightSyncScheme(url) as scheme:
        source = RevealingModel(kib / 1024, 2)
        scheme.init_on_sender("policy", model=source, num_workers=1)
        scheme.connect()
        with worker_processes(read_store, readers, url, kib / 1024, versions, timeout=5 * PATIENCE) as channels:
            channels.receive()
            sends: list[float] = []
            for version in range(2, versions + 1):
                fill(source, version)
                began = time.perf_counter()
                scheme.send()
                sends.append(time.perf_counter() - began)
            ended = time.time()
            found = channels.receive()
    late = sorted(moment - ended for moment, *_ in found)
    print(f"{readers} readers, {versions} versions of {kib} KiB: send p50 {statistics.median(sends) * 1e3:.1f} ms")
    middle, longest = late[len(late) // 2] * 1e3, late[-1] * 1e3
    print(f"the last version was in the median reader {middle:.0f} ms after send, in the last one {longest:.0f} ms")
    torn, fewest = sum(tally.mixed for _, tally, _ in found), min(tally.versions for _, tally, _ in found)
    behind = sum(version < versions for *_, version in found)
    print(f"torn: {torn}; versions seen by a reader: {fewest} or more; readers without the last version: {behind}")
    if torn or behind:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
