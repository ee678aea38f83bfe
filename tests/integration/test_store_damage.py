"""Stores in which another process has written: an error names file and field, and nothing is applied."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stores import reader, trainer

import wsync
from wsync.testing.models import Small, fill


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
