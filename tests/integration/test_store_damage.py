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


def manifest_of(url: Path) -> Path:
    return url / "policy" / "manifest.json"


WRONG: list[tuple[str, Any]] = [
    *(("version", value) for value in (0, "1", True, None, 7, 1 << 70)),
    *(("writer", value) for value in ("", "../x", None, "another")),
    *(("layout", value) for value in ("", "[]", "[" * 100_000, None)),
    *(("checksum", value) for value in (-1, "0", 1)),
    ("file", "../../x"),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_field_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    with trainer(tmp_path):
        path, model = manifest_of(tmp_path), fill(Small(), 9)
        content = path.read_bytes()
        path.write_text(json.dumps({**json.loads(content), field: value}))
        with pytest.raises(wsync.WeightSyncError, match=r"manifest\.json|version \d"):
            reader(tmp_path, model)
        assert model.weight.eq(9).all()
        path.write_bytes(content)
        with reader(tmp_path, model) as scheme:
            assert scheme.version == 1 and model.weight.eq(1).all()


@pytest.mark.parametrize("content", [b"", b"[]", b"[" * 100_000, b"\xff" * 9, b"9" * 5000])
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
        with pytest.raises(wsync.WeightSyncError, match=r"manifest\.json"):
            reader(tmp_path, Small())


@pytest.mark.parametrize("name", ["manifest.json", "v00000001-*"])
def test_a_pipe_or_a_device_is_not_read(tmp_path: Path, name: str) -> None:
    """Reading would wait, or never end."""
    with trainer(tmp_path):
        (path,) = (tmp_path / "policy").glob(name)
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(wsync.WeightSyncError, match=path.name):
            reader(tmp_path, Small())
        path.unlink()
        path.symlink_to("/dev/zero")
        with pytest.raises(wsync.WeightSyncError, match=path.name):
            reader(tmp_path, Small())


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"",
        lambda content: struct.pack("<Q", 1 << 62) + content[8:],
        lambda content: content[:-1],
        lambda content: content + b"more",
        lambda content: content.replace(b'"F32"', b'"I32"'),
        lambda content: content.replace(b"[4]", b"[2]"),
        lambda content: content.replace(b"weight", b"height"),
        lambda content: content[:-1] + b"\1",
        lambda content: pickle.dumps(content),
    ],
)
def test_a_damaged_version_is_named(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    with trainer(tmp_path):
        (path,) = (tmp_path / "policy").glob("v00000001-*")
        path.write_bytes(change(path.read_bytes()))
        model = fill(Small(), 9)
        with pytest.raises(wsync.WeightSyncError, match="version 1 "):
            reader(tmp_path, model)
        assert model.weight.eq(9).all()


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
