"""From a trainer into an unmodified vLLM: each token is of one version, and what fails is named."""

import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from full_disk import no_file_beyond
from stock_vllm import VOCABULARY, Server, log_probabilities, make, serving, trainer

import wsync
from examples.probe_engine import probe
from wsync.engine.client import EngineClient, EngineError
from wsync.engine.disk import VersionFolders
from wsync.engine.protocol import FINISH, START

pytest.importorskip("vllm", reason="there is no vLLM here: `make engines` makes an environment that has it")

PROMPT = [5, 9, 11, 40, 77, 200, 31]
pytestmark = pytest.mark.timeout(600)


def by(transfer: str, folder: Path) -> dict[str, Any]:
    return {"transfer": transfer, "folder": folder if transfer == "disk" else None}


@pytest.mark.parametrize("pause", [None, "wait", "abort"])
@pytest.mark.parametrize("transfer", ["wsync", "disk"])
def test_each_token_of_a_busy_engine_is_of_one_version(
    server: Server, transfer: str, pause: Any, tmp_path: Path
) -> None:
    """Three clients generate, while 20 versions are sent. ``transformers`` knows the log-probabilities of each one."""
    versions, answers, stop, sent, finished = {1: make(1)}, list[Any](), threading.Event(), 1, threading.Semaphore(0)

    def generate(seed: int) -> None:
        chance = random.Random(seed)
        while not stop.is_set():
            prompt = [chance.randrange(3, VOCABULARY) for _ in range(chance.randrange(4, 40))]
            began = sent
            answers.append((began, prompt, *server.complete(prompt, 60, temperature=1.0, seed=chance.randrange(9999))))
            finished.release()

    clients = [threading.Thread(target=generate, args=(seed,)) for seed in range(3)]
    with trainer(server, versions[1], pause=pause, **by(transfer, tmp_path)) as scheme:
        server.complete(PROMPT, 2, temperature=1.0)  # vLLM compiles something then
        for client in clients:
            client.start()
        seconds, by_hand = list[float](), list[float]()
        try:
            for version in range(2, 22):
                versions[version] = make(version)
                assert all(finished.acquire(timeout=120) for _ in range(2))  # of answers, also where an engine is slow
                began = time.perf_counter()
                server.reload(versions[sent], tmp_path / "whole", pause or "keep")  # what it has: for its time
                by_hand.append(time.perf_counter() - began)
                began = time.perf_counter()
                report = scheme.send(versions[version])
                seconds.append(time.perf_counter() - began)
                assert report is not None and report.version == version
                sent = version
                if version % 5 == 0:
                    assert server.serves(versions[version], PROMPT)
                    if transfer == "wsync":
                        scheme.verify(versions[version])
        finally:
            stop.set()
            for client in clients:
                client.join()
    assert server.serves(versions[21], PROMPT) and server.post("/weight_info")["weight_version"] == "21"
    assert [path.name[:9] for path in tmp_path.glob("policy/*")] == ["v00000021"] * (transfer == "disk")
    spanning = count = 0
    for began, prompt, tokens, found, names in answers:  # began: the version that was complete when it was asked
        assert len(tokens) == len(names) and sorted(map(int, names)) == [*map(int, names)]
        for name in {*names}:
            of = torch.tensor([name == one for one in names])
            off = (log_probabilities(versions[int(name)], prompt, tokens) - torch.tensor(found)).abs()[of].max()
            assert int(name) >= began and off < 2e-3, f"tokens of version {name} are off by {off}"
        count, spanning = count + len(tokens), spanning + (len({*names}) > 1)
    took = "; by hand ".join(f"{sorted(each)[10]:.3f} s ({max(each):.3f})" for each in (seconds, by_hand))
    print(f"{transfer}, pause={pause}: {count} tokens, {spanning} answers of several versions, {took}")
    assert count > 500 and bool(spanning) == (pause is None)


def test_an_engine_in_bfloat16(tmp_path: Path) -> None:
    """Of weights in float32, which vLLM casts, or the trainer; and with embeddings that are not tied."""
    (tmp_path / "model").mkdir()
    cases = itertools.product(("wsync", "disk"), (None, wsync.transforms.Cast(torch.bfloat16)))
    with serving(tmp_path / "model", "--dtype bfloat16", tied=False) as server:
        for number, (transfer, cast) in enumerate(cases, start=1):
            old, new = make(number, tied=False), make(number + 10, tied=False)
            with trainer(server, old, send_transform=cast, **by(transfer, tmp_path)) as scheme:
                scheme.send(new)
                if transfer == "wsync":
                    scheme.verify(new)
            right, wrong = (probe(server.url, "tiny", model.bfloat16()) for model in (new, old))
            print(f"{transfer}, {cast}: off by {right:.3f}, of older weights {wrong:.1f}")
            assert right < 0.1 < wrong


def test_a_stale_prefix_is_not_used(server: Server) -> None:
    """Unless ``clear_cache=False``, which the probe then finds."""
    for old, new, options in ((make(31), make(32), {"clear_cache": False}), (make(33), make(34), {})):
        with trainer(server, old, **options) as scheme:
            probe(server.url, "tiny", old)
            scheme.send(new)
            off = probe(server.url, "tiny", new)
            assert off > 0.02 if options else off < 2e-3, off


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_serve(server: Server) -> None:
    old, good = make(41), make(42).state_dict()
    down, value, bias = (
        f"model.layers.1.{end}" for end in ("mlp.down_proj.weight", "self_attn.v_proj.weight", "self_attn.q_proj.bias")
    )
    wrong = [
        ({**good, "model.layers.1.mlp.other.weight": good[down]}, "other"),
        ({**good, down: good[down][:, :-1].contiguous()}, rf"does not take '{down}' of shape \(128, 255\)"),
        ({**good, bias: good[bias][:-1].contiguous()}, rf"does not take '{bias}'"),
        ({name: tensor for name, tensor in good.items() if name != down}, rf"needs more weights.*{down}"),
        ({**good, down: good[down].repeat(1, 2)}, rf"has smaller weights.*{down}"),
        ({**good, value: good[value].repeat(2, 1)}, r"has smaller weights.*qkv_proj"),
        ({name: tensor for name, tensor in good.items() if name != value}, r"needs more weights.*qkv_proj.*v_proj"),
    ]
    with trainer(server, old) as first:
        for weights, said in wrong:
            refused = rf"{server.url}: phase init (?s:.*){said}"
            with pytest.raises(wsync.WorkerFailed, match=refused), trainer(server, weights):
                pass
            assert server.serves(old, PROMPT)
        if server.post("/get_world_size")["world_size"] == 1:  # else vLLM has lost count of the answers: `one_rank`
            first.send(good)  # the engine is still its own
            assert server.serves(make(42), PROMPT)


@pytest.fixture
def one_rank(server: Server) -> Server:
    if server.post("/get_world_size")["world_size"] > 1:
        pytest.skip("after a refusal by several ranks, vLLM has lost count of their answers")
    return server


def test_a_folder_that_the_engine_does_not_see_leaves_the_old_version(one_rank: Server, tmp_path: Path) -> None:
    def hide(client: EngineClient, phase: str, *args: Any) -> Any:
        if phase == "pause":
            tmp_path.rename(tmp_path.with_name("elsewhere"))
        return usual(client, phase, *args)

    usual = EngineClient.post
    with trainer(one_rank, make(55), transfer="disk", folder=tmp_path) as scheme, pytest.MonkeyPatch.context() as patch:
        patch.setattr(EngineClient, "post", hide)
        with pytest.raises(wsync.WorkerFailed, match=r"phase prepare(?s:.*)does the engine see"):
            scheme.send(make(56))
        assert not one_rank.paused() and one_rank.serves(make(55), PROMPT)


def test_a_full_disk_leaves_the_old_version_and_a_damaged_file_a_pause(one_rank: Server, tmp_path: Path) -> None:
    def cut(folders: VersionFolders, engine: object, update: Any) -> Path:
        folder = usual(folders, engine, update)
        file = folder / "model.safetensors"
        os.truncate(file, file.stat().st_size - 1)
        return folder

    usual = VersionFolders.write
    with trainer(one_rank, make(57), transfer="disk", folder=tmp_path) as scheme:
        with no_file_beyond(1000), pytest.raises(wsync.WorkerFailed, match=r"phase write(?s:.*)cannot be written"):
            scheme.send(make(58))
        assert not one_rank.paused() and one_rank.serves(make(57), PROMPT)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(VersionFolders, "write", cut)
            with pytest.raises(wsync.WorkerFailed, match=r"phase update (?s:.*)stays paused"):
                scheme.send(make(58))
        assert one_rank.paused()
        scheme.send(make(59))
        assert not one_rank.paused() and one_rank.serves(make(59), PROMPT)


def test_a_version_that_does_not_arrive_leaves_the_old_one(server: Server) -> None:
    old = make(51)
    with trainer(server, old), pytest.raises(Exception, match="999 was announced"):
        client = EngineClient(server.url)
        client.request("start", START, deadline=None)
        try:
            client.update_weights({"version": 999, "timeout": 5})
        finally:
            with suppress(EngineError):
                client.post("update", FINISH)
            client.close()
    assert server.serves(old, PROMPT)


@pytest.mark.parametrize("transfer", ["wsync", "disk"])
def test_a_load_that_fails_half_way_leaves_the_engine_paused_until_a_version_is_whole(
    server: Server, transfer: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if transfer == "disk":
        request.getfixturevalue("one_rank")
    with trainer(server, make(61), **by(transfer, tmp_path)) as scheme:
        server.post("/collective_rpc", {"method": "fail_half_way"})
        with pytest.raises(
            wsync.WorkerFailed, match=r"phase update (?s:.*)planted(?s:.*)stays paused until it has a whole"
        ):
            scheme.send(make(62))
        assert server.paused()
        scheme.send(make(63))
        assert not server.paused() and server.serves(make(63), PROMPT)


def test_verify_names_what_differs(server: Server, tmp_path: Path) -> None:
    attention = "model.layers.1.self_attn."
    planted = {
        "flip": ["model.norm.weight"],
        "drop": ["model.layers.1.mlp.down_proj.weight"],
        "swap": [f"{attention}k_proj.weight", f"{attention}q_proj.weight"],
    }
    with trainer(server, make(64)) as scheme:
        for number, (what, expected) in enumerate(planted.items(), start=65):
            scheme.send(make(number))
            (row,) = scheme.verify(make(number))
            assert row["verified"] == row["installed"] and probe(server.url, "tiny", make(number)) < 2e-3
            server.post("/collective_rpc", {"method": "spoil", "args": [what]})
            if what != "flip":
                scheme.send(make(number + 10))
            sent = make(number + 10 * (what != "flip"))
            with pytest.raises(wsync.WorkerFailed, match=rf"{server.url}: phase verify") as caught:
                scheme.verify(sent)
            assert what == "flip" or probe(server.url, "tiny", sent) > 0.1
            named = {*re.findall(r"model\.[\w.]+weight", str(caught.value).partition("or none, of")[2])}
            assert sorted(named) == expected
        scheme.send(make(99))
        assert not server.paused() and server.serves(make(99), PROMPT)
        began = time.perf_counter()
        scheme.verify(make(99))
        print(f"verify: {time.perf_counter() - began:.3f} s")
        with pytest.raises(wsync.WorkerFailed, match=r"phase verify(?s:.*)or none, of.*more"):
            scheme.verify(make(98))  # not what was sent
    with (
        trainer(server, make(97), transfer="disk", folder=tmp_path) as scheme,
        pytest.raises(wsync.WorkerFailed, match="is not answered by engines that get weights like this"),
    ):
        scheme.verify(make(97))


KILLED = """
import os, sys
from pathlib import Path
from stock_vllm import Server, make, trainer
from test_vllm import by
from wsync.engine.client import EngineClient
_, url, transfer, phase, folder = sys.argv
usual = EngineClient.post
def post(client, now, *args):
    return os.kill(os.getpid(), 9) if now == phase else usual(client, now, *args)
with trainer(Server(url, 0), make(71), **by(transfer, Path(folder))) as scheme:
    EngineClient.post = post
    scheme.send(make(72))
"""


@pytest.mark.parametrize("phase", ["start", "update", "finish"])
@pytest.mark.parametrize("transfer", ["wsync", "disk"])
def test_the_next_trainer_takes_over_from_one_that_was_killed(
    server: Server, transfer: str, phase: str, tmp_path: Path
) -> None:
    """Right before it begins a phase; with files, *prepare* is in the place of *start*."""
    phase = {"disk start": "prepare"}.get(f"{transfer} {phase}", phase)
    command = [sys.executable, "-c", KILLED, server.url, transfer, phase, str(tmp_path)]
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    killed = subprocess.run(command, cwd=Path(__file__).parent, timeout=120, env={**os.environ, "PYTHONPATH": path})
    assert killed.returncode == -signal.SIGKILL and server.paused()
    with trainer(server, make(73), **by(transfer, tmp_path)) as scheme:
        assert not server.paused() and server.serves(make(73), PROMPT)
        scheme.send(make(74))
        assert server.serves(make(74), PROMPT)
