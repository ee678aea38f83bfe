"""SGLang servers, which load files: a double that follows SGLang's source (``sglang_double.py``); not a real one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from http_engines import trainer
from sglang_double import adapters, asked, now, plant, start_sglang, stop_sglang

import wsync
from wsync.engine.disk import VersionFolders
from wsync.testing import WorkerPool
from wsync.testing.models import Small, fill


@contextmanager
def fleet(pool: WorkerPool, folder: Path, count: int = 1, **options: Any) -> Iterator[tuple[Any, list[str], Any]]:
    options = {"transfer": "disk", "engine": "sglang", "folder": folder, "token": None, **options}
    with pool.group(count) as workers:
        urls = workers.call(start_sglang)
        with trainer(urls, **options) as scheme:
            yield workers, urls, scheme
        for worker in workers:
            if worker.reusable:
                worker.call(stop_sglang)


@pytest.mark.parametrize(
    ("pause", "clear", "mode"), [(None, True, "retract"), ("keep", False, "in_place"), ("abort", True, "abort")]
)
def test_every_version_arrives(pool: WorkerPool, tmp_path: Path, pause: Any, clear: bool, mode: str) -> None:
    with fleet(pool, tmp_path, 2, pause=pause, clear_cache=clear) as (workers, _, scheme):
        for number in range(2, 5):
            workers.call(asked)
            report = scheme.send(fill(Small(), number))
            assert report is not None and report.version == number and report.phases["apply"] > 0
            assert workers.call(now) == [(str(number), number, False)] * 2
            (folder,) = tmp_path.glob("policy/*")
            load = {"model_path": str(folder), "weight_version": str(number), "flush_cache": clear}
            requests = ("/pause_generation", {"mode": mode}), ("/update_weights_from_disk", load)
            assert workers[0].call(asked) == [*requests, ("/continue_generation", {})]


def test_an_engine_that_fails_is_named_and_the_next_version_repairs_it(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet(pool, tmp_path, 2) as (workers, urls, scheme):
        with monkeypatch.context() as patch:
            patch.setattr(VersionFolders, "write", lambda *_: tmp_path / "nowhere")
            with pytest.raises(wsync.WorkerFailed, match=rf"{urls[0]}: phase update .*answered 400.*weights iterator"):
                scheme.send(fill(Small(), 2))
        assert workers.call(now) == [("1", 1, True)] * 2
        scheme.send(fill(Small(), 3))
        workers[0].call(plant, answers={"/update_weights_from_disk": {"success": False}})
        with pytest.raises(wsync.WorkerFailed, match=rf"{urls[0]}: phase update: it was sent version 4(?s:.*)paused"):
            scheme.send(fill(Small(), 4))
        assert workers.call(now) == [("4", 4, True), ("4", 4, False)]
        workers[0].call(plant, answers={})
        wsync.synchronize({scheme: fill(Small(), 5)})
        assert workers.call(now) == [("5", 5, False)] * 2


@pytest.mark.parametrize("route", ["/pause_generation", "/update_weights_from_disk", "/continue_generation"])
def test_an_engine_that_dies_is_named_and_started_again(pool: WorkerPool, tmp_path: Path, route: str) -> None:
    phase = {"/pause_generation": "pause", "/continue_generation": "resume"}.get(route, "update")
    with fleet(pool, tmp_path, 2) as (workers, urls, scheme):
        workers[1].call(plant, dies_at=route)
        with pytest.raises(wsync.WorkerDied, match=rf"worker 1: {urls[1]}: phase {phase}"):
            scheme.send(fill(Small(), 2))
        assert workers[0].call(now) == ("2", 2, False)
        workers[1].kill()  # it is dead
        workers.replace(1).call(start_sglang, int(urls[1].rsplit(":", 1)[1]))
        scheme.readmit(1)
        assert workers.call(now) == [("2", 2, False)] * 2


def test_a_damaged_file_ends_the_engine_as_sglang_rolls_back_to_the_same_file(pool: WorkerPool, tmp_path: Path) -> None:
    with fleet(pool, tmp_path) as (workers, urls, scheme):
        workers[0].call(plant, damages=True)
        with pytest.raises(wsync.WorkerDied, match=rf"{urls[0]}: phase update"):
            scheme.send(fill(Small(), 2))
        workers[0].kill()


def adapter(value: float) -> dict[str, torch.Tensor]:
    """A model of 1,000 numbers and its adapter of 16, by the names of PEFT's modules."""
    tensors = {"base_layer.weight": torch.zeros(1000), "lora_A.default.weight": torch.full((16,), value)}
    return {f"base_model.model.layer.{name}": tensor for name, tensor in tensors.items()}


def test_adapters_have_names_of_their_own_and_old_ones_are_unloaded(pool: WorkerPool, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    options = {"transfer": "lora", "engine": "sglang", "folder": tmp_path / "run", "model_folder": tmp_path}
    names = set[str]()
    with pool.group(1) as workers:
        (url,) = workers.call(start_sglang)
        for _ in range(2):  # the second trainer unloads what the first one has left
            with trainer(url, adapter(1), token=None, **options) as scheme:

                def is_loaded(*versions: int, scheme: Any = scheme) -> bool:
                    name = "base_model.model.layer.lora_A.weight"
                    return workers[0].call(adapters) == {scheme.adapter_name(one): {name: one} for one in versions}

                for version in range(2, 5):
                    report = scheme.send(adapter(version))
                    assert report is not None and report.bytes < 200 and is_loaded(version - 1, version)
                workers[0].call(plant, answers={"/v1/models": {"data": []}})
                with pytest.raises(wsync.WorkerFailed, match=rf"{url}: phase prepare: it was sent policy-v00000005-"):
                    scheme.send(adapter(5))
                workers[0].call(plant, answers={})
                wsync.synchronize({scheme: adapter(6)})
                assert is_loaded(4, 6)
                names.add(scheme.adapter_name(6))
        assert len(names) == 2 and not any(route == "/pause_generation" for route, _ in workers[0].call(asked))
        workers[0].call(stop_sglang)
