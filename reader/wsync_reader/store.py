"""Reads the folder of a ``wsync.StoreWeightSyncScheme``: on a disk, behind HTTP, or in S3 (by ``fsspec``).

    <url>/<model>/manifest.json                    replaced as a whole: the newest version, its layout and checksum
    <url>/<model>/v00000012-<writer>.safetensors   one version: the tensors follow the header, the widest numbers first

Any process that can write to the store may have made the manifest: every field is checked before it is used.
"""

from __future__ import annotations

import io
import os
import re
from contextlib import AbstractContextManager
from typing import Annotated, Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

import msgspec
import numpy as np
from msgspec import Meta

from wsync_reader.errors import WeightSyncError
from wsync_reader.layout import ALIGNMENT, Layout, Weights, checksum_of, numpy_dtype
from wsync_reader.receiving import Reader, Stopped

_MANIFEST, _MAX_HEADER = "manifest.json", 64 << 20
_PIECE = 1 << 20  # bytes
_PATIENCE = 10.0  # seconds for the next bytes of a server
_SHORTEST_LOOK, _LONGEST_LOOK = 0.02, 1.0  # seconds between two looks for a newer version; on a disk, the shortest
_Version = Annotated[int, Meta(ge=0, lt=2**40)]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest version of a store, and how it is read."""

    version: Annotated[int, Meta(ge=1, lt=2**40)]
    writer: Annotated[str, Meta(pattern="^[0-9A-Za-z]{1,64}$")]
    layout: bytes
    checksum: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    requires: dict[str, _Version] = {}

    @property
    def file(self) -> str:
        return f"v{self.version:08d}-{self.writer}.safetensors"


class StoreReader(Reader):
    """Reads each version as it appears, in a thread."""

    def __init__(self, url: str, model: str, worker: int) -> None:
        if quote(model, safe="") in ("", ".", ".."):
            raise ValueError(f"model is the name of a folder in a store, not {model!r}")
        self._url = f"{url.rstrip('/')}/{quote(model, safe='')}"
        self._local = "://" not in self._url or self._url.startswith("file://")
        if self._local:
            self._url = os.path.abspath(os.path.expanduser(self._url.removeprefix("file://")))
        super().__init__(f"the store {_without_secrets(self._url)}", worker)
        self._read_last = 0  # the version that was read last
        self._seen: object = None  # of the manifest of a folder

    def follow(self, deadline: float | None) -> None:
        pause = _SHORTEST_LOOK
        while True:
            try:
                found = self._look()
            except Exception:
                self._seen = None
                raise
            self.reached(ready=self.version > 0)
            pause = _SHORTEST_LOOK if found or self._local else min(2 * pause, _LONGEST_LOOK)
            if self.stop.wait(pause):
                raise Stopped

    def _look(self) -> bool:
        """Stage the newest version, if it is a newer one; WeightSyncError: it is bad, or the store cannot be read."""
        missing = ""
        while (manifest := self._newest()) is not None and manifest.version > self._read_last:
            try:
                layout = Layout.decode(manifest.layout)
                weights = self._read(manifest, layout)
            except FileNotFoundError as error:  # deleted, because newer versions have been published
                if manifest.file == missing:
                    text = f"{self.where}: {manifest.file} is missing, and the manifest names it"
                    raise WeightSyncError(text) from error
                missing, self._seen = manifest.file, None
                continue
            except Exception as error:
                raise self._explained(f"version {manifest.version} cannot be read: {manifest.file}", error) from error
            if manifest.writer != self.sender:
                self.begin(manifest.writer)
            self._read_last = manifest.version
            self.stage(weights)
            return True
        return False

    def _newest(self) -> Manifest | None:
        """Return the manifest; None: there is none, or it is the one that was seen before."""
        try:
            if self._local:
                state = os.stat(f"{self._url}/{_MANIFEST}")
                seen = state.st_mtime_ns, state.st_ino, state.st_size
                if seen == self._seen:
                    return None
                self._seen = seen
            with self._open(_MANIFEST, _MAX_HEADER) as stream:
                content = stream.read(_MAX_HEADER + 1)
            if len(content) > _MAX_HEADER:
                raise ValueError(f"it has more than {_MAX_HEADER} bytes")
            return msgspec.json.decode(content, type=Manifest)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._explained(f"the manifest {_MANIFEST} is damaged or cannot be read", error) from error

    def _read(self, manifest: Manifest, layout: Layout) -> Weights:
        """Read the tensors of a version, each into its place; ValueError: it is cut off, too long, or corrupt."""
        order = sorted(layout.leaders, key=lambda index: -numpy_dtype(layout.dtypes[index]).itemsize)
        nbytes = sum(layout.nbytes_of(index) for index in order)
        if layout.nbytes > nbytes + ALIGNMENT * len(layout.names):  # no more memory than the tensors take
            raise ValueError(f"its layout has {layout.nbytes} bytes for tensors of {nbytes}")
        with self._open(manifest.file, layout.nbytes + _MAX_HEADER) as stream:
            header = np.empty(8, np.uint8)
            _fill(stream, header)
            length = int.from_bytes(header.tobytes(), "little")
            if length > _MAX_HEADER:
                raise ValueError(f"its header has {length} bytes")
            _fill(stream, np.empty(length, np.uint8))
            flat = np.zeros(layout.nbytes, np.uint8)
            for index in order:
                begin, array = layout.offsets[index], layout.array(index, flat)
                own = array.flags.c_contiguous
                raw = flat[begin : begin + layout.nbytes_of(index)] if own else np.empty(array.nbytes, np.uint8)
                _fill(stream, raw)
                if not own:
                    array[...] = raw.view(array.dtype).reshape(array.shape)
            if stream.read(1):
                raise ValueError("it has more bytes than its header and the tensors")
        checksum = f"{checksum_of(flat, manifest.layout):016x}"
        if checksum != manifest.checksum:
            raise ValueError(f"it is corrupt: its checksum is {checksum}, not {manifest.checksum}")
        return Weights(manifest.version, manifest.writer, layout, flat, manifest.requires)

    def _open(self, file: str, limit: int) -> AbstractContextManager[Any]:
        """Open a file for reading; FileNotFoundError: there is none; what else a library raises."""
        path = f"{self._url}/{file}"
        if self._local:
            return open(path, "rb")
        if path.startswith(("http://", "https://")):
            try:
                return urlopen(Request(path, headers={"Cache-Control": "no-cache"}), timeout=_PATIENCE)
            except HTTPError as error:
                if error.code in (404, 410):
                    raise FileNotFoundError(file) from error
                raise
        import fsspec

        fs, path = fsspec.core.url_to_fs(path)
        fs.invalidate_cache()
        return io.BytesIO(fs.cat_file(path, start=0, end=limit + 1))

    def _explained(self, what: str, error: Exception) -> WeightSyncError:
        text = _without_secrets(f"{type(error).__name__}: {error}")
        return WeightSyncError(f"{self.where}: {what}: {text}")


def _fill(stream: Any, memory: np.ndarray) -> None:
    """Read into all of ``memory``; ValueError: the file ends before."""
    left = memory.data
    while left:
        got = stream.readinto(left[:_PIECE])
        if not got:
            raise ValueError("the file ends within its tensors")
        left = left[got:]


def _without_secrets(text: str) -> str:
    """Return a text without user, password and query of the URLs in it."""
    return re.sub(r"://(?:[^\s/?'\"]*@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?", r"://\1", text)
