"""Reads the folder of a ``wsync.StoreWeightSyncScheme``: on a disk, behind HTTP, or in S3 (by ``fsspec``).

``wsync.store`` describes the files. Any process that can write there may have made the manifest: every field is checked
before it is used.
"""

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

from wsync_reader.layout import ALIGNMENT, Layout, Weights, WeightSyncError, checksum_of, numpy_dtype
from wsync_reader.receiving import Reader

_MANIFEST, _MAX_HEADER, _PIECE = "manifest.json", 64 << 20, 1 << 20  # bytes; the last are read at a time
_SHORTEST_LOOK, _LONGEST_LOOK, _PATIENCE = 0.02, 1.0, 10.0  # seconds between two looks; and for a server to send


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest version of a store, and how it is read."""

    version: Annotated[int, Meta(ge=1, lt=2**40)]
    writer: Annotated[str, Meta(pattern="^[0-9A-Za-z]{1,64}$")]
    layout: bytes
    checksum: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    requires: dict[str, Annotated[int, Meta(ge=0, lt=2**40)]] = {}


class StoreReader(Reader):
    """Reads each version as it appears."""

    def __init__(self, url: str, model: str, worker: int) -> None:
        folder = quote(model, safe="")
        if folder in ("", ".", ".."):
            raise ValueError(f"model is the name of a folder in a store, not {model!r}")
        url = url.removeprefix("file://")
        self._local = "://" not in url
        self._url = f"{os.path.abspath(os.path.expanduser(url)) if self._local else url.rstrip('/')}/{folder}"
        self._read_last, self._missing = 0, ""  # the version that was read last; the file that could not be
        self._seen: object = None  # of the manifest in a folder
        super().__init__(f"the store {_without_secrets(self._url)}", worker)

    def follow(self, deadline: float | None) -> None:
        pause = _SHORTEST_LOOK
        while not self.stop.is_set():
            found = self._look()
            pause = _SHORTEST_LOOK if found or self._local else min(2 * pause, _LONGEST_LOOK)
            self.stop.wait(pause)

    def _look(self) -> bool:
        """Stage the newest version, if it is a new one; WeightSyncError: it is damaged, or cannot be read."""
        file = _MANIFEST
        try:
            if (manifest := self._newest()) is None or manifest.version <= self._read_last:
                self.note(None)
                return False
            file = f"v{manifest.version:08d}-{manifest.writer}.safetensors"
            weights = self._read(manifest, file)
        except Exception as error:
            self._seen, before, self._missing = None, self._missing, file
            if isinstance(error, FileNotFoundError) and (file == _MANIFEST or file != before):
                return False  # there is no version yet; or it was deleted, and there are newer ones
            text = _without_secrets(f"{type(error).__name__}: {error}")
            raise WeightSyncError(f"{self.where}: {file} is damaged, or cannot be read: {text}") from error
        self._read_last = weights.version
        self.begin(weights.sender)
        self.stage(weights)
        return True

    def _newest(self) -> Manifest | None:
        """Return the manifest; None: it is the one that was seen before."""
        if self._local:
            state = os.stat(f"{self._url}/{_MANIFEST}")
            before, self._seen = self._seen, (state.st_mtime_ns, state.st_ino, state.st_size)
            if before == self._seen:
                return None
        with self._open(_MANIFEST, _MAX_HEADER) as stream:
            content = stream.read(_MAX_HEADER + 1)
        if len(content) > _MAX_HEADER:
            raise ValueError(f"it has more than {_MAX_HEADER} bytes")
        return msgspec.json.decode(content, type=Manifest)

    def _read(self, manifest: Manifest, file: str) -> Weights:
        """Read the tensors of a version, each into its place; ValueError: it is cut off, too long, or corrupt."""
        layout = Layout.decode(manifest.layout)
        order = sorted({*range(len(layout.names))}.difference(follower for follower, _ in layout.ties))
        order.sort(key=lambda index: -numpy_dtype(layout.dtypes[index]).itemsize)
        if layout.nbytes > sum(map(layout.size, order)) + ALIGNMENT * len(layout.names):
            raise ValueError(f"its layout has {layout.nbytes} bytes, more than the tensors")
        flat = np.zeros(layout.nbytes, np.uint8)
        with self._open(file, layout.nbytes + _MAX_HEADER) as stream:
            _fill(stream, length := np.empty(1, np.uint64))
            if length[0] > _MAX_HEADER:
                raise ValueError(f"its header has {length[0]} bytes")
            _fill(stream, np.empty(length[0], np.uint8))
            for index in order:
                array = layout.array(index, flat)
                _fill(stream, dense := array if array.flags.c_contiguous else np.empty(array.shape, array.dtype))
                if dense is not array:
                    array[...] = dense
            if stream.read(1):
                raise ValueError("it has more bytes than its header and the tensors")
        if (checksum := f"{checksum_of(flat, manifest.layout):016x}") != manifest.checksum:
            raise ValueError(f"it is corrupt: its checksum is {checksum}, not {manifest.checksum}")
        return Weights(layout, flat, manifest.version, manifest.writer, manifest.requires)

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
                    raise FileNotFoundError(f"there is no {file}") from error
                raise
        import fsspec

        fs, path = fsspec.core.url_to_fs(path)
        fs.invalidate_cache()
        return io.BytesIO(fs.cat_file(path, start=0, end=limit + 1))


def _fill(stream: Any, array: np.ndarray) -> None:
    """Read into all of an array; ValueError: the file ends before."""
    left = array.reshape(-1).view(np.uint8).data
    while left:
        if not (got := stream.readinto(left[:_PIECE])):
            raise ValueError("the file ends within its tensors")
        left = left[got:]


def _without_secrets(text: str) -> str:
    """Return a text without user, password and query of the URLs in it."""
    return re.sub(r"://(?:[^\s/?'\"]*@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?", r"://\1", text)
