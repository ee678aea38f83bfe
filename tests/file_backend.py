"""A backend of a user's own: each worker's weights are a file."""

import os
from pathlib import Path
from typing import Any, ClassVar

import torch

import wsync


class FileTransport:
    """Weights in one file, replaced atomically."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen = 0

    def setup_connection_and_weights_on_sender(self) -> None:
        pass

    def setup_connection_and_weights_on_receiver(
        self, *, worker_idx: int | None = None, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> None:
        pass

    def send_weights(self, weights: Any) -> None:
        torch.save(weights, f"{self.path}.new")
        os.replace(f"{self.path}.new", self.path)

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> Any:
        if not self.path.exists() or self.path.stat().st_mtime_ns == self.seen:
            return None
        self.seen = self.path.stat().st_mtime_ns
        return torch.load(self.path, weights_only=False)


class FileScheme(wsync.WeightSyncScheme):
    name = "files"
    collectors: ClassVar[tuple[str, ...]] = ("multi_async", "multi_sync")

    def __init__(self, folder: str, timeout: float | None = 60.0) -> None:
        super().__init__("state_dict", timeout=timeout)
        self.folder = Path(folder)

    def create_transport(self, worker_idx: int | None = None) -> FileTransport:
        return FileTransport(self.folder / f"{worker_idx}.pt")


class PassingScheme(FileScheme):
    """Passes the options of its base class on."""

    def __init__(self, depth: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self.depth = depth


def open_scheme(folder: str, **options: Any) -> FileScheme:
    return FileScheme(folder, **options)
