"""What a store and its readers do after an error, and which errors of a file system have a name."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from stores import reader, trainer

import wsync
from wsync.testing.models import Small, fill


class Failing(MemoryFileSystem):
    """A file system that raises other errors than OSError.

    Attributes:
        fails: errors, by what raises them: ``connect``, a method, or reading a kind of file.
        on_read, on_write: called with the path of each file before it is read or written.
        blocks: until this is set, nothing is read; ``blocked`` is set then.
    """

    protocol = "failing"
    fails: ClassVar[dict[str, Exception]] = {}
    on_read: ClassVar[Callable[[str], object]] = bool
    on_write: ClassVar[Callable[[str], object]] = bool
    blocks: ClassVar[threading.Event | None] = None
    blocked: ClassVar[threading.Event] = threading.Event()

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
        type(self).on_write(path)
        return super().pipe_file(path, *arguments, **options)

    def cat_file(self, path: str, *arguments: Any, **options: Any) -> Any:
        if self.blocks is not None:
            self.blocked.set()
            self.blocks.wait()
        self._raise(path.rsplit(".", 1)[-1])
        type(self).on_read(path)
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


def descriptors() -> int:
    gc.collect()  # closes what earlier tests have left
    return len(os.listdir("/proc/self/fd"))


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


def test_a_reader_that_is_in_a_read_without_an_end_can_be_shut_down(
    failing: dict[str, Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, blocks = descriptors(), threading.Event()
    with trainer("failing://run"), reader("failing://run") as receiver:
        monkeypatch.setattr(Failing, "blocks", blocks)
        assert Failing.blocked.wait(30.0)
        receiver.shutdown()
        blocks.set()
    deadline = time.monotonic() + 30.0
    while descriptors() > before and time.monotonic() < deadline:
        os.sched_yield()
    assert descriptors() == before
