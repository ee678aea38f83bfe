"""A reader of a store: folders, HTTP, S3; exact, of one version, and with what is wrong told."""

import base64
import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest
from conftest import Trainer

import wsync_reader

BEGIN = """
made = model()
scheme = wsync.StoreWeightSyncScheme({url!r}, **{form})
scheme.init_on_sender("policy", model=made, num_workers=1)
digests = scatter(made)
scheme.connect()
digests
"""
FILES, FOLDERS = {"anchor_every": 4}, {"anchor_every": 4, "layout": "hf", "shard_bytes": 20_000}
SHARDS = [f"/model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]


def begin(trainer: Trainer, folder: Path, **form: object) -> dict[str, str]:
    """Have a trainer publish version 1; return the digests of its weights."""
    return trainer.do(BEGIN.format(url=str(folder), form=form))


def digests(weights: wsync_reader.Weights) -> dict[str, str]:
    return {name: hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest() for name, array in weights.items()}


def values(weights: wsync_reader.Weights) -> set[float]:
    """The values of all float32 weights."""
    found = set[float]()
    for name, array in weights.items():
        if weights.dtypes[name] == "float32":
            found |= {*np.unique(array).tolist()}
    return found


class Handler(SimpleHTTPRequestHandler):
    cut = False  # whether the server closes connections in the middle of a version's file
    gone: ClassVar[str | None] = None  # it closes them without an answer, if the name of a file ends with that
    asked: ClassVar[list[str]] = []  # the files, but manifests

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if Handler.gone is not None and self.path.endswith(Handler.gone):
            self.close_connection = True
            return
        if not self.path.endswith("manifest.json"):
            Handler.asked.append(self.path.removeprefix("/policy/"))
        super().do_GET()

    def copyfile(self, source: object, outputfile: object) -> None:
        if Handler.cut and self.path.endswith(".safetensors"):
            outputfile.write(source.read(20_000))  # type: ignore[attr-defined]
        else:
            super().copyfile(source, outputfile)  # type: ignore[arg-type]


@contextmanager
def served(folder: Path, host: str = "127.0.0.1") -> Iterator[str]:
    with ThreadingHTTPServer((host, 0), partial(Handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://{host}:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("medium", ["path", "file", "http"])
def test_versions_are_exact(trainer: Trainer, tmp_path: Path, medium: str) -> None:
    sent = begin(trainer, tmp_path)
    with served(tmp_path) as address:
        url = {"path": str(tmp_path), "file": f"file://{tmp_path}", "http": address}[medium]
        with wsync_reader.open(url, timeout=20.0) as reader:
            assert reader.version == 1 and reader.error == ""
            with reader.weights() as weights:
                assert digests(weights) == sent
            for version in range(2, 5):
                sent = trainer.do("d = scatter(made); scheme.send(); d")
                received = reader.receive(20.0)
                assert received is not None and received.version == version == reader.version
                assert digests(received) == sent
            assert reader.receive(0.1) is None


def test_arrays_are_of_one_version_tied_and_cannot_be_written(trainer: Trainer, tmp_path: Path) -> None:
    begin(trainer, tmp_path)
    with wsync_reader.open(str(tmp_path)) as reader, reader.weights() as weights:
        trainer.do("fill(made, 3); scheme.send()")
        newer = reader.receive(20.0)
        assert newer is not None and values(newer) == {3.0} and weights.version == 1 and values(weights) != {3.0}
        assert weights["tied.weight"] is weights["1.weight"]
        assert weights["turned"].shape == (6, 5) and weights["count"].shape == ()
        assert weights.dtypes["small"] == "bfloat16" and weights["small"].dtype.itemsize == 2
        assert weights["small"].dtype.name == ("bfloat16" if has_ml_dtypes() else "uint16")
        with pytest.raises(ValueError, match="read-only"):
            weights["0.weight"][0, 0] = 1.0


def has_ml_dtypes() -> bool:
    try:
        import ml_dtypes  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def test_a_reader_waits_for_the_first_version(trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(wsync_reader.SyncTimeout, match="no version in time"):
        wsync_reader.open(str(tmp_path / "none"), timeout=0.2)
    trainer.begin(BEGIN.format(url=str(tmp_path), form={}))
    with wsync_reader.open(str(tmp_path), timeout=30.0) as reader:
        assert reader.version == 1
    trainer.end()


def test_a_link_that_is_cut_keeps_the_last_version(trainer: Trainer, tmp_path: Path) -> None:
    begin(trainer, tmp_path)
    with served(tmp_path) as address:
        reader = wsync_reader.open(address, timeout=20.0)
        before = reader.newest
        Handler.cut = True
        try:
            sent = trainer.do("d = scatter(made); scheme.send(); d")
            with pytest.raises(wsync_reader.NotConnected, match=r"version 1 is kept.*ends too early"):
                reader.receive(1.0)
            with reader.weights() as weights:
                assert weights is before
        finally:
            Handler.cut = False
        received = reader.receive(20.0)
        assert received is not None and received.version == 2 and digests(received) == sent and reader.error == ""
    with pytest.raises(wsync_reader.NotConnected, match="version 2 is kept"):
        reader.receive()
    reader.close()
    assert reader.closed and not reader.finished and reader.version == 2


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "manifest", "layout", "missing"])
def test_a_damaged_version_is_not_used(trainer: Trainer, tmp_path: Path, damage: str) -> None:
    begin(trainer, tmp_path)
    with wsync_reader.open(str(tmp_path)) as reader:
        other = tmp_path / "other"
        begin(trainer, other)
        trainer.do("scheme.send()")
        manifest = json.loads((other / "policy" / "manifest.json").read_text())
        (file,) = (other / "policy").glob("v00000002-*")
        content = bytearray(file.read_bytes())
        if damage == "flipped":
            content[-1] ^= 1
        content = content[:-1] if damage == "short" else content + b"x" if damage == "long" else content
        if damage == "layout":
            manifest["layout"] = manifest["layout"][:-8]
        text = "{" if damage == "manifest" else json.dumps(manifest)
        if damage != "missing":
            (tmp_path / "policy" / file.name).write_bytes(content)
        (tmp_path / "manifest").write_text(text)
        os.replace(tmp_path / "manifest", tmp_path / "policy" / "manifest.json")
        with pytest.raises(wsync_reader.NotConnected, match="version 1 is kept"):
            reader.receive(0.5)
        expected = {"flipped": "corrupt", "short": "ends too early", "long": "more bytes", "missing": "No such file"}
        assert expected.get(damage, "") in reader.error != ""


def asked() -> list[str]:
    """The files that were read since the last call, with a star for the writer."""
    names = [re.sub("-[0-9a-f]{8}", "-*", name, count=1) for name in Handler.asked]
    Handler.asked.clear()
    return names


@pytest.mark.parametrize("form", [FILES, FOLDERS], ids=["files", "folders"])
def test_readers_read_what_has_the_fewest_bytes(trainer: Trainer, tmp_path: Path, form: dict[str, object]) -> None:
    """One that follows: differences; a late one: an anchor and the differences since; one that was away: either."""

    def whole(version: int) -> list[str]:
        return [f"v{version:08d}-*{end}" for end in (SHARDS if form is FOLDERS else [".safetensors"])]

    def differences(*versions: int) -> list[str]:
        return [f"v{version:08d}-*.difference" for version in versions]

    sent = begin(trainer, tmp_path, **form)
    asked()
    with served(tmp_path) as address, wsync_reader.open(address, timeout=20.0) as reader:
        assert reader.newest is not None and digests(reader.newest) == sent and asked() == whole(1)
        assert reader.newest["tied.weight"] is reader.newest["1.weight"]
        for version in range(2, 12):
            sent = trainer.do("d = nudge(made); scheme.send(); d")
            received = reader.receive(20.0)
            assert received is not None and received.version == version and digests(received) == sent
            assert asked() == differences(version)
            with wsync_reader.open(address, timeout=20.0) as late:
                assert late.newest is not None and digests(late.newest) == sent
            anchor = (version - 1) // 4 * 4 + 1
            assert asked() == whole(anchor) + differences(*range(anchor + 1, version + 1))
        kept, way = received, differences(12, 13, 14, 15)
        for Handler.gone, changes in (".difference", [1, 1, 1, 1]), ("", [60, 60, 1, 1]):
            try:
                sent = trainer.do(f"for rows in {changes}:\n    d = nudge(made, rows); scheme.send()\nd")
                with pytest.raises(wsync_reader.NotConnected, match="Remote end closed connection"):
                    while reader.receive(0.1) is None:
                        assert reader.newest is kept
            finally:
                Handler.gone = None
            kept = reader.receive(20.0)
            assert kept is not None and digests(kept) == sent and asked() == way
            way = whole(17) + differences(18, 19)


def copy(store: Path, target: Path, changed: Mapping[str, Callable[[bytes], bytes | None]]) -> None:
    """Copy a store, its manifest last, with files ``changed`` by what their names begin with; None: not copied."""
    for path in sorted([path for path in store.rglob("*") if path.is_file()], reverse=True):
        to, content = target / path.relative_to(store), path.read_bytes()
        to.parent.mkdir(parents=True, exist_ok=True)
        change = next((change for name, change in changed.items() if path.match(name)), bytes)
        if (new := change(content)) is not None and not (to.exists() and to.read_bytes() == new):
            to.with_name("unfinished").write_bytes(new)
            to.with_name("unfinished").rename(to)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda good, before: good[:-1], "too early"),
        (lambda good, before: before, r"a difference to weights with the checksum \w{16}, not \w{16}"),
        (lambda good, before: good[:8] + b"\x08" + good[9:], "corrupt"),
        (lambda good, before: good[:8] + b"\x03" + good[9:], "the difference is not one of"),
        (lambda good, before: good[:30] + bytes([good[30] ^ 255]) + good[31:], "corrupt|malformed"),
        (lambda good, before: None, "No such file"),
    ],
    ids=["short", "base", "width", "form", "flipped", "missing"],
)
@pytest.mark.parametrize("form", [FILES, FOLDERS], ids=["files", "folders"])
def test_a_damaged_difference_is_named_and_the_next_anchor_repairs(
    trainer: Trainer,
    tmp_path: Path,
    form: dict[str, object],
    damage: Callable[[bytes, bytes], bytes | None],
    said: str,
) -> None:
    run, seen = tmp_path / "run", tmp_path / "seen"
    begin(trainer, run, **form)
    trainer.do("nudge(made); scheme.send()")
    (file,) = (run / "policy").glob("v00000002-*.difference")
    before = file.read_bytes()
    changed = {"v00000003-*.difference": lambda good: damage(good, before)}
    copy(run, seen, changed)
    with wsync_reader.open(str(seen)) as reader:
        kept = reader.newest
        assert kept is not None and kept.version == 2
        for _ in (3, 4):
            trainer.do("nudge(made); scheme.send()")
            copy(run, seen, changed)
            with pytest.raises(
                wsync_reader.NotConnected, match=rf"version 2 is kept.*v00000003-.*difference.*({said})"
            ):
                reader.receive(0.5)
            assert reader.newest is kept
            with pytest.raises(wsync_reader.WeightSyncError, match=rf"v00000003-.*difference.*({said})"):
                wsync_reader.open(str(seen))
        for version in (5, 6):
            sent = trainer.do("d = nudge(made); scheme.send(); d")
            copy(run, seen, changed)
            with wsync_reader.open(str(seen)) as late:
                for received in (reader.receive(20.0), late.newest):
                    assert received is not None and received.version == version and digests(received) == sent
            assert reader.error == ""


def test_a_damaged_folder_is_not_used(trainer: Trainer, tmp_path: Path) -> None:
    """Where there is another way, it is taken; where there is none, the folder is named."""
    run, seen = tmp_path / "run", tmp_path / "seen"
    begin(trainer, run, **FOLDERS)
    copy(run, seen, {})
    with wsync_reader.open(str(seen)) as reader:
        sent = trainer.do("for _ in range(4):\n    d = nudge(made, 60); scheme.send()\nd")
        copy(run, seen, {f"v00000005-*{SHARDS[1]}": lambda good: good[:-1]})
        received = reader.receive(20.0)
        assert received is not None and received.version == 5 and digests(received) == sent
    copy(run, tmp_path / "other", {f"*{SHARDS[0]}": lambda good: good[:-1] + bytes([good[-1] ^ 1])})
    with pytest.raises(wsync_reader.WeightSyncError, match=r"v00000005-\w{8} is damaged.*corrupt"):
        wsync_reader.open(str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"writer": "../policy"}, r"\$.writer"),
        ({"versions": []}, r"\$.versions"),
        ({"shard_bytes": -1}, r"\$.shard_bytes"),
        ({"requires": {"actor": -1}}, r"\$.requires"),
        ({"more": 1}, "unknown field `more`"),
        ({"version": 0}, r"\$.versions\[0\].version"),
        ({"checksum": "00"}, r"\$.versions\[0\].checksum"),
        ({"whole": -1}, r"\$.versions\[0\].whole"),
        ({"difference": 2**60}, r"\$.versions\[0\].difference"),
        ({"whole": 0}, "no whole version is before its differences"),
        ({"nbytes": 2**50}, "a layout that was received is malformed"),
    ],
)
def test_a_manifest_is_checked(trainer: Trainer, tmp_path: Path, fields: dict[str, object], said: str) -> None:
    begin(trainer, tmp_path)
    with wsync_reader.open(str(tmp_path)) as reader:
        file = tmp_path / "policy" / "manifest.json"
        manifest = json.loads(file.read_text())
        stored = manifest["versions"][0] | {"version": 2}
        if "nbytes" in fields:
            *begin_of_layout, _, extra, more = msgspec.msgpack.decode(base64.b64decode(manifest["layout"]))
            layout = msgspec.msgpack.encode([*begin_of_layout, fields["nbytes"], extra, more])
            fields = {"layout": base64.b64encode(layout).decode()}
        known = {name: one for name, one in fields.items() if name in stored}
        wrong = manifest | {"versions": [stored | known]} | {k: v for k, v in fields.items() if k not in stored}
        (tmp_path / "wrong").write_text(json.dumps(wrong))
        (tmp_path / "wrong").rename(file)
        with pytest.raises(wsync_reader.NotConnected, match=rf"version 1 is kept.*manifest.json is damaged.*{said}"):
            reader.receive(0.5)


def test_differences_need_an_extra(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(trainer, tmp_path)
    with wsync_reader.open(str(tmp_path)) as reader, monkeypatch.context() as patch:
        patch.setitem(sys.modules, "zstandard", None)  # as if it were not installed
        sent = begin(trainer, tmp_path, **FILES)
        missing = r"zstandard is missing: pip install 'wsync-rl-reader\[delta\]'"
        with pytest.raises(wsync_reader.NotConnected, match=f"version 1 is kept.*{missing}"):
            reader.receive(0.5)
        with pytest.raises(ModuleNotFoundError, match=missing):
            wsync_reader.open(str(tmp_path))
        patch.undo()
        received = reader.receive(20.0)
        assert received is not None and received.version == 2 and digests(received) == sent


def test_models_that_are_sent_together_arrive_together(trainer: Trainer, tmp_path: Path) -> None:
    trainer.do(
        f"schemes = {{}}\n"
        f"for name in ('actor', 'critic'):\n"
        f"    schemes[name] = wsync.StoreWeightSyncScheme({str(tmp_path)!r})\n"
        f"    schemes[name].init_on_sender(name, model=model(1), num_workers=1)\n"
        f"    schemes[name].connect()\n"
    )
    with (
        wsync_reader.open(str(tmp_path), model="actor") as actor,
        wsync_reader.open(str(tmp_path), model="critic") as critic,
    ):
        trainer.begin(
            "for value in range(2, 60):\n    wsync.synchronize({scheme: model(value) for scheme in schemes.values()})\n"
        )
        seen = set[float]()
        while 59.0 not in seen:
            with wsync_reader.gate(actor, critic) as (one, other):
                assert values(one) == values(other)
                seen |= values(one)
        trainer.end()
        assert len(seen) > 3


@pytest.mark.parametrize("form", [{}, FOLDERS], ids=["files", "folders"])
def test_a_store_in_s3(
    trainer: Trainer, tmp_path: Path, make_bucket: Callable[[], str], form: dict[str, object]
) -> None:
    import s3fs

    sent = begin(trainer, tmp_path, **form)
    bucket = f"{make_bucket()}/{tmp_path.name}"
    s3fs.S3FileSystem().put(str(tmp_path), f"{bucket}/run", recursive=True)
    with wsync_reader.open(f"s3://{bucket}/run", timeout=20.0) as reader:
        with reader.weights() as weights:
            assert digests(weights) == sent
        sent = trainer.do("d = nudge(made); scheme.send(); d")
        for path in sorted((tmp_path / "policy").iterdir(), reverse=True):  # the manifest last
            to = f"{bucket}/run/policy/{'' if path.is_dir() else path.name}"
            s3fs.S3FileSystem().put(str(path), to, recursive=path.is_dir())
        received = reader.receive(20.0)
        assert received is not None and digests(received) == sent


@pytest.fixture
def make_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "none",
        "AWS_SECRET_ACCESS_KEY": "none",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)

    def make() -> str:
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().makedirs("weights", exist_ok=True)
        return "weights"

    yield make
    server.stop()
