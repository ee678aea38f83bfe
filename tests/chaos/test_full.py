"""No room is left: the error says so, nothing is half done, and what fits works.

The kernel refuses memory files beyond ``RLIMIT_FSIZE`` as it refuses them where memory is full, and needs no root.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from contract_models import Large, Tail, fill
from matrix import Cell
from stage import Scene, detected, recovered

import wsync
from learning import checkpoint

ARENAS = ("shared_mem", "shared_mem-published", "multiprocess")
GLOO = "distributed-gloo"
MIB = 2**20


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_shared_memory_full(cell: Cell, scene: Scene, backend: str) -> None:
    """There is no shared memory for a model of 32 MiB. `connect` says how much is missing; a smaller model, whose
    workers are there already, goes on."""
    if backend == GLOO:
        pytest.skip("it needs no shared memory")
    if backend == "rpc":
        pytest.skip("its first weights come with the first send, and their memory is had as in distributed")
    with scene.play() as stage:
        other = type(stage.scheme)()
        other.init_on_sender("other", model=fill(Large(), 1), num_workers=2)
        with no_file_beyond(16 * MIB):
            with other, detected(cell, wsync.WeightSyncError, r"no shared memory left: 32\.0 MiB more are needed"):
                other.connect()
            assert stage.all_see(1)
            with recovered(cell):
                stage.ask(2)
                assert stage.all_see(2)


def test_shared_memory_full_in_a_run(cell: Cell, scene: Scene, backend: str) -> None:
    """Memory runs out between two updates, when the workers have different versions and another slot is needed. The
    send says so, they keep what they have, and with memory again the next one works."""
    if backend == "multiprocess":
        pytest.skip("one slot, made at connect, is enough")
    if backend not in ARENAS:
        pytest.skip("it needs no shared memory" if backend == GLOO else "two slots, made at connect, are enough")
    with scene.play(Large) as stage:
        stage.scheme.send(stage.fill(2), worker_ids=0)
        with no_file_beyond(72 * MIB), detected(cell, wsync.WeightSyncError, "no shared memory left"):
            stage.ask(3)
        assert stage.seen() == [2, 1]
        with recovered(cell):
            stage.ask(4)
            assert stage.all_see(4)


def test_no_room_for_extra_state(cell: Cell, scene: Scene, backend: str) -> None:
    """There is no room for an update's extra state. As above, and the slot that was packed is free again."""
    if backend not in ARENAS:
        pytest.skip("it goes with the words, and needs no shared memory")
    with scene.play(Tail) as stage:
        stage.ask(2)
        stage.model.note = "x" * MIB
        with no_file_beyond(MIB // 2), detected(cell, wsync.WeightSyncError, "no shared memory left"):
            stage.ask(3)
        for _ in range(5):  # more often than there are slots
            with no_file_beyond(MIB // 2), pytest.raises(wsync.WeightSyncError, match="no shared memory left"):
                stage.ask(3)
        assert stage.all_see(2)
        stage.model.note = "small"
        with recovered(cell):
            stage.ask(4)
            assert stage.all_see(4)


def test_checkpoint_disk_full(cell: Cell, tmp_path: Path) -> None:
    """The disk is full when a checkpoint is written. The older checkpoint is whole, and the error says what was not
    written."""
    checkpoint.save(tmp_path, {"version": 1})
    before = (tmp_path / checkpoint.FILE).read_bytes()
    code = f"""
import resource, torch
from pathlib import Path
from learning import checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
checkpoint.save(Path({str(tmp_path)!r}), {{"weights": torch.zeros(2**20)}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 1
    assert "CheckpointError" in done.stderr and "could not be written" in done.stderr, done.stderr
    assert (tmp_path / checkpoint.FILE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.FILE]
    assert checkpoint.load(tmp_path) == {"version": 1}
