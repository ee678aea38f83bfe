"""A backend of one's own in one file: the weights travel as files in a directory.

    python examples/custom_backend.py                # a demonstration: two workers follow a trainer
    python -m pytest examples/custom_backend.py      # the contract suite, run against this backend

``register_backend("directory", "custom_backend:DirectoryScheme")`` makes it known to
``WeightSyncScheme.from_backend``; ``train.py`` needs an entry point or a YAML file (docs/backends.md).
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import multiprocessing, nn

from wsync import WeightSyncScheme
from wsync.testing import BackendContract, Session


class DirectoryTransport:
    """Moves the weights of one model to one worker as the file ``path`` (a ``wsync.TransportBackend``)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def setup_connection_and_weights_on_sender(self) -> None:
        """Make the directory."""
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def setup_connection_and_weights_on_receiver(self, **_: Any) -> None:
        """Do nothing: the first weights are read like all others."""

    def send_weights(self, weights: Any) -> None:
        """Write the weights. The file is renamed when it is complete, so that a worker never reads half of it."""
        copies = TensorDict({name: tensor.clone() for name, tensor in weights.items()})  # torch.save refuses the views
        torch.save(copies, incomplete := self.path.with_suffix(".tmp"))
        os.replace(incomplete, self.path)

    def receive_weights(self, timeout: float | None = None, **_: Any) -> Any | None:
        """Return the weights in the newest file, or None if there is none yet."""
        if not self.path.exists():
            return None
        return torch.load(self.path, weights_only=False)  # the directory belongs to the trainer's user


class DirectoryScheme(WeightSyncScheme):
    """Weight synchronization through files in ``folder``, which the trainer and its workers share."""

    name = "directory"

    def __init__(self, folder: str | Path, **options: Any) -> None:
        super().__init__(**options)
        self.folder = Path(folder)

    def create_transport(self, worker_idx: int | None = None) -> DirectoryTransport:
        """Return the transport to (or in) a worker."""
        return DirectoryTransport(self.folder / f"{self.model_id}-{worker_idx}.pt")


class TestDirectory(BackendContract):
    """The contract suite: ``make_scheme`` is required, ``starve`` optional."""

    @pytest.fixture(autouse=True)
    def _make_folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make_scheme(self, **options: Any) -> DirectoryScheme:
        return DirectoryScheme(self.folder, **options)

    @contextmanager
    def starve(self, session: Session) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))  # no file of more than 1 MiB, as on a full disk
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def follow(scheme: DirectoryScheme, worker_idx: int) -> None:
    """A worker's process: print the model's output for each version, until the fourth."""
    model = nn.Linear(2, 1)
    scheme.init_on_receiver("policy", model=model, worker_idx=worker_idx)
    scheme.connect()
    while scheme.version < 4:
        scheme.receive()
        print(f"worker {worker_idx} acts on version {scheme.version}: {model(torch.ones(2)).item():.1f}")
    scheme.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, DirectoryScheme(folder) as trainer:
        policy = nn.Linear(2, 1)
        trainer.init_on_sender("policy", model=policy, num_workers=2)
        processes = [multiprocessing.get_context("spawn").Process(target=follow, args=(trainer, i)) for i in range(2)]
        for process in processes:
            process.start()
        trainer.connect()
        for value in range(2, 5):
            nn.init.constant_(policy.weight, value)
            print(trainer.send())
        for process in processes:
            process.join()
