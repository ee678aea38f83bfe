"""Stock engines without a plugin: each version is a folder in the Hugging Face layout or PEFT's, which they load.

    <folder>/v00000012-<run>/model.safetensors               or model-00001-of-00002.safetensors, …, and their index
                                 config.json, …              copied from the model folder, if one is given
                                 probe/model.safetensors     without weights: an engine that reads it sees the folder

A folder has its name when all of it is written. It is deleted when each engine has a newer one.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from wsync.engine.client import EngineClient, EngineError, Transfer, VersionSource
from wsync.engine.protocol import MODELS
from wsync.errors import LayoutMismatch, WeightSyncError
from wsync.store.safetensors_file import FORMAT, content_of, header_of, others_of
from wsync.update import Update
from wsync.weights.layout import Layout
from wsync.weights.tensors import describe

_log = logging.getLogger(__name__)
_LONGEST_REQUEST = 16  # adapters that are sent while a request with an older one is generated
_OF_VERSION = re.compile(r"v\d{8,}-[0-9a-f]{8}(\.unfinished)?")


class VersionFolders:
    """The versions of one trainer as folders, each written once for all engines.

    ``root``: a folder of this model alone, which all engines see under the same path. ``model_folder``: of a model
    with the same weights; its other files are copied beside each version. ``file``: how its files are named.
    ``shard_bytes``: of tensors in one file.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        model_folder: str | os.PathLike[str] | None,
        file: str = "model",
        shard_bytes: int = 5 << 30,
    ) -> None:
        self._root = Path(os.path.abspath(os.path.expanduser(root)))
        self._model_folder = None if model_folder is None else Path(model_folder).expanduser()
        self._file, self._shard_bytes = file, shard_bytes
        self.run, self._newest = secrets.token_hex(4), ""
        self._read: dict[object, set[str]] = {}  # by engine: folders that it may read; "": those of an earlier trainer
        self._lock = threading.Lock()  # guards these, and the folders

    def admit(self, engine: object, layout: Layout) -> None:
        """An engine will read, and may read what an earlier trainer has left.

        LayoutMismatch: these are not the weights of the model folder, or no weights of a safetensors file.
        """
        header_of(layout, range(len(layout.names)))
        expected = dict[str, Any]()
        for path in () if self._model_folder is None else self._model_folder.glob("*.safetensors"):
            with path.open("rb") as file:
                expected |= msgspec.json.decode(file.read(int.from_bytes(file.read(8), "little")))
        expected.pop("__metadata__", None)
        tied = {layout.names[follower] for follower, _ in layout.ties}
        shapes = {name: [*shape] for name, shape in zip(layout.names, layout.shapes, strict=True)}
        shapes = {name: shape for name, shape in shapes.items() if name in expected or name not in tied}
        wrong = [name for name in {**expected, **shapes} if shapes.get(name) != expected.get(name, {}).get("shape")]
        if expected and wrong:
            raise LayoutMismatch(f"these weights differ from those in {self._model_folder}: {describe(sorted(wrong))}")
        with self._lock:
            self._read[engine] = {""}

    def write(self, engine: object, update: Update) -> Path:
        """Write a version for an engine, if that was not done; return its folder. WeightSyncError: that failed."""
        with self._lock:
            folder = self._root / f"v{update.version:08d}-{self.run}"
            self._read[engine].add(folder.name)
            if not folder.exists():
                unfinished = folder.with_name(f"{folder.name}.unfinished")
                try:
                    (unfinished / "probe").mkdir(parents=True)
                    self._write_files(unfinished, update)
                    unfinished.rename(folder)
                except OSError as error:
                    shutil.rmtree(unfinished, ignore_errors=True)
                    what = f"version {update.version} cannot be written to {self._root}"
                    raise WeightSyncError(f"{what}: {error}") from error
            self._newest = max(self._newest, folder.name)
            return folder

    def _write_files(self, folder: Path, update: Update) -> None:
        # Tied tensors under each name: on a CPU vLLM's head has a packed copy, made anew only if it is loaded itself.
        for file, pieces in content_of(update.buffer, self._shard_bytes, self._file).items():
            with (folder / file).open("xb") as opened:
                opened.writelines(pieces)
        layout = update.buffer.layout
        (folder / "probe" / "model.safetensors").write_bytes(header_of(layout, [], FORMAT))
        for path in others_of(self._model_folder):
            shutil.copyfile(path, folder / path.name)

    def keep(self, engine: object, *names: str) -> None:
        """Note that an engine reads none but these from now on; delete what no engine reads."""
        with self._lock:
            if engine not in self._read:
                return  # it was disconnected meanwhile
            self._read[engine] = {*names}
            kept = {self._newest}.union(*self._read.values())
            for path in self._root.glob(f"v*-{self.run if '' in kept else '????????'}*"):
                if _OF_VERSION.fullmatch(path.name) and path.name not in kept:
                    try:
                        shutil.rmtree(path)
                    except OSError as error:  # the engines have the version all the same; the next one tries again
                        _log.warning("an old version cannot be deleted: %s", error)

    def forget(self, engine: object) -> None:
        """An engine reads no more."""
        with self._lock:
            self._read.pop(engine, None)


class DiskTransfer(Transfer):
    """The transfer ``"disk"`` to one server: its own load of a version's folder.

    vLLM: a reload that fails half-way leaves layers that wait for the rest, and would take it from the next version. So
    each reload is preceded by one of a folder without weights, which ends what waits. SGLang cannot load nothing.
    """

    def __init__(
        self, client: EngineClient, source: VersionSource, folders: VersionFolders, *, clear_cache: bool = True
    ) -> None:
        self._client, self._source, self._folders = client, source, folders
        self._vllm, self._clear_cache = client.kind == "vllm", clear_cache
        self._refusal = ""
        folders.admit(self, source.layout)

    def stage(self) -> None:
        assert self._source.update is not None
        self._client.phase = "write"
        self._folder = self._folders.write(self, self._source.update)

    def prepare(self) -> None:
        """Find out whether the engine sees the folder, by a load of nothing that touches no layer."""
        if self._vllm:
            self._reload("prepare", self._folder / "probe", is_checkpoint_format=False)

    def commit(self) -> None:
        client, began, version = self._client, time.perf_counter(), str(self._client.version)
        if self._vllm:
            self._reload("update", self._folder / "probe")
            self._reload("update", self._folder)
            client.post("finish", "/update_weight_version", {"new_version": version})
        else:
            load = {"model_path": str(self._folder), "weight_version": version, "flush_cache": self._clear_cache}
            answer = client.post("update", "/update_weights_from_disk", load)
            if answer.get("success") is not True:
                raise EngineError(f"{client.url}: phase update: it was sent version {version}, and answered {answer}")
        client.times = 0.0, time.perf_counter() - began
        self._folders.keep(self, self._folder.name)

    def shutdown(self) -> None:
        self._folders.forget(self)

    def _reload(self, phase: str, folder: Path, **options: Any) -> None:
        """Have all ranks load a folder. After a refusal vLLM takes a rank's answer for that to its next call."""
        if self._refusal:
            raise EngineError(f"its ranks have refused: start it again, then readmit() it. Before: {self._refusal}")
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(folder), **options}}
        try:
            self._client.post(phase, "/collective_rpc", call)
        except EngineError as error:
            if error.status and self._client.get_world_size() > 1:
                self._refusal = str(error)
            self._client.phase = phase
            hint = f" (does the engine see {folder}?)" if phase == "prepare" else ""
            raise EngineError(f"{error}{hint}", error.kind, error.status) from error


class LoraTransfer(DiskTransfer):
    """The transfer ``"lora"`` to one server: it loads each version as an adapter of its own, while it generates.

    ``name``: what the adapters' names begin with. ``kept``: how many of the newest stay loaded.
    """

    def __init__(self, *args: Any, name: str, kept: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._prefix, self._kept = f"{name}-", kept
        self._written = deque[str](maxlen=kept + _LONGEST_REQUEST)

    def prepare(self) -> None:
        """Load the adapter, which no request names yet."""
        began, name = time.perf_counter(), self._prefix + self._folder.name
        self._ask("prepare", "load", name, lora_path=str(self._folder))
        models = [one["id"] for one in self._client.post("prepare", MODELS)["data"]]
        self._loaded = [one for one in models if _OF_VERSION.fullmatch(one.removeprefix(self._prefix))]
        if name not in self._loaded:
            raise EngineError(f"{self._client.url}: phase prepare: it was sent {name}, and has {models}")
        self._client.times = 0.0, time.perf_counter() - began

    def commit(self) -> None:
        """Unload adapters that are too old, and those of an earlier trainer."""
        kept = sorted(name for name in self._loaded if name.endswith(self._folders.run))[-self._kept :]
        for name in self._loaded:
            if name not in kept:
                self._ask("finish", "unload", name)
        self._written.append(self._folder.name)
        self._folders.keep(self, *self._written)  # for a request in flight, vLLM may read an older one again

    def abort(self) -> None:
        self._ask("abort", "unload", self._prefix + self._folder.name)

    def _ask(self, phase: str, what: str, name: str, **fields: str) -> None:
        route = f"{'/v1' if self._vllm else ''}/{what}_lora_adapter"
        try:
            self._client.post(phase, route, {"lora_name": name, **fields})
        except EngineError as error:
            if error.status != 200:  # vLLM answers with a sentence
                raise
