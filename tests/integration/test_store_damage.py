"""Stores in which another process has written: an error names file and field, and nothing is applied."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import reader, replace, trainer

import wsync
from wsync.testing.models import Small, fill

Fields = dict[str, Any]


def manifest_of(url: Path) -> Path:
    return url / "policy" / "manifest.json"


def with_layout(change: Callable[[list[Any]], None]) -> Callable[[Fields], None]:
    def changed(fields: Fields) -> None:
        settings_ = json.loads(fields["layout"])
        change(settings_[0])
        fields["layout"] = json.dumps(settings_)

    return changed


def larger(layout: list[Any]) -> None:
    layout[2], layout[6] = [[1 << 44]], 4 << 44


def roomier(layout: list[Any]) -> None:
    layout[6] = 1 << 40


def stateful(layout: list[Any]) -> None:
    layout[7] = ["_extra_state"]


def other_name(layout: list[Any]) -> None:
    layout[0] = ["height"]


def other_dtype(layout: list[Any]) -> None:
    layout[1] = ["int32"]


WRONG: list[tuple[str, Any, str]] = [
    *(("version", value, "field 'version'") for value in (0, -1, "1", 1.0, True, None, 1 << 40, 1 << 70)),
    ("version", 7, r"v00000007-\w+\.safetensors: the file is missing"),
    *(("writer", value, "field 'writer'") for value in ("", "../x", "a" * 65, None, "é")),
    ("writer", "another", r"v00000001-another\.safetensors: the file is missing"),
    *(("layout", value, "field 'layout'") for value in ("", "[]", "\ud800", "[" * 100_000, None, "9" * 5000)),
    *(("checksum", value, "field 'checksum'") for value in (-1, 1 << 64, "0", 1.5)),
    ("checksum", 1, "corrupt"),
    *(("base", value, "field 'base'") for value in (-1, 1, 2, "1")),
    ("file", "../../x", "unknown field 'file'"),
]


@pytest.mark.parametrize(("field", "value", "said"), WRONG)
def test_a_wrong_field_is_named(tmp_path: Path, field: str, value: Any, said: str) -> None:
    refuse(tmp_path, lambda fields: fields.update({field: value}), said)


@pytest.mark.parametrize("field", ["version", "writer", "layout", "checksum"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    refuse(tmp_path, lambda fields: fields.pop(field), f"field '{field}' is missing")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (roomier, "field 'layout'.* take 64 bytes"),
        (stateful, "field 'layout'.*extra state"),
        (other_name, r"'weight' is not in the layout"),
        (other_dtype, r"'weight' is F32\[4\], not I32\[4\]"),
    ],
)
def test_a_layout_of_other_weights_is_refused(tmp_path: Path, change: Callable[[list[Any]], None], said: str) -> None:
    refuse(tmp_path, with_layout(change), said)


def test_no_memory_is_allocated_for_more_than_the_file_has(tmp_path: Path) -> None:
    refuse(tmp_path, with_layout(larger), r"'weight' is F32\[4\], not F32\[17592186044416\]")


def refuse(url: Path, change: Callable[[Fields], Any], said: str) -> None:
    """Check that a changed manifest is refused, and that a reader is none the worse for it."""
    with trainer(url):
        path, model = manifest_of(url), fill(Small(), 9)
        content = path.read_bytes()
        fields = json.loads(content)
        change(fields)
        path.write_text(json.dumps(fields))
        with pytest.raises(wsync.WeightSyncError, match=rf"(manifest\.json|version \d of|v00000001).*{said}"):
            reader(url, model)
        assert model.weight.eq(9).all()
        path.write_bytes(content)
        with reader(url, model) as scheme:
            assert scheme.version == 1 and model.weight.eq(1).all()


def test_no_memory_is_allocated_for_a_difference_of_another_layout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("zstandard", reason="the extra wsync[delta] is not installed")
    with (
        trainer(tmp_path, send_transform=wsync.transforms.Delta()) as scheme,
        reader(tmp_path, Small(), initiator="receiver") as receiver,
    ):
        scheme.send(fill(Small(), 2))
        fields = json.loads(manifest_of(tmp_path).read_bytes())
        assert fields["base"] == 1
        with_layout(larger)(fields)
        replace(manifest_of(tmp_path), json.dumps(fields).encode())
        with pytest.raises(wsync.WeightSyncError, match="not F32"):
            receiver.pull()
    assert "the full version is read" not in caplog.text  # as after a MemoryError


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff" * 9, b"9" * 5000])
def test_a_manifest_that_is_no_object(tmp_path: Path, content: bytes) -> None:
    with trainer(tmp_path) as scheme:
        manifest_of(tmp_path).write_bytes(content)
        with pytest.raises(wsync.WeightSyncError, match=r"manifest\.json .* is damaged"):
            reader(tmp_path, Small())
        with pytest.raises(wsync.WeightSyncError, match=r"manifest\.json .* is damaged"):
            scheme.send()  # the trainer does not overwrite what it cannot read


def test_a_manifest_without_end(tmp_path: Path) -> None:
    with trainer(tmp_path):
        os.truncate(manifest_of(tmp_path), 1 << 40)
        with pytest.raises(wsync.WeightSyncError, match="more than 67108864 bytes"):
            reader(tmp_path, Small())


@pytest.mark.parametrize("name", ["manifest.json", "v00000001-*"])
def test_a_pipe_or_a_device_is_not_read(tmp_path: Path, name: str) -> None:
    """Reading would wait, or never end."""
    with trainer(tmp_path):
        (path,) = (tmp_path / "policy").glob(name)
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(wsync.WeightSyncError, match=f"{path.name} is no regular file"):
            reader(tmp_path, Small())
        path.unlink()
        path.symlink_to("/dev/zero")
        with pytest.raises(wsync.WeightSyncError, match=f"{path.name} is no regular file"):
            reader(tmp_path, Small())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: b"", "ends within its header"),
        (lambda content: struct.pack("<Q", 1 << 62) + content[8:], "ends within its header"),
        (lambda content: content[:-1], "its tensors end at byte 16"),
        (lambda content: content + b"more", "its tensors end at byte 16"),
        (lambda content: content.replace(b'"F32"', b'"I32"'), r"'weight' is I32\[4\], not F32\[4\]"),
        (lambda content: content.replace(b"[4]", b"[2]"), r"'weight' is F32\[2\], not F32\[4\]"),
        (lambda content: content.replace(b"weight", b"height"), "'height' is not in the layout"),
        (lambda content: content.replace(b"[0,16]", b"[16,0]"), "wrong offsets"),
        (lambda content: content[:-1] + b"\1", "arrived corrupt"),
        (lambda content: pickle.dumps(content), "safetensors"),
    ],
)
def test_a_damaged_version_is_named(tmp_path: Path, change: Callable[[bytes], bytes], said: str) -> None:
    with trainer(tmp_path):
        (path,) = (tmp_path / "policy").glob("v00000001-*")
        path.write_bytes(change(path.read_bytes()))
        model = fill(Small(), 9)
        with pytest.raises(wsync.WeightSyncError, match=rf"version 1 .*{path.name}.*{said}"):
            reader(tmp_path, model)
        assert model.weight.eq(9).all()


def test_a_version_under_the_name_of_a_newer_one(tmp_path: Path) -> None:
    with trainer(tmp_path) as scheme, reader(tmp_path, model := Small(), initiator="receiver") as receiver:
        (old,) = (tmp_path / "policy").glob("v00000001-*")
        scheme.send(fill(Small(), 2))
        (new,) = (tmp_path / "policy").glob("v00000002-*")
        replace(new, old.read_bytes())
        with pytest.raises(wsync.WeightSyncError, match="corrupt"):
            receiver.pull()
        assert receiver.version == 1 and model.weight.eq(1).all()


def test_files_of_other_processes_do_not_push_out_the_newest_version(tmp_path: Path) -> None:
    with trainer(tmp_path, keep=1) as scheme:
        (tmp_path / "policy" / "v99999999-other.safetensors").write_bytes(b"")
        scheme.send(fill(Small(), 2))
        with reader(tmp_path, model := Small()) as receiver:
            assert receiver.version == 2 and model.weight.eq(2).all()


def test_a_watching_reader_survives_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The thread that watches, and the one that reads, go on: the next version is installed."""
    with trainer(tmp_path) as scheme, reader(tmp_path, model := Small()) as receiver:
        content = manifest_of(tmp_path).read_bytes()
        fields = json.loads(content)
        changes = ({"file": "../../x"}, {"checksum": -1}, {"version": 8}, {"layout": "{", "writer": "other"})
        for number, change in enumerate(changes, 1):
            replace(manifest_of(tmp_path), json.dumps({**fields, **change}).encode())
            while len(caplog.records) < number:
                assert receiver.receive(0.05) is None
            assert model.weight.eq(1).all()
        replace(manifest_of(tmp_path), content)
        scheme.send(fill(Small(), 2))
        assert receiver.receive(30.0) is not None
        assert model.weight.eq(2).all()


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
