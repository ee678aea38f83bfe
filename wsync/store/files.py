"""A folder of versions, as a trainer writes it: safetensors files, and a manifest that names the newest.

    <url>/manifest.json                    replaced as a whole: what a reader looks at first
    <url>/v00000012-<writer>.safetensors   one version; never changed, deleted when no reader can need it
    <url>/v00000012-<writer>/              the same as a Hugging Face folder: safetensors files, config.json
    <url>/v00000012-<writer>.difference    8 bytes: checksum of the version before; then the exact difference to it

With differences, only every n-th version is whole, an *anchor*, and every version is a difference, too: a reader that
follows needs no anchor, and any other one begins at the last. The manifest names two anchors and all versions since.

All of a version is complete before the manifest names it, and is seen when all of it is there. On a local file system
it is written under another name, flushed to the disk and renamed. Object stores (S3, memory) show an object when all of
it is there: there, a folder is complete when the manifest names it.

Any process that can write to the store may have made the manifest. So every field is checked before it is used: the
name of a version's file follows from its number and its writer, and is in the store's folder.
"""

from __future__ import annotations

import io
import logging
import os
import re
import secrets
import shutil
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import fsspec
import msgspec
from fsspec.implementations.local import LocalFileSystem
from msgspec import Meta

from wsync.control.session import checksum_of
from wsync.errors import NotConnected, WeightSyncError
from wsync.store.safetensors_file import content_of, header_of, others_of
from wsync.transforms import Delta
from wsync.update import LAST_VERSION, Outlet, Update
from wsync.weights.layout import Buffer, BufferPool, Layout
from wsync.weights.targets import require_no_extra

_log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
SAME_WEIGHTS = "all readers of a store get the same weights"
MAX_HEADER = 64 << 20  # bytes of the largest manifest, which has the layout, and of what precedes the tensors in a file
_PIECE = 1 << 20  # bytes
MOST_DIFFERENCES = 1000  # between two anchors
_OF_VERSION = re.compile(r"v(\d{8,})-[0-9a-f]{8}(\.safetensors|\.difference)?")
UNFINISHED = ".unfinished"
_Size = Annotated[int, Meta(ge=0, lt=1 << 60)]  # in bytes


class Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A version, and what a store has of it."""

    version: Annotated[int, Meta(ge=1, lt=LAST_VERSION)]
    checksum: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]  # of the packed weights and the layout
    whole: _Size  # 0: it is no anchor
    difference: _Size  # 0: there is none


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest version of a store, which is the last of ``versions``, and how it is read."""

    writer: Annotated[str, Meta(pattern="^[0-9A-Za-z]{1,64}$")]  # the trainer, which it identifies in ``requires``, too
    layout: bytes  # ``Layout.encode``
    versions: Annotated[tuple[Stored, ...], Meta(min_length=1, max_length=2 * MOST_DIFFERENCES)]
    requires: dict[str, Annotated[int, Meta(ge=0, lt=LAST_VERSION)]] = {}
    differences: bool = False  # whether later versions may be differences to this one
    shard_bytes: _Size = 0  # see ``files_of``

    @property
    def version(self) -> int:
        return self.versions[-1].version

    def name(self, version: int, *, whole: bool) -> str:
        """Return the name of a version's file or folder."""
        kind = ".difference" if not whole else "" if self.shard_bytes else ".safetensors"
        return f"v{version:08d}-{self.writer}{kind}"

    def way(self, own: tuple[int, str]) -> list[tuple[Stored, bool]]:
        """Return what is read for the newest version, one after the other, and whether it is read whole.

        ``own``: version and checksum of what the reader has. The way has the fewest bytes. ValueError: there is none.
        """
        ways, nbytes, steps = list[tuple[int, list[tuple[Stored, bool]]]](), 0, list[tuple[Stored, bool]]()
        for one in reversed(self.versions):
            if (one.version, one.checksum) == own:
                ways.append((nbytes, steps))
            if one.whole:
                ways.append((nbytes + one.whole, [(one, True), *steps]))
            if not one.difference:
                break
            nbytes, steps = nbytes + one.difference, [(one, False), *steps]
        if not ways:
            raise ValueError("no whole version is before its differences")
        return min(ways, key=itemgetter(0))[1]


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
        content, path = io.BytesIO(), f"{self._root}/{file}"
        if self.local is not None:
            with open(path, "rb") as stream:
                content.write(stream.read(limit + 1))
        elif "http" not in (fs := self._fs).protocol:
            content.write(fs.cat_file(path, start=0, end=limit + 1))
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
            old = list[str]()
            paths = self._fs.ls(self._root, detail=False) if self.local is None else os.listdir(self.local)
            for path in paths:
                name = path.rstrip("/").rsplit("/", 1)[-1]
                match = _OF_VERSION.fullmatch(name)
                if name.endswith(UNFINISHED) or (match is not None and int(match[1]) < oldest):
                    old.append(f"{self._root}/{name}")
            if old:
                self._fs.rm(old, recursive=True)
        except Exception as error:  # noqa: BLE001  readers see the newest version already, so it has to count as stored
            _log.warning("old versions of the store %s cannot be deleted: %s", self.url, self.explain(error))

    def open(self, file: str, limit: int) -> io.BufferedIOBase:
        """Open a file for reading; one that is not local is read at once, and has at most ``limit`` bytes."""
        return self._read(file, limit) if self.local is None else open(self.local / file, "rb")

    def write(self, name: str, files: Mapping[str, Sequence[bytes | memoryview]]) -> None:
        """Write a folder of files, or a file (called ``""``), or replace a file; if local, it is on the disk then."""
        if self.local is None:
            for file, pieces in files.items():
                self._fs.pipe_file(f"{self._root}/{name}/{file}".rstrip("/"), b"".join(pieces))
            return
        (self.local / name).parent.mkdir(exist_ok=True)
        unfinished = self.local / f"{name}.{secrets.token_hex(8)}{UNFINISHED}"
        try:
            for file, pieces in files.items():
                path = unfinished / file
                path.parent.mkdir(exist_ok=True)
                with open(path, "xb") as opened:
                    opened.writelines(pieces)
                    opened.flush()
                    os.fsync(opened.fileno())
            if unfinished.is_dir():
                _flush_names(unfinished)
            unfinished.replace(self.local / name)
        finally:
            shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink(missing_ok=True)
        _flush_names((self.local / name).parent)


def _flush_names(folder: Path) -> None:
    """Have the names of a folder's files written to the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


class Files(Outlet):
    """An ``Outlet`` without connections: each update becomes a version, of which the newest ``keep`` can be read.

    ``anchor_every``, ``shard_bytes`` and ``model_folder``: as in ``StoreWeightSyncScheme``.

    A version that is published is stored: nothing has to be waited for, and nothing can fail later. A version that was
    prepared and is not committed is deleted when it is old. ``num_workers`` is only for reports.
    """

    transactional = True

    def __init__(
        self,
        store: Store,
        num_workers: int = 1,
        *,
        keep: int = 3,
        anchor_every: int = 1,
        shard_bytes: int = 0,
        model_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.name = secrets.token_hex(4)  # in the names of the files
        self.workers = range(num_workers)
        self.store, self._keep = store, keep
        self._delta, self._anchor_every = Delta() if anchor_every > 1 else None, anchor_every
        self.shard_bytes = shard_bytes
        self.others = {path.name: [path.read_bytes()] for path in others_of(model_folder if shard_bytes else None)}
        self._pool = BufferPool()
        self._layout: Layout | None = None
        self._prepared: Manifest | None = None
        self._versions: tuple[Stored, ...] = ()  # of the last manifest
        self._base: Buffer | None = None  # the last of them, if the next one may be a difference to it
        self._needed = deque[int](maxlen=keep)  # the oldest version in each of the last manifests

    def begin(self) -> int:
        """Make the folder; return the newest version in it, 0 for none."""
        self.store.make()
        manifest = self.store.newest()
        return 0 if manifest is None else manifest.version

    def set_layout(self, layout: Layout) -> None:
        header_of(layout, layout.leaders)  # it is refused here if it cannot be stored
        self._layout = layout

    def reserve(self, deadline: float | None) -> Buffer:
        assert self._layout is not None, "set_layout() comes first"
        return self._pool.reserve(self._layout)

    def publish(self, update: Update, workers: Sequence[int]) -> None:
        self.prepare(update, workers)
        self.commit(update, workers)

    def prepare(self, update: Update, workers: Sequence[int]) -> None:
        """Write a version, which readers do not see yet; LayoutMismatch, WeightSyncError: that failed."""
        if not {*self.workers} <= {*workers}:
            raise ValueError(f"{SAME_WEIGHTS}: send to all workers, without worker_ids")
        require_no_extra(update.extra, "stored")
        buffer, base, difference, files = update.buffer, self._base, None, dict[str, Any]()
        encoded = buffer.layout.encode()
        checksum = f"{checksum_of(buffer.memory, encoded):016x}"
        if self._delta is not None and base is not None and base.layout == buffer.layout:
            difference = self._delta.difference(base.memory, buffer.memory, buffer.layout.width)
        before = self._versions if difference else ()
        anchor = not any(one.whole for one in before[1 - self._anchor_every :])
        size = buffer.layout.nbytes if anchor else 0
        versions = (*before, Stored(update.version, checksum, size, len(difference or b"")))
        first = [at for at, one in enumerate(versions) if one.whole][-2:][0]  # of the last two anchors
        form = self._delta is not None, self.shard_bytes
        manifest = Manifest(self.name, encoded, versions[first:], dict(update.requires), *form)
        if difference:
            digest = bytes.fromhex(self._versions[-1].checksum)
            files[manifest.name(update.version, whole=False)] = {"": [digest, difference]}
        if anchor:
            content = content_of(buffer, self.shard_bytes)
            files[manifest.name(update.version, whole=True)] = {**content, **self.others}
        self._write(update.version, files)
        self._prepared = manifest

    def commit(self, update: Update, workers: Sequence[int]) -> None:
        manifest, self._prepared = self._prepared, None
        assert manifest is not None and manifest.version == update.version, "prepare() comes first"
        self.name_newest(manifest, None if self._delta is None else update.buffer)

    def name_newest(self, manifest: Manifest, base: Buffer | None = None) -> None:
        """Have readers see a version, which is stored. ``base``: the next one may be a difference to it."""
        self._write(manifest.version, {MANIFEST: {"": [msgspec.json.encode(manifest)]}})
        self._versions, self._base = manifest.versions, base
        self._needed.append(manifest.versions[0].version)
        self.store.delete_before(min(self._needed[0], manifest.version - self._keep + 1))

    def _write(self, version: int, files: Mapping[str, Any]) -> None:
        """Write what is of a version; WeightSyncError: another trainer writes to the store, or it cannot be written."""
        newest, url = self.store.newest(), self.store.url
        if newest is not None and (newest.version >= version or (self._versions and newest.writer != self.name)):
            raise WeightSyncError(
                f"another trainer has published version {newest.version} in the store {url}: give each its own url"
            )
        with self.store.explaining(f"version {version} was not stored in {url}"):
            for name, content in files.items():
                self.store.write(name, content)

    def seen(self, worker: int, version: int) -> dict[str, Any]:
        newest = self.store.newest() if self._versions else None
        error = "" if newest is None or newest.writer == self.name else "another trainer publishes in this store"
        return {"where": self.store.url, "state": "not known", "error": error}

    def costs(self, workers: Sequence[int], version: int) -> tuple[float, float, int]:
        newest = self._versions[-1] if self._versions else None
        return 0.0, 0.0, 0 if newest is None else newest.difference or newest.whole
