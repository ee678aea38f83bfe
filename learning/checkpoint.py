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
    """Write `state` (tensors and plain values) to ``folder/checkpoint.pt``, replacing an older one in one step.

    Raises:
        CheckpointError: it could not be written (a full disk, for example); an older one is unchanged.
    """
    path = folder / FILE
    content = io.BytesIO()  # writing to disk, torch reports a full disk as a RuntimeError
    torch.save({"format": FORMAT, "state": state}, content)
    try:
        replace_file(path, content.getbuffer())
    except OSError as error:
        older = "the older one is unchanged" if path.exists() else "there is no older one"
        raise CheckpointError(f"{path} could not be written: {error.strerror}; {older}") from error
    return path


def load(folder: Path) -> dict[str, Any]:
    """Return the state that `save` wrote. Nothing in the file is executed (``weights_only``).

    Raises:
        CheckpointError: there is no file; or it cannot be opened, is truncated, or is not a checkpoint.
    """
    path = folder / FILE
    if not path.is_file():
        raise CheckpointError(f"no checkpoint in {folder}: {FILE} is missing")
    try:
        file = path.open("rb")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        with file:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # other bytes raise any error in the unpickler (IndexError, …), and OSError
        raise CheckpointError(f"{path} cannot be read: truncated, or not a checkpoint of train.py") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("state"), dict):
        raise CheckpointError(f"{path} is not a checkpoint of train.py (expected the format {FORMAT})")
    return content["state"]
