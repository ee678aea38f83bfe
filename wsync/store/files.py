"""A folder of versions, as a trainer writes it: one safetensors file each, and a manifest that names the newest.

    <url>/manifest.json                    replaced as a whole: what a reader looks at first
    <url>/v00000012-<writer>.safetensors   one version; never changed, deleted when it is no longer among the newest
    <url>/v00000012-<writer>.delta         if there is a ``Delta``: its difference to the version before

A version's file is complete before the manifest names it, and each file is seen when all of it is there. On a local
file system it is written under another name, flushed to the disk and renamed. Object stores (S3, memory) show an object
when all of it is there.

Any process that can write to the store may have made the manifest. So every field is checked before it is used: the
names of a version's files follow from its number and its writer, and are in the store's folder.
"""

from __future__ import annotations

import io
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import fsspec
import msgspec
import torch
from fsspec.implementations.local import LocalFileSystem
from msgspec import Meta
from torch import Tensor

from wsync.control.session import checksum_of
from wsync.errors import LayoutMismatch, NotConnected, WeightSyncError, missing_extra
from wsync.transforms import Delta
from wsync.update import LAST_VERSION, Outlet, Update
from wsync.weights.layout import Buffer, BufferPool, Layout
from wsync.weights.targets import require_no_extra
from wsync.weights.tensors import raw_bytes

_log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
SAME_WEIGHTS = "all readers of a store get the same weights"
_MANIFEST_BYTES = 64 << 20  # the largest manifest that is read: it has the layout
_VERSION_FILE = re.compile(r"v(\d+)-\w+\.(safetensors|delta)")
_UNFINISHED = ".unfinished"
_Version = Annotated[int, Meta(ge=0, lt=LAST_VERSION)]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest version of a store, and how it is read.

    Attributes:
        writer: a token of the trainer that wrote it, which identifies it in ``requires``, too.
        layout: ``Layout.encode``.
        checksum: of the packed weights and the layout, hexadecimal.
        base: the older version that the .delta file is relative to; 0: there is no such file.
        requires: as in ``Update``.
    """

    version: Annotated[int, Meta(ge=1, lt=LAST_VERSION)]
    writer: Annotated[str, Meta(pattern="^[0-9A-Za-z]{1,64}$")]
    layout: bytes
    checksum: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    base: _Version = 0
    requires: dict[str, _Version] = {}

    @property
    def file(self) -> str:
        return f"v{self.version:08d}-{self.writer}.safetensors"

    @property
    def delta(self) -> str:
        return f"v{self.version:08d}-{self.writer}.delta"


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

    Attributes:
        url: as given, for messages: without user, password and query.
        local: its path, if it is on a local file system.
    """

    def __init__(self, url: str) -> None:
        self.url = re.sub(r"(?<=://)[^/]*@|\?.*", "", url) if "://" in url else url
        self._given_url = url
        try:
            opened, self._root = fsspec.core.url_to_fs(url)
        except Exception as error:  # besides OSError: whatever the library of the file system raises
            raise NotConnected(f"the store {self.url} cannot be opened: {self.explain(error)}") from error
        self.local = Path(self._root) if isinstance(opened, LocalFileSystem) else None

    @property
    def _fs(self) -> Any:
        """This thread's file system: ``fsspec`` keeps one for each."""
        return fsspec.core.url_to_fs(self._given_url)[0]

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
                content = self.content(MANIFEST, _MANIFEST_BYTES + 1)
            except FileNotFoundError:
                return None
        with self.explaining(f"the manifest {MANIFEST} of the store {self.url} is damaged"):
            if len(content) > _MANIFEST_BYTES:
                raise ValueError(f"it has more than {_MANIFEST_BYTES} bytes")
            manifest = msgspec.json.decode(content, type=Manifest)
            if manifest.base >= manifest.version:
                raise ValueError(f"base is {manifest.base}, and version {manifest.version} - at `$.base`")
            return manifest

    def make(self) -> None:
        """Make the folder, and delete what a killed trainer left unfinished."""
        self._fs.makedirs(self._root, exist_ok=True)
        for name in self.names():
            if name.endswith(_UNFINISHED):
                self.delete(name)

    def names(self) -> list[str]:
        self._fs.invalidate_cache(self._root)
        try:
            return [path.rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:  # where folders are prefixes of names (S3), an empty one does not exist
            return []

    def delete(self, file: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{file}")

    def content(self, file: str, limit: int) -> bytes:
        self._fs.invalidate_cache(self._root)
        return self._fs.cat_file(f"{self._root}/{file}", start=0, end=limit)

    def open(self, file: str) -> io.BufferedIOBase:
        """Open a file for reading; one that is not local is read at once."""
        if self.local is None:
            return io.BytesIO(self._fs.cat_file(f"{self._root}/{file}"))
        return open(self.local / file, "rb")

    def write(self, file: str, content: bytes) -> None:
        """Write a file, or replace it; on a local file system it is on the disk then."""
        if self.local is None:
            return self._fs.pipe_file(f"{self._root}/{file}", content)
        unfinished = self.local / f"{file}.{secrets.token_hex(8)}{_UNFINISHED}"
        try:
            with open(unfinished, "xb") as opened:
                opened.write(content)
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


def dump(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors as the content of a safetensors file."""
    try:
        from safetensors import TensorSpec, serialize
    except ModuleNotFoundError as error:
        raise missing_extra(error, "store") from error
    memory = {name: raw_bytes(tensor.cpu()) for name, tensor in tensors.items()}  # exists as long as it is read
    specs: dict[str, Any] = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            data_ptr=memory[name].data_ptr() if tensor.numel() else 0,
            data_len=len(memory[name]),
        )
        for name, tensor in tensors.items()
    }
    return serialize(specs)


class Files(Outlet):
    """An ``Outlet`` without connections: each update becomes a version, of which the newest ``keep`` are kept.

    A version that is published is stored: nothing has to be waited for, and nothing can fail later. ``num_workers`` is
    only for reports. With ``delta``, a difference to the version before is stored, too.
    """

    transactional = True

    def __init__(self, store: Store, num_workers: int = 1, *, keep: int = 3, delta: Delta | None = None) -> None:
        self.name = secrets.token_hex(4)  # in the names of the files
        self.workers = range(num_workers)
        self._store, self._keep, self._delta = store, keep, delta
        self._pool = BufferPool()
        self._layout: Layout | None = None
        self._base: Update | None = None  # the newest version, for the next difference
        self._carried = 0
        self._prepared: Manifest | None = None
        self._wrote = False

    def begin(self) -> int:
        """Make the folder, and delete old versions; return the newest version in it, 0 for none."""
        with self._store.explaining(f"the store {self._store.url} cannot be written"):
            self._store.make()
        manifest = self._store.newest()
        newest = 0 if manifest is None else manifest.version
        self._delete_old(newest)  # ``keep`` may be smaller than before, because the disk is full
        return newest

    def set_layout(self, layout: Layout) -> None:
        if layout.extra:
            raise LayoutMismatch(f"extra state cannot be stored: {', '.join(sorted(layout.extra))}")
        for name, dtype in zip(layout.names, layout.dtypes, strict=True):
            try:
                dump({name: torch.empty(0, dtype=dtype)})
            except ImportError:
                raise
            except Exception as error:  # the library's
                raise LayoutMismatch(f"'{name}' is {dtype}, which a safetensors file cannot have: {error}") from error
        self._layout = layout

    def reserve(self, deadline: float | None) -> Buffer:
        assert self._layout is not None, "set_layout() comes first"
        return self._pool.reserve(self._layout)

    def publish(self, update: Update, workers: Sequence[int]) -> None:
        self.prepare(update, workers)
        self.commit(update, workers)

    def prepare(self, update: Update, workers: Sequence[int]) -> None:
        """Write the files of a version, which readers do not see yet; LayoutMismatch, WeightSyncError: that failed."""
        if not {*self.workers} <= {*workers}:
            raise ValueError(f"{SAME_WEIGHTS}: send to all workers, without worker_ids")
        require_no_extra(update.extra, "stored")
        buffer, base, difference = update.buffer, self._base, None
        if self._delta is not None and base is not None and base.buffer.layout == buffer.layout:
            difference = self._delta.difference(base.buffer.memory, buffer.memory, buffer.layout.width)
        layout, based = buffer.layout.encode(), 0 if base is None or difference is None else base.version
        checksum = f"{checksum_of(buffer.memory, layout):016x}"
        manifest = Manifest(update.version, self.name, layout, checksum, based, dict(update.requires))
        content = dump({buffer.layout.names[index]: update.views[index] for index in buffer.layout.leaders})
        self._require_newest(manifest.version)
        with self._storing(manifest):
            self._store.write(manifest.file, content)
            if difference is not None:
                self._store.write(manifest.delta, difference)
        self._prepared = manifest
        self._carried = buffer.layout.nbytes if difference is None else len(difference)

    def commit(self, update: Update, workers: Sequence[int]) -> None:
        manifest, self._prepared = self._prepared, None
        assert manifest is not None and manifest.version == update.version, "prepare() comes first"
        self._require_newest(manifest.version)  # writing may have taken minutes
        with self._storing(manifest):
            self._store.write(MANIFEST, msgspec.json.encode(manifest))
        self._wrote = True
        self._delete_old(manifest.version)
        if self._delta is not None:
            self._base = update

    def abort(self, version: int, workers: Sequence[int]) -> None:
        """Forget the version that was prepared; its files are deleted when they are old."""
        self._prepared = None

    def _storing(self, manifest: Manifest) -> Any:
        return self._store.explaining(f"version {manifest.version} was not stored in {self._store.url}")

    def _require_newest(self, version: int) -> None:
        newest, url = self._store.newest(), self._store.url
        if newest is not None and (newest.version >= version or (self._wrote and newest.writer != self.name)):
            raise WeightSyncError(
                f"another trainer has published version {newest.version} in the store {url}: give each its own url"
            )

    def _delete_old(self, newest: int) -> None:
        """Delete the files of versions that are ``keep`` or more behind the newest."""
        try:
            for name in self._store.names():
                match = _VERSION_FILE.fullmatch(name)
                if match is not None and int(match[1]) <= newest - self._keep:
                    self._store.delete(name)
        except Exception as error:  # noqa: BLE001  readers see the new version already, so it has to count as stored
            text = self._store.explain(error)
            _log.warning("old versions of the store %s cannot be deleted: %s", self._store.url, text)

    def costs(self, workers: Sequence[int], version: int) -> tuple[float, float, int]:
        return 0.0, 0.0, self._carried

    def close(self, *, graceful: bool) -> None:
        self._base = self._prepared = None
