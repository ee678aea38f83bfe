"""Updates of which only what has changed travels."""

from __future__ import annotations

import pytest
from small_models import Wide
from torch import nn

import wsync
from wsync.testing import WorkerPool, commands
from wsync.testing.models import digest, nudge
from wsync.transforms import Delta

pytest.importorskip("zstandard", reason="the extra [delta] is not installed")
WHOLE = sum(parameter.nbytes for parameter in Wide().parameters())


def test_over_a_process_group_few_bytes_travel(pool: WorkerPool) -> None:
    scheme = wsync.DistributedWeightSyncScheme(shared_memory=False, timeout=60.0, send_transform=[Delta()])
    model = Wide()
    with pool.group(1) as workers, scheme:
        scheme.init_on_sender("policy", model=model, num_workers=1)
        workers[0].start(commands.join, scheme, Wide, 0, "policy")
        scheme.connect()
        workers[0].result()
        for small in (True, True, False, True, True):
            if small:
                nudge(model, 10)
            else:
                nn.init.normal_(model.weight)
            report = scheme.send()
            assert report is not None and (report.bytes < 0.1 * WHOLE) == small
            assert workers[0].call(commands.digest) == digest(model)
