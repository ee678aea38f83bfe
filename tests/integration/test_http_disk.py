"""Versions as folders, for engines without a plugin. The real vLLM is in tests/engines; here its routes are followed:

``/pause``, ``/resume`` and ``/update_weight_version`` of vllm/entrypoints/rl/online/api_router.py, ``/collective_rpc``
of vllm/entrypoints/serve/dev/rpc/api_router.py; what is read of a folder as by vllm/model_executor/model_loader.
"""

import asyncio
import json
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import http_engines
import pytest
import torch
from asgi_server import serve
from full_disk import no_file_beyond
from safetensors.torch import load_file, save_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import wsync
from wsync.engine.disk import DiskTransfer, VersionFolders
from wsync.testing.models import Small, fill


class StockEngine:
    """What a vLLM server does with a folder of weights."""

    def __init__(self, ranks: int = 1) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.version, self.paused, self.refuses = "default", False, False
        self.turn = asyncio.Lock()  # requests come to the core one by one
        self.named, self.stops_at = SimpleQueue[str](), ""  # cleared `go_on`: what it stops at waits
        self.go_on = threading.Event()
        routes = [
            Route("/get_world_size", lambda _: JSONResponse({"world_size": ranks})),
            Route("/health", lambda _: JSONResponse({})),
            Route("/pause", partial(self._pause, True), methods=["POST"]),
            Route("/resume", partial(self._pause, False), methods=["POST"]),
            Route("/collective_rpc", self._reload, methods=["POST"]),
            Route("/update_weight_version", self._name, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _pause(self, paused: bool, _: Request) -> JSONResponse:
        async with self.turn:
            await self._reach("pause")
            self.paused = paused
        return JSONResponse({})

    async def _reach(self, point: str) -> None:
        if self.stops_at == point:
            await asyncio.to_thread(self.go_on.wait, 30)

    async def _reload(self, request: Request) -> JSONResponse:
        call = await request.json()
        folder = Path(call["kwargs"]["weights_path"])
        async with self.turn:
            assert call["method"] == "reload_weights" and self.paused
            if folder.name != "probe":
                await self._reach("reload")
            try:
                if self.refuses:
                    raise RuntimeError("planted")
                files = sorted(folder.glob("*.safetensors"))
                if not files:
                    raise RuntimeError(f"Cannot find any model weights with `{folder}`")
                self.weights.update([one for file in files for one in load_file(file).items()])
            except Exception as error:  # noqa: BLE001  vLLM answers any exception with 500
                return JSONResponse({"error": {"message": str(error)}}, 500)
        return JSONResponse({"results": [None]})

    async def _name(self, request: Request) -> JSONResponse:
        self.version = (await request.json())["new_version"]
        self.named.put(self.version)
        return JSONResponse({"success": True})

    def value(self) -> float:
        assert not self.paused
        return float(self.weights["weight"].unique())


def trainer(urls: list[str], folder: Path, model: Any, **options: Any) -> Any:
    options = {"transfer": "disk", "folder": folder.parent, "token": None, **options}
    return http_engines.trainer(urls, model, folder.name, **options)


def versions(folder: Path) -> list[str]:
    """The folders of versions, without the name of their trainer."""
    return sorted(path.name[:9] + path.name[18:] for path in folder.iterdir())


def test_every_version_arrives_and_old_folders_are_deleted(tmp_path: Path) -> None:
    folder, base = tmp_path / "versions", tmp_path / "base"
    for path in (base, folder, folder / "v00000007-0123abcd", folder / "v00000008-0123abcd.unfinished"):
        path.mkdir()
    save_file({"weight": torch.zeros(4)}, base / "model.safetensors")
    (base / "config.json").write_text("{}")
    first, second = StockEngine(), StockEngine()
    with serve(first.app) as one, serve(second.app) as other:
        with trainer([one, other], folder, fill(Small(), 1), model_folder=base) as scheme:
            for number in range(2, 5):
                report = scheme.send(fill(Small(), number))
                assert report is not None and report.version == number and report.phases["apply"] > 0
                assert [engine.value() for engine in (first, second)] == [number] * 2
                assert first.version == second.version == str(number)
                assert versions(folder) == [f"v{number:08d}"]
            (kept,) = folder.iterdir()
            assert sorted(path.name for path in kept.iterdir()) == ["config.json", "model.safetensors", "probe"]
            second.stops_at, scheme.timeout = "reload", 1.0
            for number in (5, 6):  # it is told of version 5, and does not answer; the other goes on
                with pytest.raises(wsync.SyncTimeout, match=rf"worker 1: {other}: phase"):
                    scheme.send(fill(Small(), number))
            assert first.value() == 6 and versions(folder) == ["v00000004", "v00000005", "v00000006"]
            second.go_on.set()
            second.stops_at, scheme.timeout = "", 30.0
            scheme.send(fill(Small(), 7))
            assert second.value() == 7 and versions(folder) == ["v00000007"]
            second.go_on.clear()
            second.stops_at = "pause"
            for number in (8, 9):  # it is still to be told of version 8 when the other has the next one
                scheme.send_async(fill(Small(), number))
                while first.named.get(timeout=30) != str(number):
                    pass
            assert versions(folder) == ["v00000007", "v00000008", "v00000009"]
            second.go_on.set()
            scheme.wait_async()
            assert second.value() == 9 and versions(folder) == ["v00000009"]
        said = r"phase init(?s:.*)LayoutMismatch: these weights differ.*weight"
        with pytest.raises(wsync.WorkerFailed, match=said), trainer([one], folder, Small(5), model_folder=base):
            pass


def test_a_large_model_has_several_files_and_an_index(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    model[3].weight = model[0].weight  # vLLM packs a tied head anew only if the file has it
    stock, weights = StockEngine(), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folders = VersionFolders(tmp_path, None, shard_bytes=600)
    with serve(stock.app) as url:
        make = partial(DiskTransfer, folders=folders)
        with wsync.HTTPWeightSyncScheme(url, transfer=make, pause="keep") as scheme:
            scheme.init_on_sender("policy", model=model)
            scheme.connect()
            wsync.synchronize({scheme: None})  # also with a ``Transfer`` that a function makes
    assert stock.weights.keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in stock.weights.items())
    (folder,) = tmp_path.iterdir()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = {path.name: {*load_file(path)} for path in folder.glob("*.safetensors")}
    assert len(files) == 2 and all(name in files[file] for name, file in index["weight_map"].items())
    assert index["weight_map"].keys() == stock.weights.keys() and index["metadata"]["total_size"] == 4 * 4 * 72


def test_a_full_disk_leaves_the_old_version(tmp_path: Path) -> None:
    stock = StockEngine()
    with serve(stock.app) as url, trainer([url], tmp_path, fill(Small(100_000), 1)) as scheme:
        scheme.send()
        said = rf"{url}: phase write(?s:.*)version 3 cannot be written to"
        with no_file_beyond(1000), pytest.raises(wsync.WorkerFailed, match=said):
            scheme.send(fill(Small(100_000), 3))
        assert stock.value() == 1 and versions(tmp_path) == ["v00000002"]
        scheme.send(fill(Small(100_000), 4))
        assert stock.value() == 4


@pytest.mark.parametrize(
    ("lost", "said"), [("*", "phase prepare.*does the engine see"), ("*.safetensors", "phase update")]
)
def test_what_the_engine_cannot_read_is_named(tmp_path: Path, lost: str, said: str, monkeypatch: Any) -> None:
    """A folder that it does not see; a damaged file: then it stays paused until a version is whole."""
    usual = StockEngine._reload

    async def reload(engine: StockEngine, request: Request) -> JSONResponse:
        for path in tmp_path.glob(f"v00000002-*/{lost}"):
            path.rename(path.with_suffix(".gone")) if path.is_dir() else path.write_bytes(path.read_bytes()[:-1])
        return await usual(engine, request)

    monkeypatch.setattr(StockEngine, "_reload", reload)
    stock = StockEngine()
    with serve(stock.app) as url, trainer([url], tmp_path, fill(Small(), 1)) as scheme:
        with pytest.raises(wsync.WorkerFailed, match=rf"{url}: {said}"):
            scheme.send(fill(Small(), 2))
        assert stock.paused == ("update" in said)
        with ExitStack() as end:
            critic = wsync.HTTPWeightSyncScheme(end.enter_context(serve(wsync.engine_app(Small(), token=None))))
            critic.init_on_sender("critic", model=Small())
            critic.connect()
        with critic, pytest.raises(wsync.WorkerDied, match="applied nowhere"):
            wsync.synchronize({scheme: fill(Small(), 2), critic: None})
        assert stock.paused == ("update" in said)  # nor is it resumed by an update that is aborted
        scheme.send(fill(Small(), 3))
        assert stock.value() == 3


def test_an_engine_with_several_ranks_that_has_refused_has_to_be_started_again(tmp_path: Path) -> None:
    """Else vLLM takes a rank's answer for that to its next call."""
    stock = StockEngine(ranks=2)
    with serve(stock.app) as url, trainer([url], tmp_path, fill(Small(), 1)) as scheme:
        stock.refuses = True
        with pytest.raises(wsync.WorkerFailed, match=r"phase prepare(?s:.*)planted"):
            scheme.send(fill(Small(), 2))
        stock.refuses = False
        with pytest.raises(wsync.WorkerFailed, match=r"its ranks have refused: start it again"):
            scheme.send(fill(Small(), 3))
        scheme.readmit(0)
        assert stock.value() == 3
