"""A store's two ends, ``Files`` and ``FileInbox``, with plain buffers."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor

from wsync.deadlines import NOW, deadline_in
from wsync.errors import LayoutMismatch, NotConnected, SyncTimeout, WeightSyncError
from wsync.store.files import Files, Store
from wsync.store.reader import FileInbox, Reader
from wsync.transforms.delta import Delta
from wsync.update import Update
from wsync.weights.binding import dump_extra
from wsync.weights.layout import Layout
from wsync.weights.packing import packed

EVERY_KIND = {
    "matrix": torch.arange(6.0).reshape(2, 3).t(),  # strides of its own
    "half": torch.ones(5, dtype=torch.bfloat16),
    "flag": torch.tensor(True),
    "empty": torch.empty(0, 3),
    "eight": torch.ones(3).to(torch.float8_e4m3fn),
}


def weights(value: float, size: int = 4) -> dict[str, Tensor]:
    return {"weight": torch.full((size,), float(value))}


class Trainer:
    """Writes versions of one layout."""

    def __init__(self, url: object, first: dict[str, Tensor], **options: Any) -> None:
        self.files = Files(Store(str(url)), **options)
        self.version = self.files.begin()
        self.layout = packed(first)[0]
        self.files.set_layout(self.layout)
        self.publish(first)

    def update(self, values: dict[str, Tensor], **options: Any) -> Update:
        buffer = self.files.reserve(NOW)
        buffer.pack([values[name] for name in self.layout.names])
        self.version += 1
        return Update(self.version, buffer, **options)

    def publish(self, values: dict[str, Tensor], **options: Any) -> None:
        self.files.publish(self.update(values, **options), [0])


class Receiver:
    """What an inbox delivers to."""

    def __init__(self) -> None:
        self.sender = ""
        self.arrived = threading.Semaphore(0)

    def settle(self) -> None:
        self.arrived.release()

    def set_layout(self, layout: Layout) -> None:
        if "refused" in layout.names:
            raise LayoutMismatch("'refused' is unknown")


@contextmanager
def reading(url: object, receiver: Receiver | None = None, oldest: int = 1, **options: Any) -> Iterator[FileInbox]:
    reader = Reader(Store(str(url)), oldest)
    inbox = FileInbox(reader, receiver or Receiver(), **{"watches": False, **options})
    try:
        yield inbox
    finally:
        inbox.close()


def take(inbox: FileInbox) -> list[float]:
    """Install what is staged; return its values."""
    (update,) = inbox.poll()
    assert not update.damage
    inbox.settled(update, "")
    assert not inbox.poll()
    return update.views[0].flatten().tolist()


def fetched(inbox: FileInbox, timeout: float = 0.0) -> int:
    inbox.fetch(deadline_in(timeout))
    return inbox.newest


@pytest.mark.parametrize("url", ["{tmp}", "memory://store-files"])
def test_every_version_arrives_by_itself(tmp_path: Path, url: str) -> None:
    url, receiver = url.format(tmp=tmp_path), Receiver()
    trainer = Trainer(url, weights(1))
    with reading(url, receiver, watches=True) as inbox:
        assert inbox.connect(0, deadline_in(10)) == 1 and take(inbox) == [1.0] * 4
        for value in (2, 3):
            trainer.publish(weights(value))
            assert receiver.arrived.acquire(timeout=10)
            assert take(inbox) == [float(value)] * 4 and inbox.newest == value
        assert receiver.sender == trainer.files.name
    assert not [thread for thread in threading.enumerate() if thread.name == "wsync-store"]


def test_every_kind_of_tensor_is_in_a_plain_safetensors_file(tmp_path: Path) -> None:
    Trainer(tmp_path, EVERY_KIND)
    with reading(tmp_path) as inbox:
        inbox.connect(0, NOW)
        (update,) = inbox.poll()
        for name, view in zip(update.buffer.layout.names, update.views, strict=True):
            assert torch.equal(view.float(), EVERY_KIND[name].float()) and view.dtype == EVERY_KIND[name].dtype
    (file,) = tmp_path.glob("v*")
    assert load_file(file).keys() == EVERY_KIND.keys()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}


def test_what_files_cannot_have_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, weights(1))
    with pytest.raises(LayoutMismatch, match="extra state cannot be stored"):
        trainer.publish(weights(2), extra=dump_extra({"a": 1}))
    with pytest.raises(LayoutMismatch, match="which a safetensors file cannot have"):
        trainer.files.set_layout(packed({"complex": torch.ones(2, dtype=torch.complex128)})[0])
    with pytest.raises(ValueError, match="the same weights"):
        trainer.files.publish(trainer.update(weights(2)), [])


def test_a_reader_that_is_first_and_one_that_finds_nothing(tmp_path: Path) -> None:
    with reading(tmp_path / "run") as inbox:
        with pytest.raises(SyncTimeout, match="has no version 1 yet"):
            inbox.connect(0, deadline_in(0.05))
        thread = threading.Thread(target=Trainer, args=[tmp_path / "run", weights(1)])
        thread.start()
        assert fetched(inbox, 10) == 1
        thread.join()
    with pytest.raises(NotConnected, match="nosuchprotocol"):
        Store("nosuchprotocol://somewhere")


def test_old_versions_are_deleted_and_a_trainer_that_begins_anew_counts_on(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, weights(1), keep=2)
    for value in (2, 3):
        trainer.publish(weights(value))
    assert [path.name[:9] for path in sorted(tmp_path.glob("v*"))] == ["v00000002", "v00000003"]
    (tmp_path / "v00000009-0.safetensors.x.unfinished").write_bytes(b"half")
    with reading(tmp_path, oldest=4, waits=False) as inbox:
        assert inbox.connect(0, NOW) == 0  # those are of an earlier run
        other = Trainer(tmp_path, weights(4, size=5), keep=1)
        assert other.version == 4 and [path.name[:9] for path in tmp_path.glob("v*")] == ["v00000004"]
        assert fetched(inbox) == 4 and take(inbox) == [4.0] * 5
    with pytest.raises(WeightSyncError, match="another trainer has published version 4"):
        trainer.publish(weights(5))
    assert [path.name[:9] for path in tmp_path.glob("v*")] == ["v00000004"]


def test_a_version_that_is_prepared_is_seen_when_it_is_committed(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, weights(1))
    with reading(tmp_path) as inbox:
        for commit in (False, True):
            update = trainer.update(weights(2), requires={"other": 7}, undecided=True)
            trainer.files.prepare(update, [0])
            assert fetched(inbox) == 1
            trainer.files.commit(update, [0]) if commit else trainer.files.abort(update.version, [0])
        assert fetched(inbox) == 3
        (staged,) = inbox.poll()
        assert staged.requires == {"other": 7} and not staged.undecided
    trainer.publish(weights(4))
    trainer.publish(weights(5))
    assert [path.name[:9] for path in sorted(tmp_path.glob("v*"))] == ["v00000003", "v00000004", "v00000005"]


def test_a_version_that_does_not_fit_is_refused_and_the_next_one_is_taken(tmp_path: Path) -> None:
    Trainer(tmp_path, weights(1))
    with reading(tmp_path) as inbox:
        inbox.connect(0, NOW)
        assert take(inbox) == [1.0] * 4
        Trainer(tmp_path, {"refused": torch.ones(4)})
        assert fetched(inbox) == 2 and "'refused' is unknown" in inbox.poll()[0].damage
        Trainer(tmp_path, weights(3))
        assert fetched(inbox) == 3 and take(inbox) == [3.0] * 4
    Trainer(tmp_path, {"refused": torch.ones(4)})
    with reading(tmp_path) as inbox, pytest.raises(LayoutMismatch, match="refused"):
        inbox.connect(0, NOW)


def test_differences(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    trainer = Trainer(tmp_path, weights(1, size=4096), delta=Delta())
    with reading(tmp_path) as inbox:
        inbox.connect(0, NOW)
        trainer.publish(weights(2, size=4096))  # the first difference: the reader has not kept its base
        assert fetched(inbox) == 2 and take(inbox) == [2.0] * 4096
        for value in (3, 4):
            trainer.publish(weights(value, size=4096))
            assert trainer.files.costs([0], value)[2] < 4096
            for whole in tmp_path.glob("v*.safetensors"):
                whole.write_bytes(b"")  # only the difference can be read
            assert fetched(inbox) == value and take(inbox) == [float(value)] * 4096


def changed(**fields: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps({**json.loads(content), **fields}).encode()


def layout_of(**fields: Any) -> str:
    return base64.b64encode(replace(packed(weights(1))[0], **fields).encode()).decode()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        *((changed(version=value), "version") for value in (0, -1, "1", True, 1 << 40, 1 << 70)),
        *((changed(writer=value), "writer") for value in ("", "../x", "a" * 65, None)),
        *((changed(checksum=value), "checksum") for value in (1, "0", "x" * 16)),
        *((changed(base=value), "base") for value in (-1, 1, 2, "1")),
        *((changed(layout=value), "layout") for value in ("", "AAAA", "?", None, 3)),
        (changed(layout=layout_of(nbytes=1 << 40)), "layout"),
        (changed(layout=layout_of(extra=frozenset({"a"}))), "layout"),
        (changed(layout=layout_of(names=("height",))), "it has no 16 bytes of 'height'"),
        (changed(layout=layout_of(dtypes=(torch.int32,))), "is corrupt"),
        (changed(layout=layout_of(dtypes=(torch.uint8,))), "it has no 4 bytes of 'weight'"),
        (changed(requires={"a": -1}), "requires"),
        (changed(file="../x"), "unknown field"),
        (changed(version=7), r"v00000007-\w+\.safetensors: .*the file is missing"),
        (changed(checksum="0" * 16), "corrupt"),
        *((lambda content, value=value: value, "damaged") for value in (b"", b"{", b"[]", b"[" * 100_000, b"\xff" * 9)),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], said: str) -> None:
    trainer, manifest = Trainer(tmp_path, weights(1)), tmp_path / "manifest.json"
    content = manifest.read_bytes()
    manifest.write_bytes(damage(content))
    with reading(tmp_path) as inbox:
        with pytest.raises(WeightSyncError, match=rf"(manifest\.json|version \d of).*{said}"):
            inbox.connect(0, NOW)
        assert not inbox.poll()
        manifest.write_bytes(content)
        trainer.publish(weights(2))
        assert fetched(inbox) == 2


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda content: b"", "ends within its header"),
        (lambda content: b"\xff" * 8 + content[8:], "ends within its header"),
        (lambda content: content[:-1], "it has no 16 bytes of 'weight'"),
        (lambda content: content.replace(b"[0,16]", b"[16,0]"), "it has no 16 bytes of 'weight'"),
        (lambda content: content[:-1] + b"\1", "is corrupt"),
    ],
)
def test_a_damaged_version_is_named(tmp_path: Path, damage: Callable[[bytes], bytes], said: str) -> None:
    trainer = Trainer(tmp_path, weights(1))
    with reading(tmp_path) as inbox:
        inbox.connect(0, NOW)
        trainer.publish(weights(2))
        path = next(tmp_path.glob("v00000002*"))
        path.write_bytes(damage(path.read_bytes()))
        with pytest.raises(WeightSyncError, match=rf"version 2 of .*{path.name}.*{said}"):
            fetched(inbox)
        assert inbox.newest == 1 and take(inbox) == [1.0] * 4


def test_a_watching_reader_logs_damage_once_and_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, manifest, receiver = Trainer(tmp_path, weights(1)), tmp_path / "manifest.json", Receiver()
    with reading(tmp_path, receiver, watches=True) as inbox:
        inbox.connect(0, NOW)
        content = manifest.read_bytes()
        manifest.write_bytes(b"{")
        for _ in range(1000):
            if "damaged" in caplog.text:
                break
            assert not receiver.arrived.acquire(timeout=0.01)
        manifest.write_bytes(content)
        trainer.publish(weights(2))
        assert receiver.arrived.acquire(timeout=10) and take(inbox) == [2.0] * 4
    assert caplog.text.count("damaged") == 1
