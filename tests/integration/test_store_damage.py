"""Stores in which another process has written: an error names file and field, and nothing is applied."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import reader, replace, trainer

import wsync
from wsync.testing.models import Small, fill
from wsync.weights.layout import Layout

Fields = dict[str, Any]


def manifest_of(url: Path) -> Path:
    return url / "policy" / "manifest.json"


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
        layout = replace_fields(Layout.decode(base64.b64decode(fields["layout"])), shapes=(torch.Size([1 << 44]),))
        fields["layout"] = base64.b64encode(replace_fields(layout, nbytes=4 << 44).encode()).decode()
        replace(manifest_of(tmp_path), json.dumps(fields).encode())
        with pytest.raises(wsync.WeightSyncError, match="not F32"):
            receiver.pull()
    assert "the full version is read" not in caplog.text  # as after a MemoryError


def test_a_trainer_does_not_overwrite_a_manifest_that_it_cannot_read(tmp_path: Path) -> None:
    with trainer(tmp_path) as scheme:
        manifest_of(tmp_path).write_bytes(b"{")
        with pytest.raises(wsync.WeightSyncError, match=r"manifest\.json .* is damaged"):
            scheme.send()


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
        changes = ({"file": "../../x"}, {"checksum": "-1"}, {"version": 8}, {"layout": "{", "writer": "other"})
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
