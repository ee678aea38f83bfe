"""What a store and its readers do after an error, and which errors of a file system have a name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from stores import reader, trainer

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
    for method, said in (("ls", "cannot be written"), ("pipe_file", "was not stored"), ("json", "cannot be read")):
        failing[method] = error
        call = transport.setup_connection_and_weights_on_sender if method == "ls" else transport.send_weights
        with pytest.raises(wsync.WeightSyncError) as caught:
            call(*([] if method == "ls" else [Small()]))
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


def test_a_trainer_that_begins_again_in_an_emptied_folder(tmp_path: Path) -> None:
    """Its versions have the numbers of the old ones; readers take them all the same."""
    transport = wsync.StoreTransport(f"{tmp_path}/policy")
    with trainer(tmp_path) as scheme, reader(tmp_path) as watching, reader(tmp_path, initiator="receiver") as pulling:
        assert transport.receive_weights(0.0) is not None
        scheme.shutdown()
        shutil.rmtree(tmp_path / "policy")
        with trainer(tmp_path, model=fill(Small(), 5)) as other:
            assert other.version == 1
            got = transport.receive_weights(0.0)
            assert got is not None and torch.equal(got["weight"], torch.full((4,), 5.0))
            assert pulling.pull() == 1 and pulling.model()[0] == 5
            while watching.model()[0] != 5:
                assert watching.receive(0.05) is None  # that would be a newer version


@pytest.mark.parametrize("protocol", ["sftp", "smb"])
def test_a_file_system_that_writes_in_place_is_refused(
    failing: dict[str, Exception], monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    monkeypatch.setattr(Failing, "protocol", protocol)
    said = f"{protocol}:// cannot replace a file as a whole: mount that file system"
    with pytest.raises(wsync.WeightSyncError, match=said), trainer("failing://run"):
        pass
