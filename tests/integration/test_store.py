"""Weights through a store: versions in files, written by one trainer, read by workers that it does not know."""

from __future__ import annotations

import json
import multiprocessing
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from programs import run_program
from stores import reader, trainer

import wsync
from wsync.testing import WorkerPool, commands
from wsync.testing.commands import WorkerState
from wsync.testing.models import Small, WithExtraState, fill

ROOT = Path(__file__).parents[2]


def folder(url: Path) -> Path:
    return url / "policy"


def read(state: WorkerState, url: str, timeout: float = 30.0, **options: Any) -> int:
    """Connect a reader that knows the URL alone."""
    return commands.join(state, wsync.StoreWeightSyncScheme(url, timeout=timeout, **options), Small, 0, "policy")


def wait_for(state: WorkerState, version: int) -> list[float]:
    """Return the output once the model has ``version``."""
    while state.schemes["policy"].version < version:
        assert state.schemes["policy"].receive(30.0) is not None, "no version within 30 s"
    return commands.output(state)


def pull(state: WorkerState) -> int:
    return state.schemes["policy"].pull(30.0)


def test_every_version_arrives(tmp_path: Path, pool: WorkerPool) -> None:
    with trainer(tmp_path) as scheme, pool.group(2) as workers:
        workers.call(read, str(tmp_path))
        assert workers.call(commands.output) == [[1.0] * 4] * 2
        for value in range(2, 6):
            report = scheme.send(fill(Small(), value))
            assert report is not None and report.version == value
            assert workers.call(wait_for, value) == [[float(value)] * 4] * 2


def test_a_reader_that_starts_late_or_first(tmp_path: Path, pool: WorkerPool) -> None:
    with pool.group(2) as workers:
        workers[0].start(read, str(tmp_path))  # there is no folder yet
        with trainer(tmp_path) as scheme:
            scheme.send(fill(Small(), 2))
            assert workers[0].result() in (1, 2)
            assert workers[1].call(read, str(tmp_path)) == 2
            assert workers[1].call(commands.output) == [2.0] * 4
        assert workers[0].call(wait_for, 2) == [2.0] * 4  # the trainer has gone; the versions stay


def test_workers_that_pull(tmp_path: Path, pool: WorkerPool) -> None:
    with trainer(tmp_path) as scheme, pool.group(1) as workers:
        workers[0].call(read, str(tmp_path), initiator="receiver")
        scheme.send(fill(Small(), 2))
        scheme.send(fill(Small(), 3))
        assert workers[0].call(commands.output) == [1.0] * 4
        assert workers[0].call(pull) == 3
        assert workers[0].call(commands.output) == [3.0] * 4


def test_old_versions_are_deleted(tmp_path: Path) -> None:
    with trainer(tmp_path, keep=2) as scheme:
        for _ in range(5):
            scheme.send()
    names = sorted(path.name for path in folder(tmp_path).iterdir())
    assert [name.split("-")[0] for name in names] == ["manifest.json", "v00000005", "v00000006"]
    with wsync.StoreWeightSyncScheme(str(tmp_path), keep=1) as scheme:
        scheme.init_on_sender("policy", model=Small(), num_workers=1)  # makes room
        assert [path.name[:9] for path in folder(tmp_path).glob("v*")] == ["v00000006"]


# --- faults ---


def test_a_trainer_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    """Readers have the last complete version; what was left unfinished is deleted by the next trainer."""
    with trainer(tmp_path) as scheme:
        scheme.send(fill(Small(), 2))
    whole = {*folder(tmp_path).iterdir()}
    killed = multiprocessing.get_context("fork").Process(target=publish_and_be_killed, args=(tmp_path,))
    killed.start()
    killed.join(30.0)
    (unfinished,) = {*folder(tmp_path).iterdir()} - whole
    assert killed.exitcode == -signal.SIGXFSZ and unfinished.stat().st_size == 1000
    with reader(tmp_path, timeout=0.2) as receiver:
        assert receiver.version == 2
    transport = wsync.StoreTransport(folder(tmp_path))
    transport.setup_connection_and_weights_on_sender()
    assert {*folder(tmp_path).iterdir()} == whole


def publish_and_be_killed(url: Path) -> None:
    """Publish a version that is larger than a file may be."""
    transport = wsync.StoreTransport(folder(url))
    transport.setup_connection_and_weights_on_sender()
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    transport.send_weights(Small(100_000))


def test_a_corrupt_file(tmp_path: Path) -> None:
    with trainer(tmp_path) as scheme, reader(tmp_path, initiator="receiver", timeout=0.2) as receiver:
        scheme.send(fill(Small(), 2))
        (newest,) = folder(tmp_path).glob("v00000002-*")
        content = bytearray(newest.read_bytes())
        content[-1] ^= 0x40
        newest.write_bytes(content)
        with pytest.raises(wsync.WeightSyncError, match=r"version 2 of the store .* corrupt"):
            receiver.pull()
        assert receiver.version == 1 and receiver.model()[0] == 1
        newest.write_bytes(content[:20])
        with pytest.raises(wsync.WeightSyncError, match=r"version 2 of the store .* cannot be read"):
            reader(tmp_path, timeout=0.2)
        scheme.send(fill(Small(), 3))
        assert receiver.pull() == 3 and receiver.model()[0] == 3


def test_a_full_disk(tmp_path: Path) -> None:
    with trainer(tmp_path, model=Small(100_000)) as scheme:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with pytest.raises(wsync.WeightSyncError, match="version 2 was not stored"):
                scheme.send()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, ignored)
        assert json.loads((folder(tmp_path) / "manifest.json").read_text())["version"] == 1
        assert not list(folder(tmp_path).glob("*.unfinished"))
        report = scheme.send()
        assert report is not None and report.version == 3


def test_two_trainers_in_one_store(tmp_path: Path) -> None:
    with (
        trainer(tmp_path) as first,
        trainer(tmp_path),
        pytest.raises(wsync.WeightSyncError, match="another trainer"),
    ):
        first.send()
        first.send()


def test_a_store_that_cannot_be_opened(tmp_path: Path) -> None:
    scheme = wsync.StoreWeightSyncScheme("nosuchprotocol://somewhere")
    with pytest.raises(wsync.NotConnected, match="nosuchprotocol"):
        scheme.init_on_sender("policy", model=Small(), num_workers=1)
    with pytest.raises(wsync.SyncTimeout, match="has no version 1 yet"):
        reader(tmp_path, timeout=0.2)


def test_extra_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(wsync.LayoutMismatch, match="extra state cannot be stored"), trainer(tmp_path, WithExtraState()):
        pass


def test_models_cannot_be_switched_together(tmp_path: Path) -> None:
    with trainer(tmp_path) as scheme, pytest.raises(wsync.WeightSyncError, match="one by one"):
        wsync.synchronize({scheme: fill(Small(), 2)})


@pytest.mark.slow
def test_training_through_a_store(tmp_path: Path) -> None:
    options = ["weight_sync=store", f"weight_sync.url={tmp_path}/store", "total_frames=3000", "logger=none"]
    done = run_program(ROOT / "train.py", *options, f"hydra.run.dir={tmp_path}/run", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    manifest = json.loads((tmp_path / "store" / "policy" / "manifest.json").read_text())
    assert manifest["version"] > 1 and (tmp_path / "run" / "summary.json").exists()
