"""Weights through a store: versions in files, written by one trainer, read by workers that it does not know."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import no_file_beyond
from programs import run_program
from safetensors.torch import load_file
from stores import reader, trainer
from tensordict import TensorDict
from torch import nn

import wsync
from wsync.testing import WorkerPool, commands
from wsync.testing.commands import WorkerState
from wsync.testing.models import Small, WithExtraState, fill
from wsync.weights.tensors import same_bits

ROOT = Path(__file__).parents[2]


def folder(url: Path) -> Path:
    return url / "policy"


def newest_in(url: Path) -> int:
    return json.loads((folder(url) / "manifest.json").read_text())["versions"][-1]["version"]


def read(state: WorkerState, url: str, timeout: float = 30.0, **options: Any) -> int:
    """Connect a reader that knows the URL alone."""
    return commands.join(state, wsync.StoreWeightSyncScheme(url, timeout=timeout, **options), Small, 0, "policy")


def wait_for(state: WorkerState, version: int) -> list[float]:
    """Return the output once the model has ``version``."""
    while state.schemes["policy"].version < version:
        assert state.schemes["policy"].receive(30.0) is not None, "no version within 30 s"
    return commands.output(state)


def test_a_version_that_does_not_fit_is_received_again(tmp_path: Path) -> None:
    model, receiver = nn.Linear(2, 2), wsync.StoreTransport(tmp_path)
    sender = wsync.StoreTransport(tmp_path)
    sender.setup_connection_and_weights_on_sender()
    sender.send_weights(model)
    with pytest.raises(wsync.LayoutMismatch):
        receiver.receive_weights(0.0, model=nn.Linear(3, 3))
    assert receiver.receive_weights(0.0, model=(other := nn.Linear(2, 2))) is not None
    assert torch.equal(other.weight, model.weight)


def test_the_library_safetensors_reads_a_version(tmp_path: Path) -> None:
    """Also numbers of odd sizes behind one another, and tensors that are transposed, empty or without dimensions."""
    tied, generator = torch.rand(3, 5), torch.Generator().manual_seed(0)
    weights = {
        "flag": torch.tensor(True),
        "half": torch.rand(3, generator=generator).bfloat16(),
        "byte": torch.arange(5, dtype=torch.uint8),
        "transposed": torch.rand(4, 3, generator=generator).T,
        "complex": torch.rand(2, dtype=torch.complex64, generator=generator),
        "none": torch.empty(0, 4),
        "narrow": torch.rand(7, generator=generator).to(torch.float8_e4m3fn),
        "count": torch.tensor(7),
        "tied": tied,
        "tied too": tied,
    }
    sender = wsync.StoreTransport(tmp_path)
    sender.setup_connection_and_weights_on_sender()
    sender.send_weights(weights)
    found = load_file(next(tmp_path.glob("*.safetensors")))
    assert found.keys() == weights.keys() - {"tied too"}
    received = wsync.StoreTransport(tmp_path).receive_weights(0.0)
    assert received is not None
    for name, tensor in found.items():
        for other in (weights[name], received[name]):
            assert tensor.dtype == other.dtype and tensor.shape == other.shape and same_bits(tensor, other)
    with pytest.raises(wsync.LayoutMismatch, match=r"'wide' is .*, which a safetensors file cannot have"):
        sender.send_weights({"wide": torch.zeros(1, dtype=torch.complex128)})


def test_a_reader_that_starts_late_or_first(tmp_path: Path, pool: WorkerPool) -> None:
    with pool.group(2) as workers:
        workers[0].start(read, str(tmp_path))  # there is no folder yet
        with trainer(tmp_path) as scheme:
            scheme.send(fill(Small(), 2))
            assert workers[0].result() in (1, 2)
            assert workers[1].call(read, str(tmp_path)) == 2
            assert workers[1].call(commands.output) == [2.0] * 4
        assert workers[0].call(wait_for, 2) == [2.0] * 4  # the trainer has gone; the versions stay


@pytest.mark.parametrize("first", [True, False])
def test_workers_of_a_new_run_do_not_begin_with_weights_of_the_old_one(
    tmp_path: Path, pool: WorkerPool, first: bool
) -> None:
    """They wait for its first weights, and keep their own if it has none yet."""
    with trainer(tmp_path) as scheme:
        scheme.send(fill(Small(), 9))
    with wsync.StoreWeightSyncScheme(str(tmp_path), timeout=30.0) as scheme, pool.group(1) as workers:
        scheme.init_on_sender("policy", model=fill(Small(), 1) if first else None, num_workers=1)
        workers[0].start(commands.join, scheme, Small, 0, "policy")
        if first:
            scheme.connect()
        assert workers[0].result() == (3 if first else 0)  # it goes on counting
        if not first:
            scheme.connect()
            scheme.send(fill(Small(), 1))
        assert workers[0].call(wait_for, 3) == [1.0] * 4


# --- faults ---


def test_a_full_disk(tmp_path: Path) -> None:
    with trainer(tmp_path, model=Small(100_000)) as scheme:
        with no_file_beyond(1000), pytest.raises(wsync.WeightSyncError, match="version 2 was not stored"):
            scheme.send()
        assert newest_in(tmp_path) == 1
        assert not list(folder(tmp_path).glob("*.unfinished"))
        report = scheme.send()
        assert report is not None and report.version == 3


def test_a_store_that_cannot_be_opened(tmp_path: Path) -> None:
    scheme = wsync.StoreWeightSyncScheme("nosuchprotocol://somewhere")
    with pytest.raises(wsync.NotConnected, match="nosuchprotocol"):
        scheme.init_on_sender("policy", model=Small(), num_workers=1)
    with pytest.raises(wsync.SyncTimeout, match="has no version 1 yet"):
        reader(tmp_path, timeout=0.2)


def test_extra_state_is_refused_also_after_weights_without_any(tmp_path: Path) -> None:
    model = fill(WithExtraState(), 1)
    with trainer(tmp_path, TensorDict({"weight": model.weight.detach().clone()})) as scheme:
        for _ in range(2):
            with pytest.raises(wsync.LayoutMismatch, match=r"extra state cannot be stored: _extra_state"):
                scheme.send(fill(model, 2))
        assert newest_in(tmp_path) == 1
        scheme.send()


def test_models_that_belong_together(tmp_path: Path) -> None:
    """A worker installs both, or none."""
    names, readers, models = ("actor", "critic"), list[Any](), [Small(), Small()]
    with ExitStack() as ends:
        schemes = [ends.enter_context(wsync.StoreWeightSyncScheme(tmp_path)) for _ in names]
        for name, scheme, model in zip(names, schemes, models, strict=True):
            scheme.init_on_sender(name, model=fill(Small(), 1), num_workers=1)
            scheme.connect()
            readers.append(ends.enter_context(wsync.StoreWeightSyncScheme(tmp_path, initiator="receiver")))
            readers[-1].init_on_receiver(name, model=model, worker_idx=0)
            readers[-1].connect()
        wsync.synchronize({scheme: fill(Small(), 2) for scheme in schemes})
        assert readers[0].pull() == 1  # the other model's version has not been read yet
        assert [model()[0] for model in models] == [1, 1]
        assert readers[1].pull() == 2
        assert [model()[0] for model in models] == [2, 2]


@pytest.mark.slow
def test_training_through_a_store(tmp_path: Path) -> None:
    options = ["weight_sync=store", f"weight_sync.url={tmp_path}/store", "total_frames=3000", "logger=none"]
    run_program(ROOT / "train.py", *options, f"hydra.run.dir={tmp_path}/run", folder=tmp_path)
    assert newest_in(tmp_path / "store") > 1 and (tmp_path / "run" / "summary.json").exists()
