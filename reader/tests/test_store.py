"""A reader of a store: folders, HTTP, S3; exact, of one version, and with what is wrong told."""

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from conftest import Trainer

import wsync_reader

BEGIN = """
made = model()
scheme = wsync.StoreWeightSyncScheme({url!r})
scheme.init_on_sender("policy", model=made, num_workers=1)
digests = scatter(made)
scheme.connect()
digests
"""


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

    def log_message(self, *args: object) -> None:
        pass

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
    sent = trainer.do(BEGIN.format(url=str(tmp_path)))
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
    trainer.do(BEGIN.format(url=str(tmp_path)))
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
    trainer.begin(BEGIN.format(url=str(tmp_path)))
    with wsync_reader.open(str(tmp_path), timeout=30.0) as reader:
        assert reader.version == 1
    trainer.end()


def test_a_link_that_is_cut_keeps_the_last_version(trainer: Trainer, tmp_path: Path) -> None:
    trainer.do(BEGIN.format(url=str(tmp_path)))
    with served(tmp_path) as address:
        reader = wsync_reader.open(address, timeout=20.0)
        before = reader.newest
        Handler.cut = True
        try:
            sent = trainer.do("d = scatter(made); scheme.send(); d")
            with pytest.raises(wsync_reader.NotConnected, match=r"version 1 is kept.*within its tensors"):
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
    trainer.do(BEGIN.format(url=str(tmp_path)))
    with wsync_reader.open(str(tmp_path)) as reader:
        other = tmp_path / "other"
        trainer.do(BEGIN.format(url=str(other)) + "\nscheme.send()")
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
        expected = {"flipped": "corrupt", "short": "ends within", "long": "more bytes", "missing": "No such file"}
        assert expected.get(damage, "") in reader.error != ""


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


def test_a_store_in_s3(trainer: Trainer, tmp_path: Path, make_bucket: Callable[[], str]) -> None:
    import s3fs

    sent = trainer.do(BEGIN.format(url=str(tmp_path)))
    bucket = make_bucket()
    s3fs.S3FileSystem().put(str(tmp_path), f"{bucket}/run", recursive=True)
    with wsync_reader.open(f"s3://{bucket}/run", timeout=20.0) as reader:
        with reader.weights() as weights:
            assert digests(weights) == sent
        sent = trainer.do("d = scatter(made); scheme.send(); d")
        for name in sorted(os.listdir(tmp_path / "policy"), reverse=True):  # the manifest last
            s3fs.S3FileSystem().put(str(tmp_path / "policy" / name), f"{bucket}/run/policy/{name}")
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
        s3fs.S3FileSystem().mkdir("weights")
        return "weights"

    yield make
    server.stop()
