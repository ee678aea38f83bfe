"""Stores with exact differences between anchors, and Hugging Face folders: on a disk, and in an S3 server."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from programs import run_program
from stores import reader, trainer

import wsync

ROOT = Path(__file__).parents[2]
HF = {"shard_bytes": 4000}


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    server = pytest.importorskip("moto.server", reason="needs an S3 server and a client: pip install '.[s3-server]'")
    pytest.importorskip("s3fs", reason="needs an S3 client: pip install '.[s3]'")
    running = server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "anyone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
    running.stop()


@pytest.fixture(params=["disk", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "disk" else f"{request.getfixturevalue('bucket')}/{tmp_path.name}"


def weights(version: int) -> dict[str, torch.Tensor]:
    """Return weights of which about a third differs from those of the version before."""
    changing = torch.linspace(-1, 1, 3000).bfloat16()
    changing[version % 7 :: 7] += version
    return {
        "changing": changing.view(30, 100),
        "count": torch.tensor(version),
        "still": torch.ones(1000),
        "none": torch.empty(0),
    }


def publish(url: str, count: int, **form: Any) -> wsync.StoreTransport:
    """Publish versions, each number once, from a trainer that has just begun."""
    sender = wsync.StoreTransport(url, **form)
    sender.setup_connection_and_weights_on_sender()
    for _ in range(count):
        sender.send_weights(weights(newest_in(url) + 1))
    return sender


def names_in(url: str) -> list[str]:
    opened, root = fsspec.core.url_to_fs(url)
    opened.invalidate_cache()
    return (
        sorted(path.rstrip("/").rsplit("/")[-1] for path in opened.ls(root, detail=False))
        if opened.exists(root)
        else []
    )


def manifest_of(url: str) -> dict[str, Any]:
    return json.loads(fsspec.core.url_to_fs(url)[0].cat_file(f"{url}/manifest.json"))


def newest_in(url: str) -> int:
    return manifest_of(url)["versions"][-1]["version"] if "manifest.json" in names_in(url) else 0


def require_exact(receiver: wsync.StoreTransport, version: int = 0) -> int:
    """Receive, and return the version, which has to be the one that is given."""
    received = receiver.receive_weights(20.0)
    assert received is not None
    version = version or int(received["count"])
    for name, tensor in weights(version).items():
        assert torch.equal(received[name], tensor), f"'{name}' is not that of version {version}"
    return version


@pytest.mark.parametrize("form", [{}, HF], ids=["files", "folders"])
def test_readers_that_follow_skip_or_come_late_are_exact(url: str, form: dict[str, int]) -> None:
    sender = publish(url, 0, anchor_every=4, keep=3, **form)
    skipping, needed, manifest = [wsync.StoreTransport(url) for _ in range(8)], list[set[str]](), dict[str, Any]()
    for version in range(1, 27):
        sender.send_weights(weights(version))
        for step, receiver in enumerate(skipping):
            if version % (step + 1) == 0:
                require_exact(receiver, version)
        require_exact(wsync.StoreTransport(url), version)
        manifest = manifest_of(url)
        kinds = {"whole": "" if form else ".safetensors", "difference": ".difference"}
        needed += [
            {
                f"v{one['version']:08d}-{manifest['writer']}{end}"
                for one in manifest["versions"]
                for kind, end in kinds.items()
                if one[kind]
            }
        ]
        assert {*names_in(url)} == {"manifest.json"}.union(*needed[-3:]), "what the last three manifests name"
    wholes = [one["version"] for one in manifest["versions"] if one["whole"]]
    assert wholes == [21, 25] and len(manifest["versions"]) == 6
    assert len(names_in(url)) == 1 + 3 + 10  # from 17 on, where version 24 begins


def test_readers_meet_versions_that_are_being_deleted(url: str) -> None:
    sender, last = publish(url, 1, anchor_every=3, keep=1), 40

    def follow() -> int:
        receiver, version = wsync.StoreTransport(url), 0
        while version < last:
            version = require_exact(receiver)
        return version

    with ThreadPoolExecutor() as pool:
        readers = [pool.submit(follow) for _ in range(4)]
        for version in range(2, last + 1):
            sender.send_weights(weights(version))
        assert [one.result(60.0) for one in readers] == [last] * 4


def test_a_reader_that_follows_reads_no_anchor(tmp_path: Path) -> None:
    sender, receiver = publish(str(tmp_path), 1, anchor_every=3), wsync.StoreTransport(tmp_path)
    require_exact(receiver, 1)
    for version in range(2, 9):
        sender.send_weights(weights(version))
        for path in tmp_path.glob("*.safetensors"):
            path.write_bytes(b"")
        require_exact(receiver, version)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda good, other: good[:-1], "the difference is malformed"),
        (lambda good, other: b"", "it is a difference to weights with the checksum "),
        (lambda good, other: other, r"it is a difference to weights with the checksum \w{16}, not \w{16}"),
        (lambda good, other: good[:8] + other[8:], "it is corrupt: its checksum is"),
        (lambda good, other: good[:30] + bytes([good[30] ^ 1]) + good[31:], "(corrupt|malformed)"),
        (None, "FileNotFoundError"),
    ],
)
def test_a_damaged_difference_is_named_and_the_next_anchor_repairs(tmp_path: Path, damage: Any, said: str) -> None:
    """Also one to another base than the version before."""
    sender, receiver = publish(str(tmp_path), 5, anchor_every=4), wsync.StoreTransport(tmp_path)
    require_exact(receiver, 5)
    sender.send_weights(weights(6))
    bad, other = (next(tmp_path.glob(f"v0000000{number}*.difference")) for number in (6, 5))
    if damage is None:
        bad.unlink()
    else:
        bad.write_bytes(damage(bad.read_bytes(), other.read_bytes()))
    for version in (6, 7, 8):
        for one in (receiver, wsync.StoreTransport(tmp_path)):
            with pytest.raises(wsync.WeightSyncError, match=rf"version 6 of .*{bad.name}: .*{said}"):
                one.receive_weights(0.0)
        sender.send_weights(weights(version + 1))
    require_exact(receiver, 9)
    require_exact(wsync.StoreTransport(tmp_path), 9)


def test_a_model_that_was_changed_in_the_reader_is_no_base(tmp_path: Path) -> None:
    model = torch.nn.Linear(50, 50)
    with trainer(tmp_path, model, anchor_every=10) as scheme:
        own = torch.nn.Linear(50, 50)
        with reader(tmp_path, own, initiator="receiver") as receiver:
            for _ in range(3):
                own.weight.data.fill_(7)
                with torch.no_grad():
                    model.weight[0] += 1
                report = scheme.send()
                assert report is not None and report.bytes < model.weight.nbytes / 4, "of the difference"
                receiver.pull()
                assert torch.equal(own.weight, model.weight)


def die_at(step: int, folder: str) -> None:
    """Be killed by SIGKILL before this process changes anything in a folder for the ``step``-th time."""
    left = iter(range(step))

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir") or (event == "open" and arguments[2] & 3)
        if writes and folder in str(arguments[0]) and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def die_at_put(step: int) -> None:
    """Be killed by SIGKILL before this process writes an object, or deletes some, for the ``step``-th time."""

    class Dying(fsspec.get_filesystem_class("s3")):
        left = iter(range(step))

        async def _call_s3(self, method: str, *arguments: Any, **options: Any) -> Any:
            if method in ("put_object", "delete_objects", "delete_object") and next(Dying.left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return await super()._call_s3(method, *arguments, **options)

    fsspec.register_implementation("s3", Dying, clobber=True)


def publish_and_die(url: str, step: int) -> None:
    die_at_put(step) if "://" in url else die_at(step, url)
    publish(url, 4, anchor_every=3, keep=1, **HF)


def test_a_trainer_that_is_killed_at_every_write(url: str) -> None:
    """Whatever it has left: readers get the newest version that was published, and the next trainer goes on."""
    following, followed, step, killed = wsync.StoreTransport(url), 0, 0, True
    publish(url, 1, **HF)
    while killed:
        before, step = newest_in(url), step + 1
        process = multiprocessing.get_context("fork").Process(target=publish_and_die, args=(url, step))
        process.start()
        process.join(60.0)
        killed = process.exitcode == -signal.SIGKILL
        assert killed or process.exitcode == 0
        after = newest_in(url)
        assert before <= after <= before + 4
        require_exact(wsync.StoreTransport(url), after)
        if after > followed:
            require_exact(following, after)
            followed = after
    assert step > 12
    publish(url, 4, keep=1)
    assert len(names_in(url)) == 2, "what the killed trainers had left is deleted"


@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_transformers_reads_a_version(tmp_path: Path, shard_bytes: int) -> None:
    """With tied embeddings, in bfloat16; the index is there if there are several files; our reader has the same."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=96, n_positions=16)
    model, copy = (transformers.GPT2LMHeadModel(config).bfloat16() for _ in range(2))
    model.save_pretrained(tmp_path / "model")
    form = {"layout": "hf", "model_folder": tmp_path / "model", "shard_bytes": shard_bytes}
    with trainer(tmp_path / "run", model, **form) as scheme, reader(tmp_path / "run", copy) as receiver:
        with torch.no_grad():
            model.transformer.wte.weight += 1
        scheme.send()
        while receiver.version < 2:
            receiver.receive(30.0)
        folder = next((tmp_path / "run" / "policy").glob("v00000002-*"))
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        assert (folder / "model.safetensors.index.json").exists() == (shard_bytes < 1 << 30)
        for other in (loaded, copy):
            assert all(map(torch.equal, other.state_dict().values(), model.state_dict().values()))
            assert other.dtype is torch.bfloat16


@pytest.mark.slow
def test_readers_behind_a_slow_link(tmp_path: Path) -> None:
    for package in ("aiohttp", "requests", "transformers"):
        pytest.importorskip(package, reason=f"reading over HTTP needs {package}")
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2")
    program, options = ROOT / "examples" / "slow_link.py", ("2", "3", "1e-6")
    done = run_program(program, *options, folder=tmp_path, timeout=280, PYTHONPATH=str(ROOT))
    assert "every version of every reader was exact" in done.stdout


@pytest.mark.parametrize("wrong", [{"keep": 0}, {"anchor_every": 0}, {"layout": "gguf"}, {"model_folder": "x"}])
def test_options_that_do_not_fit(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        wsync.StoreWeightSyncScheme("/run", **wrong)
