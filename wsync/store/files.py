"""A folder of versions, as a trainer writes it: one safetensors file each, and a manifest that names the newest.

    <url>/manifest.json                    replaced as a whole: what a reader looks at first
    <url>/v00000012-<writer>.safetensors   one version; never changed, deleted when it is no longer among the newest

A version's file is complete before the manifest names it, and each file is seen when all of it is there. On a local
file system it is written under another name, flushed to the disk and renamed. Object stores (S3, memory) show an object
when all of it is there.

Any process that can write to the store may have made the manifest. So every field is checked before it is used: the
name of a version's file follows from its number and its writer, and is in the store's folder.
"""

from __future__ import annotations

import io
import logging
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import fsspec
import msgspec
from fsspec.implementations.local import LocalFileSystem
from msgspec import Meta

from wsync.control.session import checksum_of
from wsync.errors import NotConnected, WeightSyncError
from wsync.store.safetensors_file import header_of, order_in_file, tensors_of
from wsync.update import LAST_VERSION, Outlet, Update
from wsync.weights.layout import Buffer, BufferPool, Layout
from wsync.weights.targets import require_no_extra

_log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
SAME_WEIGHTS = "all readers of a store get the same weights"
MAX_HEADER = 64 << 20  # bytes of the largest manifest, which has the layout, and of what precedes the tensors in a file
_PIECE = 1 << 20  # bytes
_VERSION_FILE = re.compile(r"v(\d+)-\w+\.safetensors")
_UNFINISHED = ".unfinished"


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest version of a store, and how it is read."""

    version: Annotated[int, Meta(ge=1, lt=LAST_VERSION)]
    writer: Annotated[str, Meta(pattern="^[0-9A-Za-z]{1,64}$")]  # the trainer, which it identifies in ``requires``, too
    layout: bytes  # ``Layout.encode``
    checksum: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]  # of the packed weights and the layout
    requires: dict[str, Annotated[int, Meta(ge=0, lt=LAST_VERSION)]] = {}

    @property
    def file(self) -> str:
        return f"v{self.version:08d}-{self.writer}.safetensors"


def absolute_url(url: str | os.PathLike[str]) -> str:
    """Return a URL as it is, and a path from the root: workers may have other working directories."""
    url = os.fspath(url)
    if not url:
        raise ValueError("url is the URL or the path of a folder ('s3://bucket/run', '/shared/run'), not ''")
    path = re.sub(r"^(file|local)://", "", url)
    return path if "://" in path or "::" in path else os.path.abspath(os.path.expanduser(path))


class Store:
    """The files in the folder at a URL, on any file system that ``fsspec`` has; NotConnected: it cannot be opened.

    The methods for single files raise whatever the library of the file system raises.
    """

    def __init__(self, url: str) -> None:
        self.url = re.sub(r"(?<=://)[^/]*@|\?.*", "", url) if "://" in url else url  # without user and password
        self._given_url = url
        try:
            opened, self._root = fsspec.core.url_to_fs(url)
        except Exception as error:  # besides OSError: whatever the library of the file system raises
            raise NotConnected(f"the store {self.url} cannot be opened: {self.explain(error)}") from error
        self.local = Path(self._root) if isinstance(opened, LocalFileSystem) else None

    @property
    def _fs(self) -> Any:
        """This thread's file system (``fsspec`` keeps one for each), which looks anew."""
        fs = fsspec.core.url_to_fs(self._given_url)[0]
        fs.invalidate_cache(self._root)
        return fs

    def explain(self, error: Exception) -> str:
        """Return an error of a library as text, without user, password and query of the URLs in it."""
        text = f"{type(error).__name__}: {error}".replace(self._given_url, self.url)  # which may have a blank
        return re.sub(r"://(?:[^\s/?'\"]*@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?", r"://\1", text)

    @contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """Raise errors of a library as a ``WeightSyncError`` that begins with ``what``."""
        try:
            yield
        except Exception as error:
            raise WeightSyncError(f"{what}: {self.explain(error)}") from error

    def newest(self) -> Manifest | None:
        """Return the manifest, None if nothing has been published; WeightSyncError: it is damaged or unreadable."""
        with self.explaining(f"the store {self.url} cannot be read"):
            try:
                content = self._read(MANIFEST, MAX_HEADER)
            except FileNotFoundError:
                return None
        with self.explaining(f"the manifest {MANIFEST} of the store {self.url} is damaged"):
            return msgspec.json.decode(content.getbuffer(), type=Manifest)

    def _read(self, file: str, limit: int) -> io.BytesIO:
        """Return a file's content. ValueError: it has more than ``limit`` bytes, which counts while it is read."""
        fs, path, content = self._fs, f"{self._root}/{file}", io.BytesIO()
        if "http" not in fs.protocol:
            content = io.BytesIO(fs.cat_file(path, start=0, end=limit + 1))
        else:  # a server may ignore a range, and may compress: a stream (``size`` is not used)
            with fs.open(path, block_size=0, size=1) as stream:
                while content.tell() <= limit and (piece := stream.read(_PIECE)):
                    content.write(piece)
        if content.getbuffer().nbytes > limit:
            raise ValueError(f"{file} has more than {limit} bytes")
        content.seek(0)
        return content

    def make(self) -> None:
        """Make the folder; WeightSyncError: that failed."""
        with self.explaining(f"the store {self.url} cannot be written"):
            self._fs.makedirs(self._root, exist_ok=True)

    def delete_before(self, oldest: int) -> None:
        """Delete older versions, and what killed trainers left unfinished; a failure is logged."""
        try:
            for path in self._fs.ls(self._root, detail=False):
                name = path.rsplit("/", 1)[-1]
                match = _VERSION_FILE.fullmatch(name)
                if name.endswith(_UNFINISHED) or (match is not None and int(match[1]) < oldest):
                    self._fs.rm_file(f"{self._root}/{name}")
        except Exception as error:  # noqa: BLE001  readers see the newest version already, so it has to count as stored
            _log.warning("old versions of the store %s cannot be deleted: %s", self.url, self.explain(error))

    def open(self, file: str, limit: int) -> io.BufferedIOBase:
        """Open a file for reading; one that is not local is read at once, and has at most ``limit`` bytes."""
        return self._read(file, limit) if self.local is None else open(self.local / file, "rb")

    def write(self, file: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a file, or replace it; on a local file system it is on the disk then."""
        if self.local is None:
            return self._fs.pipe_file(f"{self._root}/{file}", b"".join(pieces))
        unfinished = self.local / f"{file}.{secrets.token_hex(8)}{_UNFINISHED}"
        try:
            with open(unfinished, "xb") as opened:
                opened.writelines(pieces)
                opened.flush()
                os.fsync(opened.fileno())
            unfinished.replace(self.local / file)
        finally:
            unfinished.unlink(missing_ok=True)
        folder = os.open(self.local, os.O_RDONLY)
        try:
            os.fsync(folder)  # the file's name
        finally:
            os.close(folder)


class Files(Outlet):
    """An ``Outlet`` without connections: each update becomes a version, of which the newest ``keep`` are kept.

    A version that is published is stored: nothing has to be waited for, and nothing can fail later. A version that was
    prepared and is not committed is deleted when it is old. ``num_workers`` is only for reports.
    """

    transactional = True

    def __init__(self, store: Store, num_workers: int = 1, *, keep: int = 3) -> None:
        self.name = secrets.token_hex(4)  # in the names of the files
        self.workers = range(num_workers)
        self._store, self._keep = store, keep
        self._pool = BufferPool()
        self._layout: Layout | None = None
        self._header = b""
        self._prepared: Manifest | None = None
        self._wrote = False

    def begin(self) -> int:
        """Make the folder; return the newest version in it, 0 for none."""
        self._store.make()
        manifest = self._store.newest()
        return 0 if manifest is None else manifest.version

    def set_layout(self, layout: Layout) -> None:
        self._header, self._layout = header_of(layout, order_in_file(layout)), layout

    def reserve(self, deadline: float | None) -> Buffer:
        assert self._layout is not None, "set_layout() comes first"
        return self._pool.reserve(self._layout)

    def publish(self, update: Update, workers: Sequence[int]) -> None:
        self.prepare(update, workers)
        self.commit(update, workers)

    def prepare(self, update: Update, workers: Sequence[int]) -> None:
        """Write the file of a version, which readers do not see yet; LayoutMismatch, WeightSyncError: that failed."""
        if not {*self.workers} <= {*workers}:
            raise ValueError(f"{SAME_WEIGHTS}: send to all workers, without worker_ids")
        require_no_extra(update.extra, "stored")
        buffer = update.buffer
        layout = buffer.layout.encode()
        checksum = f"{checksum_of(buffer.memory, layout):016x}"
        manifest = Manifest(update.version, self.name, layout, checksum, dict(update.requires))
        self._write(manifest, manifest.file, [self._header, *tensors_of(buffer, order_in_file(buffer.layout))])
        self._prepared = manifest

    def commit(self, update: Update, workers: Sequence[int]) -> None:
        manifest, self._prepared = self._prepared, None
        assert manifest is not None and manifest.version == update.version, "prepare() comes first"
        self._write(manifest, MANIFEST, [msgspec.json.encode(manifest)])
        self._wrote = True
        self._store.delete_before(manifest.version - self._keep + 1)

    def _write(self, manifest: Manifest, file: str, pieces: Sequence[bytes | memoryview]) -> None:
        """Write a file of a version; WeightSyncError: another trainer writes to the store, or it cannot be written."""
        newest, url = self._store.newest(), self._store.url
        if newest is not None and (newest.version >= manifest.version or (self._wrote and newest.writer != self.name)):
            raise WeightSyncError(
                f"another trainer has published version {newest.version} in the store {url}: give each its own url"
            )
        with self._store.explaining(f"version {manifest.version} was not stored in {url}"):
            self._store.write(file, pieces)

    def seen(self, worker: int, version: int) -> dict[str, Any]:
        newest = self._store.newest() if self._wrote else None
        error = "" if newest is None or newest.writer == self.name else "another trainer publishes in this store"
        return {"where": self._store.url, "state": "not known", "error": error}

    def costs(self, workers: Sequence[int], version: int) -> tuple[float, float, int]:
        return 0.0, 0.0, 0 if self._layout is None else self._layout.nbytes
