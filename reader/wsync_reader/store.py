"""Reads the folder of a ``wsync.StoreWeightSyncScheme``: on a disk, behind HTTP, or in S3 (by ``fsspec``).

``wsync.store`` describes the files. The manifest is not trusted: every field is checked.
"""

import io
import os
import re
from contextlib import AbstractContextManager
from typing import Annotated, Any
from urllib.parse import quote
from urllib.request import Request, urlopen

import msgspec
import numpy as np
from msgspec import Meta

from wsync_reader.layout import Layout, Weights, WeightSyncError, checksum_of, numpy_dtype, require, with_difference
from wsync_reader.receiving import Reader

_MANIFEST, _MAX_HEADER, _PIECE = "manifest.json", 64 << 20, 1 << 20  # bytes; the last are read at a time
_Size = Annotated[int, Meta(ge=0, lt=2**60)]  # in bytes
_SHORTEST_LOOK, _LONGEST_LOOK, _PATIENCE = 0.02, 1.0, 10.0  # seconds between two looks; and for a server to send


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version, and what a store has of it."""

    version: Annotated[int, Meta(ge=1, lt=2**40)]
    checksum: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    whole: _Size  # 0: it is no anchor
    difference: _Size  # 0: there is none


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest version of a store, which is the last of ``versions``, and how it is read."""

    writer: Annotated[str, Meta(pattern="^[0-9A-Za-z]{1,64}$")]
    layout: bytes
    versions: Annotated[tuple[Stored, ...], Meta(min_length=1, max_length=2000)]
    requires: dict[str, Annotated[int, Meta(ge=0, lt=2**40)]] = {}
    differences: bool = False
    shard_bytes: _Size = 0

    def way(self, own: tuple[int, str], bad: str) -> list[tuple[Stored, str, int]]:
        """Return what is read for the newest version, one after the other: its name, and its bytes.

        ``own``: version and checksum of what is here. The way has the fewest bytes of those without the damaged
        file ``bad``, if there are such. ValueError: there is none.
        """
        ways, steps = list[list[tuple[Stored, str, int]]](), list[tuple[Stored, str, int]]()
        for one in reversed(self.versions):
            name = f"v{one.version:08d}-{self.writer}"
            if (one.version, one.checksum) == own:
                ways.append(steps)
            if one.whole:
                ways.append([(one, name if self.shard_bytes else f"{name}.safetensors", one.whole), *steps])
            if not one.difference:
                break
            steps = [(one, f"{name}.difference", one.difference), *steps]
        if not ways:
            raise ValueError("no whole version is before its differences")
        return min(ways, key=lambda way: (any(name == bad for _, name, _ in way), sum(nbytes for *_, nbytes in way)))


class StoreReader(Reader):
    """Reads each version as it appears."""

    def __init__(self, url: str, model: str, worker: int) -> None:
        if (folder := quote(model, safe="")) in ("", ".", ".."):
            raise ValueError(f"model is the name of a folder in a store, not {model!r}")
        url = url.removeprefix("file://")
        self._local = "://" not in url
        self._url = f"{os.path.abspath(os.path.expanduser(url)) if self._local else url.rstrip('/')}/{folder}"
        self._read_last, self._file, self._bad = 0, "", ""  # the version; the file that is read; one that is damaged
        self._base = (0, "", np.empty(0, np.uint8))  # the newest that is here, checked: version, checksum, weights
        self._seen: object = None  # of the manifest in a folder
        super().__init__(f"the store {_without_secrets(self._url)}", worker)

    def follow(self, deadline: float | None) -> None:
        pause = _SHORTEST_LOOK
        while not self.stop.is_set():
            pause = _SHORTEST_LOOK if self._look() or self._local else min(2 * pause, _LONGEST_LOOK)
            self.stop.wait(pause)

    def _look(self) -> bool:
        """Stage the newest version, if it is a new one; WeightSyncError: it is damaged, or cannot be read."""
        self._file = _MANIFEST
        try:
            if (manifest := self._newest()) is None or manifest.versions[-1].version <= self._read_last:
                self.note(None)
                return False
            weights = self._read(manifest)
        except Exception as error:
            file, before, self._seen = self._file, self._bad, None
            if isinstance(error, ModuleNotFoundError):
                raise
            missing = isinstance(error, FileNotFoundError) or getattr(error, "code", 0) in (404, 410)  # of HTTP
            self._bad = file if missing or isinstance(error, ValueError) else before  # not if the link was cut
            if missing and (file == _MANIFEST or file != before):
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
            return msgspec.json.decode(stream.read(_MAX_HEADER), type=Manifest)

    def _read(self, manifest: Manifest) -> Weights:
        """Make the newest version; ValueError: a file is cut off, too long, corrupt, or a difference to another."""
        layout = Layout.decode(manifest.layout)
        if manifest.differences:
            require("zstandard", "delta")
        _, checksum, flat = self._base
        for one, name, nbytes in manifest.way(self._base[:2], self._bad):
            self._file = name
            if name.endswith(".difference"):
                with self._open(name, 8 + len(flat)) as stream:  # a longer one is not written
                    _fill(stream, content := np.empty(8 + min(nbytes, len(flat)), np.uint8))
                if (digest := content[:8].tobytes().hex()) != checksum:
                    raise ValueError(f"it is a difference to weights with the checksum {digest}, not {checksum}")
                flat = with_difference(flat, content[8:])
            else:
                flat = self._whole(name, layout, manifest.shard_bytes)
            if (checksum := f"{checksum_of(flat, manifest.layout):016x}") != one.checksum:
                raise ValueError(f"it is corrupt: its checksum is {checksum}, not {one.checksum}")
            self._base = one.version, checksum, flat
        return Weights(layout, flat, manifest.versions[-1].version, manifest.writer, manifest.requires)

    def _whole(self, name: str, layout: Layout, shard_bytes: int) -> np.ndarray:
        """Read the tensors of a version, each into its place."""
        flat = np.zeros(layout.nbytes, np.uint8)
        for file, entries in _files_of(layout, shard_bytes).items():
            with self._open(f"{name}/{file}".rstrip("/"), sum(map(layout.size, entries)) + _MAX_HEADER) as stream:
                _fill(stream, length := np.empty(1, np.uint64))
                _fill(stream, np.empty(min(int(length[0]), _MAX_HEADER), np.uint8))
                for index in entries:
                    _fill(stream, layout.array(index, flat))
                if stream.read(1):
                    raise ValueError("it has more bytes than its header and the tensors")
        return flat

    def _open(self, file: str, limit: int) -> AbstractContextManager[Any]:
        """Open a file for reading; whatever a library raises."""
        path = f"{self._url}/{file}"
        if self._local:
            return open(path, "rb")
        if path.startswith(("http://", "https://")):
            return urlopen(Request(path, headers={"Cache-Control": "no-cache"}), timeout=_PATIENCE)
        fs, path = require("fsspec", "s3").core.url_to_fs(path)
        fs.invalidate_cache()
        return io.BytesIO(fs.cat_file(path, start=0, end=limit + 1))


def _files_of(layout: Layout, shard_bytes: int) -> dict[str, list[int]]:
    """Return the files of a whole version by name, with the entries in each; one called ``""`` is no folder's."""
    left_out = {} if shard_bytes else dict(layout.ties)  # a folder has tied tensors, too
    order = [index for index in range(len(layout.names)) if index not in left_out]
    order.sort(key=lambda index: -numpy_dtype(layout.dtypes[index]).itemsize)
    limit, shards, room = shard_bytes or layout.nbytes, list[list[int]](), -1
    for index in order:
        if (room := room - layout.size(index)) < 0:
            shards.append([])
            room = limit - layout.size(index)
        shards[-1].append(index)
    if len(shards) == 1:
        return {"model.safetensors" if shard_bytes else "": order}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def _fill(stream: Any, array: np.ndarray) -> None:
    """Read into all of an array; ValueError: the file ends before."""
    dense = np.ascontiguousarray(array).reshape(-1)  # a copy, where it is not contiguous
    left = dense.view(np.uint8).data
    while left:
        if not (got := stream.readinto(left[:_PIECE])):
            raise ValueError("the file ends too early")
        left = left[got:]
    if not np.may_share_memory(dense, array):
        array[...] = dense.reshape(array.shape)


def _without_secrets(text: str) -> str:
    """Return a text without user, password and query of the URLs in it."""
    return re.sub(r"://(?:[^\s/?'\"]*@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?", r"://\1", text)
