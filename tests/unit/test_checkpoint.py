"""A checkpoint is whole or not there, and nothing in it is executed."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from learning import checkpoint
from learning.checkpoint import CheckpointError
from learning.reporting.files import FolderError

STATE = {
    "learner": {"policy": {"w": torch.arange(1000.0)}, "frames": 3},
    "progress": {"window": [1.0, 2.0], "first": None},
}


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\.pt is missing"):
        checkpoint.load(tmp_path)
    checkpoint.save(tmp_path, {"old": 1})
    path = checkpoint.save(tmp_path, STATE)
    state = checkpoint.load(tmp_path)
    assert torch.equal(state["learner"]["policy"].pop("w"), torch.arange(1000.0))
    assert state == {"learner": {"policy": {}, "frames": 3}, "progress": STATE["progress"]}
    assert os.listdir(tmp_path) == [path.name]


def test_where_nothing_can_be_removed_either_it_says_that_it_could_not_be_written(tmp_path: Path) -> None:
    """As in a file system that the kernel has made read-only."""
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match="could not be written: Not a directory"):
        checkpoint.save(tmp_path / "file", STATE)


@pytest.mark.parametrize("kept", [0, 1, 100, 0.5, 0.99])
def test_a_truncated_one_is_refused(tmp_path: Path, kept: float) -> None:
    path = checkpoint.save(tmp_path, STATE)
    content = path.read_bytes()
    path.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    with pytest.raises(CheckpointError, match="truncated, or not a checkpoint"):
        checkpoint.load(tmp_path)


class Trap:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("trapped",)


@pytest.mark.parametrize("how", ["text", "pickle", "torch"])
def test_a_foreign_file_is_refused_and_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / checkpoint.FILE
    if how == "text":
        path.write_text("hello\n" * 100)
    elif how == "pickle":
        path.write_bytes(pickle.dumps(Trap()))
    else:
        torch.save({"format": checkpoint.FORMAT, "state": Trap()}, path)
    with pytest.raises(CheckpointError):
        checkpoint.load(tmp_path)
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("content", [torch.zeros(3), {"state": {}}, {"format": "another", "state": {}}])
def test_another_programs_file_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / checkpoint.FILE)
    with pytest.raises(CheckpointError, match=r"is not a checkpoint of train\.py"):
        checkpoint.load(tmp_path)
