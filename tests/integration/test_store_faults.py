"""Faults around a store, and uses that it cannot serve: the right error, never wrong weights, and what follows."""

import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import reader, trainer
from torch import nn

import wsync
from wsync.testing.models import Small, fill


def doubled(worker: int, weights: Any) -> Any:
    return weights.apply(lambda tensor: tensor * (worker + 1))


EACH = {worker: fill(Small(), worker + 5) for worker in range(2)}
ALL: dict[str, Any] = {"model": fill(Small(), 1), "num_workers": 2}


@pytest.mark.parametrize("given", [{"params_map": EACH}, {**ALL, "device_map_fn": doubled}])
def test_workers_cannot_have_different_weights(tmp_path: Path, given: dict[str, Any]) -> None:
    with wsync.StoreWeightSyncScheme(tmp_path) as scheme, pytest.raises(ValueError, match="get the same weights"):
        scheme.init_on_sender("policy", **given)


@pytest.mark.parametrize("sent", [{"weights": EACH}, {"worker_ids": [0]}])
def test_workers_cannot_be_sent_different_weights(tmp_path: Path, sent: dict[str, Any]) -> None:
    with wsync.StoreWeightSyncScheme(tmp_path) as scheme:
        scheme.init_on_sender("policy", **ALL)
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
    register_implementation("failing", Failing, clobber=True)
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


# --- another process has written: an error names file and field, and nothing is applied ---


def manifest_of(url: Path) -> Path:
    return url / "policy" / "manifest.json"


def changed(**fields: Any) -> Callable[[bytes], bytes]:
    """Return what changes fields of a manifest, or of the version that it names last."""

    def change(content: bytes) -> bytes:
        manifest = json.loads(content)
        for name, value in fields.items():
            (manifest["versions"][-1] if name in manifest["versions"][-1] else manifest)[name] = value
        return json.dumps(manifest).encode()

    return change


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        *((changed(version=value), "version") for value in (0, -1, "1", True, 1 << 40, 1 << 70)),
        *((changed(writer=value), "writer") for value in ("", "../x", "a" * 65, None)),
        *((changed(checksum=value), "checksum") for value in (1, "0", "x" * 16)),
        *((changed(layout=value), "layout") for value in ("", "AAAA", "?", None, 3)),
        (changed(requires={"a": -1}), "requires"),
        (changed(file="../x"), "unknown field"),
        *((changed(versions=value), "versions") for value in ([], None, [{}], "x")),
        (changed(version=7), r"v00000007-\w+\.safetensors: FileNotFoundError"),
        (changed(checksum="0" * 16), "corrupt"),
        (changed(whole=0, difference=1), "no whole version is before its differences"),
        *((lambda content, value=value: value, "damaged") for value in (b"", b"{", b"[]", b"[" * 100_000, b"\xff" * 9)),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], said: str) -> None:
    with trainer(tmp_path):
        manifest_of(tmp_path).write_bytes(damage(manifest_of(tmp_path).read_bytes()))
    with pytest.raises(wsync.WeightSyncError, match=rf"(manifest\.json|version \d of).*{said}"):
        reader(tmp_path, timeout=0.2)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: b"", "it has 0 bytes, not the 24"),
        (lambda content: b"\xff" * 8 + content[8:], "it has 88 bytes, not the"),
        (lambda content: content[:-1], "it has 87 bytes, not the 88"),
        (lambda content: content[:-1] + b"\1", "is corrupt"),
    ],
)
def test_a_damaged_version_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], said: str) -> None:
    model = Small()
    with trainer(tmp_path) as scheme, reader(tmp_path, model, initiator="receiver") as receiver:
        scheme.send(fill(Small(), 2))
        path = next((tmp_path / "policy").glob("v00000002*"))
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(wsync.WeightSyncError, match=rf"version 2 of .*{path.name}.*{said}"):
            receiver.pull()
        assert receiver.version == 1 and model.weight.eq(1).all()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, bytes, Small, Any]]:
    """A reader with version 1 of a store in which there is version 2."""
    url, model = tmp_path_factory.mktemp("store"), Small()
    with trainer(url) as scheme, reader(url, model, initiator="receiver") as receiver:
        scheme.send(fill(Small(), 2))
        yield url, manifest_of(url).read_bytes(), model, receiver


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_change_of_a_manifest_is_refused_or_harmless(
    shared: tuple[Path, bytes, Small, Any], data: st.DataObject
) -> None:
    url, content, model, receiver = shared
    if data.draw(st.booleans()):
        fields = json.loads(content)
        for field in data.draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=3)):
            fields[field] = data.draw(json_values)
        changed = json.dumps(fields).encode()
    else:
        damaged = bytearray(content)
        for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
            damaged[at] = data.draw(st.integers(0, 255))
        changed = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    manifest_of(url).write_bytes(changed)
    with suppress(wsync.WeightSyncError):
        assert receiver.pull() == receiver.version
    assert model.weight.eq(receiver.version).all()
