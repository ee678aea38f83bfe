"""Faults around a store, and uses that it cannot serve: the right error, and never wrong weights."""

from __future__ import annotations

import pickle
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem
from stores import trainer
from torch import nn

import wsync
from wsync.testing.models import Small, fill


def doubled(worker: int, weights: Any) -> Any:
    return weights.apply(lambda tensor: tensor * (worker + 1))


@pytest.mark.parametrize("given", ["params_map", "device_map_fn", "send", "worker_ids"])
def test_workers_cannot_have_different_weights(tmp_path: Path, given: str) -> None:
    each = {worker: fill(Small(), worker + 5) for worker in range(2)}
    initial: dict[str, Any] = {"num_workers": 2, "model": fill(Small(), 1)}
    if given == "params_map":
        initial = {"params_map": each}
    if given == "device_map_fn":
        initial["device_map_fn"] = doubled
    sent: dict[str, Any] = {"send": {"weights": each}, "worker_ids": {"worker_ids": [0]}}.get(given, {})
    with wsync.StoreWeightSyncScheme(str(tmp_path)) as scheme:
        if not sent:
            with pytest.raises(ValueError, match="get the same weights"):
                scheme.init_on_sender("policy", **initial)
            return
        scheme.init_on_sender("policy", **initial)
        scheme.connect()
        with pytest.raises(ValueError, match="get the same weights"):
            scheme.send(**sent)
        scheme.send({"weight": torch.zeros(4)}, partial=True)  # nothing was packed
    newest = wsync.StoreTransport(f"{tmp_path}/policy").receive_weights(0.0)
    assert newest is not None and torch.equal(newest["weight"], torch.zeros(4))


def test_a_partial_update_after_a_version_that_was_not_stored(tmp_path: Path) -> None:
    """It completes the weights that were stored last."""
    model = nn.Linear(2, 2)
    with trainer(tmp_path, model) as scheme:
        manifest, stored = tmp_path / "policy" / "manifest.json", model.bias.detach().clone()
        content = manifest.read_bytes()
        manifest.write_bytes(b"damaged")
        with pytest.raises(wsync.WeightSyncError, match="damaged"):
            scheme.send(nn.Linear(2, 2))
        manifest.write_bytes(content)
        scheme.send({"weight": torch.zeros(2, 2)}, partial=True)
    newest = wsync.StoreTransport(f"{tmp_path}/policy").receive_weights(0.0)
    assert newest is not None and torch.equal(newest["bias"], stored) and not newest["weight"].any()


def test_pull_waits_for_a_first_version_that_is_published_later(tmp_path: Path) -> None:
    with wsync.StoreWeightSyncScheme(str(tmp_path), initiator="receiver", timeout=30.0) as sender:
        sender.init_on_sender("policy", num_workers=1)  # without weights
        sender.connect()
        with pickle.loads(pickle.dumps(sender)) as receiver:
            receiver.init_on_receiver("policy", model=Small(), worker_idx=0)
            receiver.connect()
            with pytest.raises(wsync.SyncTimeout, match="no version yet"):
                receiver.pull(timeout=0.0)
            pulled: list[int] = []
            waiting = threading.Thread(target=lambda: pulled.append(receiver.pull(timeout=30.0)))
            waiting.start()
            sender.send(fill(Small(), 1))
            waiting.join(30.0)
            assert pulled == [1]


class SlowStore(MemoryFileSystem):
    """Never answers a look."""

    protocol = "slow"
    over = threading.Event()

    def cat_file(self, *_: Any, **__: Any) -> bytes:
        self.over.wait()
        raise FileNotFoundError


class EndlessStore(MemoryFileSystem):
    """As a web server that ignores ranges: a file without an end."""

    protocol = "endless", "http"
    given = 0

    def open(self, *_: Any, **__: Any) -> Any:
        return nullcontext(SimpleNamespace(read=self.read))

    def read(self, size: int) -> bytes:
        type(self).given += size
        return b" " * size


def test_a_call_does_not_outlast_its_deadline_in_a_store_that_is_slow() -> None:
    register_implementation("slow", SlowStore, clobber=True)
    with wsync.StoreWeightSyncScheme("slow://store", timeout=0.5) as scheme:
        scheme.init_on_receiver("policy", model=Small(), worker_idx=0)
        for call in (scheme.connect, lambda: wsync.StoreTransport("slow://store").receive_weights(0.5)):
            started = time.monotonic()
            with pytest.raises(wsync.SyncTimeout, match="did not answer in time"):
                call()
            assert time.monotonic() - started < 5.0
    SlowStore.over.set()


def test_a_limit_counts_while_a_file_is_read() -> None:
    register_implementation("endless", EndlessStore, clobber=True)
    with wsync.StoreWeightSyncScheme("endless://store", timeout=20.0) as scheme:
        scheme.init_on_receiver("policy", model=Small(), worker_idx=0)
        with pytest.raises(wsync.WeightSyncError, match=r"manifest\.json has more than"):
            scheme.connect()
    assert EndlessStore.given < 1 << 27
