"""Checkpoints: weights, optimizer state and counters in one file, replaced atomically."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from learning.reporting.files import replace_file

FILE = "checkpoint.pt"
FORMAT = "wsync-checkpoint-1"


class CheckpointError(RuntimeError):
    """A checkpoint is missing, truncated, of another program, or of another model."""


def save(folder: Path, state: dict[str, Any]) -> Path:
    """Write `state` (tensors and plain values) to ``folder/checkpoint.pt``, replacing an older one in one step."""
    content = io.BytesIO()  # writing to disk, torch reports a full disk as a RuntimeError
    torch.save({"format": FORMAT, "state": state}, content)
    replace_file(folder / FILE, content.getbuffer())
    return folder / FILE


def load(folder: Path) -> dict[str, Any]:
    """Return the state that `save` wrote; raises CheckpointError. Nothing in the file is executed."""
    path = folder / FILE
    if not path.is_file():
        raise CheckpointError(f"no checkpoint in {folder}: {FILE} is missing")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # other bytes raise any error in the unpickler (IndexError, …), and OSError
        raise CheckpointError(f"{path} cannot be read: truncated, or not a checkpoint of train.py") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("state"), dict):
        raise CheckpointError(f"{path} is not a checkpoint of train.py (expected the format {FORMAT})")
    return content["state"]


def does_not_fit(folder: Path, what: str, error: Exception) -> CheckpointError:
    """Return the error of a checkpoint whose state does not fit `what`: ``"this run"``."""
    return CheckpointError(f"{folder / FILE} does not fit {what}: {' '.join(str(error).split())}")
