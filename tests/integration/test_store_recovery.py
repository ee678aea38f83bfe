"""What a store and its readers do after an error, and which errors of a file system have a name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from stores import reader, trainer
from torch import nn

import wsync
from wsync.testing.models import Small, fill


class Failing(MemoryFileSystem):
    """A file system that raises other errors than OSError: ``fails`` has them by what raises them."""

    protocol = "failing"
    fails: ClassVar[dict[str, Exception]] = {}

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._raise("connect")

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("failing://", "memory://"))

    def _raise(self, name: str) -> None:
        if name in self.fails:
            raise self.fails[name]

    def makedirs(self, *arguments: Any, **options: Any) -> None:
        self._raise("makedirs")
        super().makedirs(*arguments, **options)

    def ls(self, *arguments: Any, **options: Any) -> Any:
        self._raise("ls")
        return super().ls(*arguments, **options)

    def pipe_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._raise("pipe_file")
        return super().pipe_file(path, *arguments, **options)

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._raise(path.rsplit(".", 1)[-1])
        return super().cat_file(path, *arguments, **options)


class LibraryError(Exception):
    """As botocore's: no OSError."""


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Exception]]:
    fails = dict[str, Exception]()
    monkeypatch.setattr(Failing, "fails", fails)
    fsspec.register_implementation("failing", Failing, clobber=True)
    Failing.clear_instance_cache()
    yield fails
    MemoryFileSystem.store.clear()


def test_a_version_that_could_not_be_read_is_read_again(
    failing: dict[str, Exception], caplog: pytest.LogCaptureFixture
) -> None:
    with trainer("failing://run") as scheme, reader("failing://run") as receiver:
        failing["safetensors"] = LibraryError("the connection was lost")
        scheme.send(fill(Small(), 2))
        while caplog.text.count("connection was lost") < 1:
            assert receiver.receive(0.05) is None
        assert receiver.receive(0.5) is None  # the error is logged once
        del failing["safetensors"]
        assert receiver.receive(30.0) is not None and receiver.version == 2
        assert receiver.model()[0] == 2
    assert caplog.text.count("the connection was lost") == 1


def test_errors_of_a_library_name_the_store(failing: dict[str, Exception], caplog: pytest.LogCaptureFixture) -> None:
    url_of_it = "failing://user:secret@run/policy?sig=secret"
    others = "failing://user:secret@run, failing://user:secret@run/policy/manifest.json?sig=a%2Fsecret"
    error = LibraryError(f"access to {url_of_it} is denied ({others})")
    url, named = "failing://user:secret@run/policy?sig=secret", "failing://run/policy"
    transport = wsync.StoreTransport(url)
    transport.setup_connection_and_weights_on_sender()
    for method, said in (
        ("makedirs", "cannot be written"),
        ("pipe_file", "was not stored"),
        ("json", "cannot be read"),
    ):
        failing[method] = error
        call = transport.setup_connection_and_weights_on_sender if method == "makedirs" else transport.send_weights
        with pytest.raises(wsync.WeightSyncError) as caught:
            call(*([] if method == "makedirs" else [Small()]))
        assert said in str(caught.value) and named in str(caught.value) and "secret" not in str(caught.value)
        del failing[method]
    failing["ls"] = error
    transport.send_weights(fill(Small(), 3))  # it is published: only old versions cannot be deleted
    del failing["ls"]
    assert "cannot be deleted" in caplog.text and "secret" not in caplog.text
    transport.send_weights(fill(Small(), 4))
    failing["connect"] = error
    Failing.clear_instance_cache()
    with pytest.raises(wsync.NotConnected, match=f"the store {named} cannot be opened: LibraryError") as caught:
        wsync.StoreTransport(url)
    assert "secret" not in str(caught.value)


def test_a_later_trainer_with_another_layout(tmp_path: Path) -> None:
    """A trainer with the names in another order, one with weights that do not fit, and one like the first."""
    given = wsync.StoreTransport(f"{tmp_path}/policy")
    model, copy = nn.Linear(4, 2), nn.Linear(4, 2)
    given.setup_connection_and_weights_on_sender()
    given.send_weights(model)
    with wsync.StoreWeightSyncScheme(str(tmp_path), initiator="receiver") as receiver:
        receiver.init_on_receiver("policy", model=copy, worker_idx=0)
        receiver.connect()
        for weights in (dict(reversed(model.state_dict().items())), nn.Linear(5, 2), model):
            nn.init.normal_(model.weight)
            later, before = wsync.StoreTransport(f"{tmp_path}/policy"), copy.weight.clone()
            later.setup_connection_and_weights_on_sender()
            later.send_weights(weights)
            if isinstance(weights, nn.Linear) and weights.in_features == 5:
                with pytest.raises(wsync.WeightSyncError, match="'weight'"):
                    receiver.pull()
                assert torch.equal(copy.weight, before)
            else:
                receiver.pull()
                assert torch.equal(copy.weight, model.weight)
        assert torch.equal(copy(torch.ones(4)), model(torch.ones(4)))


@pytest.mark.parametrize("model_id", ["", ".", ".."])
def test_a_model_id_that_is_no_folder(tmp_path: Path, model_id: str) -> None:
    with (
        wsync.StoreWeightSyncScheme(f"{tmp_path}/run") as scheme,
        pytest.raises(ValueError, match="model_id is the name of a folder"),
    ):
        scheme.init_on_sender(model_id, model=Small(), num_workers=1)


def test_a_relative_path_is_resolved_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scheme, transport = wsync.StoreWeightSyncScheme("run"), wsync.StoreTransport(Path("run/policy"))
    monkeypatch.chdir("/")
    scheme.init_on_sender("policy", model=fill(Small(), 1), num_workers=1)
    scheme.connect()
    assert (tmp_path / "run" / "policy" / "manifest.json").exists()
    assert transport.receive_weights(0.0) is not None
    scheme.shutdown()
    with pytest.raises(ValueError, match="the path of a folder"):
        wsync.StoreWeightSyncScheme("")
