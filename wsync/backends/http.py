"""Engines over HTTP: the trainer drives each one through the phases of vLLM's native weight transfer."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NoReturn
from urllib.parse import quote

from wsync.engine.client import BodyTransfer, EngineClient, MakeTransfer, checked_url
from wsync.engine.disk import DiskTransfer, LoraTransfer, VersionFolders
from wsync.engine.outlet import Engines
from wsync.engine.protocol import MODELS, PAUSE_MODES, EngineKind, PauseMode, require_valid_token
from wsync.receiver import Receiver
from wsync.scheme import WeightSyncScheme
from wsync.transforms import Rename, Select, Transform, compose
from wsync.weights.source import DeviceMap, Source


class HTTPWeightSyncScheme(WeightSyncScheme):
    """Weight synchronization with inference engines that are HTTP servers.

    Engines are taken side by side through the four phases of vLLM's native weight transfer: *init* once for a layout,
    then for each version *start*, *update* and *finish*. The weights are bodies of HTTP requests, which the engines of
    ``wsync.engine_app`` take. vLLM's own servers take them by ``transfer="wsync"``, or as files by ``"disk"``: see
    ``docs/engines.md``. Parameters and persistent buffers are sent.

    Worker ``i`` is the engine of ``urls[i]``. A finished ``send`` means: each engine has loaded the version. Errors
    name the URL, the phase and the answer. ``readmit(i)`` sends an engine that has been started again the newest
    version.

    Args:
        urls: the URLs of the engines (``"http://10.0.0.5:8000"``); one or several. Weights go to no other host:
            redirects are errors, proxies are not used.
        token: sent as a bearer token. It is readable on the way unless the URL is ``https``.
        transfer: None: HTTP bodies. ``"wsync"``: by a connection of wsync to each rank of a vLLM server that runs with
            ``--weight-transfer-config '{"backend": "wsync"}'``. ``"disk"``: each version is a folder in the Hugging
            Face layout, which a vLLM or SGLang server loads. ``"lora"``: the adapter alone, which it loads under a name
            of its own for each version, without a pause (see ``adapter_name``). Or a function ``(EngineClient,
            VersionSource) → object`` with ``send_weights()``, or a ``wsync.engine.client.Transfer``.
        engine: whose servers they are, which load files: with ``"sglang"``, ``transfer`` is ``"disk"`` or ``"lora"``.
        pause: what happens to generations in flight, around the last three phases: ``"abort"`` ends them, ``"wait"``
            waits for their end, ``"keep"`` has them go on with the new weights (mixed versions). None: ``"keep"``, as
            vLLM cannot generate meanwhile; with HTTP bodies, nothing is paused. SGLang has no ``"wait"``.
        clear_cache: whether a pause clears the engine's caches. If not, tokens after a known prefix are computed from
            states of older weights.
        host: with ``"wsync"``: the address of this machine to which engines connect; None: the one from which each
            engine is called.
        folder: with ``"disk"`` and ``"lora"``: a folder of this trainer alone, which all engines see under the same
            path. Each model has a folder of its own in it.
        model_folder: with ``"disk"``: of a model of the same form. Its other files (config, tokenizer) are copied
            beside each version, and names and shapes have to be those of its weights. With ``"lora"``: of PEFT's
            ``save_pretrained``, with ``adapter_config.json``.
        max_staleness: with ``"lora"``: how many adapters before the newest stay loaded.
        receive_transform: what ``engine_app`` was given, which ``verify`` has to know.
        sync, timeout, send_transform: as in ``WeightSyncScheme``; ``connect`` waits for engines that are starting.

    Raises:
        ValueError: no URL, a malformed or repeated one, a bad token, arguments that are unknown or do not fit together.
    """

    name = "http"
    collectors: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None = None,
        transfer: Literal["wsync", "disk", "lora"] | MakeTransfer | None = None,
        engine: EngineKind = "vllm",
        pause: PauseMode | None = None,
        clear_cache: bool = True,
        host: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        model_folder: str | os.PathLike[str] | None = None,
        max_staleness: int = 1,
        sync: bool = True,
        timeout: float | None = 60.0,
        send_transform: Transform | Sequence[Transform] | None = None,
        receive_transform: Transform | Sequence[Transform] | None = None,
    ) -> None:
        if transfer == "lora":
            given = compose(send_transform, "send_transform")
            names = Rename(partial(re.sub, r"\.default\b", ""))  # as in PEFT's files
            send_transform = [*(given.transforms if given else ()), Select("lora_*"), names]
        super().__init__(
            "tensordict", sync, timeout=timeout, send_transform=send_transform, receive_transform=receive_transform
        )
        self.urls = [checked_url(url) for url in ([urls] if isinstance(urls, str) else urls)]
        if not self.urls or len(set(self.urls)) < len(self.urls):
            raise ValueError(f"urls has each engine once, and at least one: {self.urls}")
        if pause is not None and pause not in PAUSE_MODES:
            raise ValueError(f"pause is {', '.join(map(repr, PAUSE_MODES))} or None, not {pause!r}")
        files = transfer in ("disk", "lora")
        if not (files or transfer in (None, "wsync") or callable(transfer)):
            raise ValueError(f"transfer is 'wsync', 'disk', 'lora', a function or None, not {transfer!r}")
        if files != (folder is not None):
            raise ValueError("transfer='disk' or 'lora' and folder= belong together: the folder that all engines see")
        if transfer == "lora" and (model_folder is None or max_staleness < 0):
            raise ValueError("transfer='lora' needs model_folder=, with adapter_config.json, and max_staleness >= 0")
        misfit = transfer in (None, "wsync") or pause == "wait"
        if engine not in ("vllm", "sglang") or (engine == "sglang" and misfit):
            raise ValueError("engine is 'vllm' or 'sglang'; SGLang takes 'disk' or 'lora', and has no pause='wait'")
        require_valid_token(token)
        self.token, self.transfer, self.clear_cache = token, transfer, clear_cache
        self.engine: EngineKind = engine
        self.pause: PauseMode | None = pause if pause or transfer in (None, "lora") else "keep"
        self.host, self.folder, self.model_folder, self.max_staleness = host, folder, model_folder, max_staleness
        self._run = ""  # of the folders' names

    def make_outlet(self, model_id: str, num_workers: int) -> Engines:
        scheme = weakref.proxy(self)  # a scheme that is dropped is closed
        clients = [EngineClient(url, self.token, self.engine) for url in self.urls]
        transfer = self.transfer or BodyTransfer
        if self.folder is not None:
            folder = os.path.join(self.folder, quote(model_id, safe=""))
            folders = VersionFolders(folder, self.model_folder, "adapter_model" if transfer == "lora" else "model")
            self._run = folders.run
            if transfer == "disk":
                transfer = partial(DiskTransfer, folders=folders, clear_cache=self.clear_cache)
            else:
                transfer = partial(LoraTransfer, folders=folders, name=model_id, kept=self.max_staleness + 1)
                for client in clients:
                    client.presence = MODELS
        elif isinstance(transfer, str):
            from wsync.engine.vllm import DataTransfer  # it uses another scheme

            transfer = partial(DataTransfer, host=self.host)
        return Engines(clients, transfer, self.pause, lambda: scheme.timeout, clear_cache=self.clear_cache)

    def make_source(self, model_id: str, weights: object, device_map_fn: DeviceMap | None, **options: Any) -> Source:
        return super().make_source(model_id, weights, device_map_fn, persistent=True, **options)

    def adapter_name(self, version: int) -> str:
        """With ``transfer="lora"``: how engines call the adapter of a version: the ``model`` of requests."""
        return f"{self.model_id}-v{version:08d}-{self._run}"

    def implied_worker_counts(self) -> Mapping[str, int]:
        return {"urls": len(self.urls)}

    def make_connection(self, model_id: str, receiver: Receiver) -> NoReturn:
        raise RuntimeError("an engine over HTTP receives by wsync.engine_app(load=…), in the engine's process")
