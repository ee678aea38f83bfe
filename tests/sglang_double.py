"""A double of an SGLang server, by the source of SGLang 0.5.23; below, paths are those in ``sglang/srt``.

``/model_info``                ``entrypoints/http_server.py``, ``model_info``
``/pause_generation``          ``http_server.py``, ``pause_generation``; ``managers/io_struct.py``,
                               ``PauseGenerationReqInput``; ``managers/tokenizer_manager.py``, ``pause_generation``
``/continue_generation``       the same, ``ContinueGenerationReqInput``, which has to be an object
``/update_weights_from_disk``  ``UpdateWeightFromDiskReqInput``; ``tokenizer_manager.py``, and then
                               ``model_executor/model_runner_components/weight_updater.py``, of the same name:
                               a load that fails is followed by one of ``model_config.model_path``, which is the new
                               one already; if that raises as well, ``managers/scheduler.py`` has the server killed
``/load_lora_adapter``, …      ``http_server.py``; ``managers/tokenizer_control_mixin.py``, ``load_lora_adapter``
``/v1/models``                 ``http_server.py``, ``available_models``
"""

import os
import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from asgi_server import serve
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import Tensor

from wsync.testing.commands import WorkerState


class SGLang:
    """What one server has, and what it was asked."""

    def __init__(self) -> None:
        self.weights, self.adapters = dict[str, Tensor](), dict[str, str]()
        self.version, self.paused, self.path = "default", False, ""
        self.asked = list[tuple[str, Any]]()
        self.answers = dict[str, Any]()  # by route: what is answered in place of the truth
        self.dies_at = ""  # a route
        self.damages = False  # what it loads
        posts = {
            "/pause_generation": partial(self._pause, True),
            "/continue_generation": partial(self._pause, False),
            "/update_weights_from_disk": self._update,
            "/load_lora_adapter": self._load,
            "/unload_lora_adapter": self._unload,
        }
        gets = [Route("/model_info", self._model_info), Route("/v1/models", self._models)]
        by_post = [Route(route, self._asked(route, act), methods=["POST"]) for route, act in posts.items()]
        self.app = Starlette(routes=[*gets, *by_post])

    def _asked(self, route: str, act: Any) -> Any:
        async def answer(request: Request) -> JSONResponse:
            fields = await request.json()
            self.asked.append((route, fields))
            if route == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            status, content = act(fields)
            return JSONResponse(self.answers.get(route, content), status)

        return answer

    async def _model_info(self, _: Request) -> JSONResponse:
        return JSONResponse({"model_path": self.path, "is_generation": True, "weight_version": self.version})

    async def _models(self, _: Request) -> JSONResponse:
        adapters = [{"id": name, "root": path} for name, path in self.adapters.items()]
        listed = {"object": "list", "data": [{"id": "tiny", "root": self.path}, *adapters]}
        return JSONResponse(self.answers.get("/v1/models", listed))

    def _pause(self, paused: bool, fields: dict[str, Any]) -> Any:
        if paused and fields["mode"] not in ("abort", "retract", "in_place"):
            return 400, {"object": "error", "message": "invalid mode"}
        self.paused = paused
        return 200, {"message": "Generation paused or continued successfully.", "status": "ok"}

    def _update(self, fields: dict[str, Any]) -> Any:
        assert self.paused and (not self.path or Path(self.path).is_dir()), "the version before is there still"
        files = sorted(Path(fields["model_path"]).glob("*.safetensors"))
        message = f"Failed to get weights iterator: Cannot find any model weights with `{fields['model_path']}`."
        if files:
            try:
                self._load_files(files)
                self.path, self.version, message = fields["model_path"], fields["weight_version"], ""
            except Exception as error:  # noqa: BLE001  as SGLang
                message = f"Failed to update weights: {error}.\nRolling back to original weights."
                try:
                    self._load_files(files)
                except Exception:  # noqa: BLE001
                    os.kill(os.getpid(), signal.SIGKILL)
        said = message or f"Succeeded to update model weights. Weight version updated to {self.version}."
        return 400 if message else 200, {"success": not message, "message": said, "num_paused_requests": 0}

    def _load_files(self, files: list[Path]) -> None:
        for file in files:
            if self.damages:
                os.truncate(file, file.stat().st_size - 1)
            self.weights.update(load_file(file))

    def _load(self, fields: dict[str, Any]) -> Any:
        name, path = fields["lora_name"], Path(fields["lora_path"])
        if name in self.adapters or not (path / "adapter_config.json").is_file():
            return 400, {"success": False, "error_message": f"no new adapter: {name}", "loaded_adapters": self.adapters}
        self.adapters[name] = str(path)
        return 200, {"success": True, "error_message": None, "loaded_adapters": self.adapters}

    def _unload(self, fields: dict[str, Any]) -> Any:
        del self.adapters[fields["lora_name"]]
        return 200, {"success": True, "error_message": None, "loaded_adapters": self.adapters}


def start_sglang(state: WorkerState, port: int = 0) -> str:
    """Serve one in a worker's process; return its URL."""
    state.kept["sglang"] = server = SGLang()
    state.kept["server"] = stack = ExitStack()
    return stack.enter_context(serve(server.app, port=port))


def stop_sglang(state: WorkerState) -> None:
    state.kept["server"].close()


def plant(state: WorkerState, **faults: Any) -> None:
    vars(state.kept["sglang"]).update(faults)


def now(state: WorkerState) -> tuple[str, float, bool]:
    """Return the version, the value of all weights, and whether generation is paused."""
    server = state.kept["sglang"]
    return server.version, float(server.weights["weight"].unique()), server.paused


def asked(state: WorkerState) -> list[tuple[str, Any]]:
    """Return what it was asked since the last call, and forget it."""
    server = state.kept["sglang"]
    found, server.asked = server.asked, []
    return found


def adapters(state: WorkerState) -> dict[str, dict[str, float]]:
    """Return the value of each tensor, of each adapter whose folder is there."""
    files = {name: Path(path) / "adapter_model.safetensors" for name, path in state.kept["sglang"].adapters.items()}
    return {name: {key: float(one.unique()) for key, one in load_file(file).items()} for name, file in files.items()}
