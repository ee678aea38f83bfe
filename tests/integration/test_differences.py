"""Updates of which only what has changed travels: over transports, and through a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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


def opened(url: Path, model: nn.Module, reader: nn.Module, **options: Any) -> tuple[Any, Any]:
    """A trainer, and a reader that has the trainer's first version."""
    trainer = wsync.StoreWeightSyncScheme(str(url), send_transform=Delta())
    trainer.init_on_sender("policy", model=model, num_workers=1)
    trainer.connect()
    scheme = wsync.StoreWeightSyncScheme(str(url), initiator="receiver", **options)
    scheme.init_on_receiver("policy", model=reader, worker_idx=0)
    scheme.connect()
    return trainer, scheme


def remove_full_versions(url: Path) -> None:
    for path in (url / "policy").glob("*.safetensors"):
        path.unlink()


@pytest.mark.parametrize("bind", [True, False])
def test_a_reader_of_a_store_reads_the_difference_alone(tmp_path: Path, bind: bool) -> None:
    model, copy = Wide(), Wide()
    trainer, reader = opened(tmp_path, model, copy, bind=bind)
    with trainer, reader:
        nudge(model, 10)
        trainer.send()
        assert reader.pull() == 2  # a reader that does not bind keeps a base from here on
        for version in range(3, 6):
            nudge(model, 10)
            assert trainer.send().bytes < 0.1 * WHOLE
            remove_full_versions(tmp_path)
            assert reader.pull() == version and torch.equal(copy.weight, model.weight)


def test_a_reader_without_the_base_or_with_a_damaged_difference_reads_the_full_version(tmp_path: Path) -> None:
    model, copy = Wide(), Wide()
    trainer, reader = opened(tmp_path, model, copy)
    with trainer, reader:
        for _ in range(2):
            nudge(model, 10)
            trainer.send()
        assert reader.pull() == 3 and torch.equal(copy.weight, model.weight)  # version 2 was missed
        for damage in (lambda path: path.write_bytes(path.read_bytes()[:-3]), flip, Path.unlink):
            nudge(model, 10)
            version = trainer.send().version
            (newest,) = (tmp_path / "policy").glob(f"v{version:08d}-*.delta")
            damage(newest)
            assert reader.pull() == version and torch.equal(copy.weight, model.weight)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
