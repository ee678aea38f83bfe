"""No room is left: the error says so, no worker has half an update, and what fits works.

The kernel refuses memory files beyond ``RLIMIT_FSIZE`` as it refuses them where memory is full, and needs no root.
"""

from pathlib import Path

import pytest
from backends import MIB, BuiltIn
from cells import Cell
from full_disk import no_file_beyond
from programs import run_program

import wsync
from learning import checkpoint
from wsync.testing.models import WithExtraState, fill, make_large

ARENAS = ("shared_mem", "shared_mem-published", "multiprocess")
GLOO = "distributed-gloo"


def test_shared_memory_full(cell: Cell, backend: BuiltIn, backend_name: str) -> None:
    """There is no shared memory for a model of 32 MiB. `connect` says how much is missing; a smaller model, with
    workers that are connected already, continues."""
    if backend_name == GLOO:
        pytest.skip("it needs no shared memory")
    if backend_name == "rpc":
        pytest.skip("its first weights come with the first send, and their memory is allocated as in distributed")
    with backend.connected() as session, backend.make_scheme() as other:
        other.init_on_sender("other", model=fill(make_large(), 1), num_workers=2)
        with no_file_beyond(16 * MIB):
            with cell.detects(wsync.WeightSyncError, r"no shared memory left: 32\.0 MiB"):
                other.connect()
            assert session.outputs() == [1, 1]
            with cell.recovers():
                session.update(2)
                assert session.outputs() == [2, 2]


def test_shared_memory_full_in_a_run(cell: Cell, backend: BuiltIn, backend_name: str) -> None:
    """Memory runs out between two updates, when the workers have different versions and another slot is needed. The
    send says so, they keep what they have, and with memory again the next one works."""
    if backend_name not in ARENAS:
        pytest.skip("it needs no more shared memory than it has allocated at connect")
    with backend.connected(make=make_large) as session:
        session.send(2, worker_ids=0)
        with no_file_beyond(72 * MIB), cell.detects(wsync.WeightSyncError, "no shared memory left"):
            session.update(3)
        assert session.outputs() == [2, 1]
        with cell.recovers():
            session.update(4)
            assert session.outputs() == [4, 4]


def test_no_room_for_extra_state(cell: Cell, backend: BuiltIn, backend_name: str) -> None:
    """There is no room for an update's extra state. As above, and the slot that was packed is free again."""
    if backend_name not in ARENAS:
        pytest.skip("it is carried by a message, and needs no shared memory")
    with backend.connected(make=WithExtraState) as session:
        session.update(2)
        session.model.state = "x" * MIB
        with no_file_beyond(MIB // 2), cell.detects(wsync.WeightSyncError, "no shared memory left"):
            session.update(3)
        for _ in range(5):  # more often than there are slots
            with no_file_beyond(MIB // 2), pytest.raises(wsync.WeightSyncError, match="no shared memory left"):
                session.update(3)
        assert session.outputs() == [2, 2]
        session.model.state = "small"
        with cell.recovers():
            session.update(4)
            assert session.outputs() == [4, 4]


def test_checkpoint_disk_full(cell: Cell, tmp_path: Path, short_path: Path) -> None:
    """The disk is full when a checkpoint is written. The older checkpoint is whole, and the error names what was not
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
    (short_path / "program.py").write_text(code)
    done = run_program(short_path / "program.py", folder=short_path, status=1)
    assert "could not be written" in done.stderr, done.stderr
    assert (tmp_path / checkpoint.FILE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.FILE]
    assert checkpoint.load(tmp_path) == {"version": 1}
