"""A folder of versions: one safetensors file each, and a manifest that names the newest.

    <url>/manifest.json                    replaced as a whole: what a reader looks at first
    <url>/v00000012-<writer>.safetensors   one version; never changed, deleted when it is no longer among the newest
    <url>/v00000012-<writer>.delta         if there is a ``Delta``: its difference to the version before

A version's file is complete before the manifest names it. On a local file system both are written under another name,
flushed to the disk and renamed; other file systems (S3, memory) make an object visible when all of it is there.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from wsync.errors import NotConnected, WeightSyncError

_log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
_READ_ATTEMPTS = 5


@dataclass(frozen=True)
class Manifest:
    """What a store has to offer.

    Attributes:
        version: the newest.
        file: its name in the folder.
        writer: a token of the trainer that wrote it.
        layout: names, shapes, dtypes, ties, as JSON (``SenderSettings``).
        checksum: of the packed weights.
        nbytes: of the packed weights.
        base: the version to which there is a difference; 0 for none.
        delta: the name of the difference's file; empty for none.
    """

    version: int
    file: str
    writer: str
    layout: str
    checksum: int
    nbytes: int
    base: int = 0
    delta: str = ""


@dataclass(frozen=True)
class Difference:
    """What a version differs by from an older one.

    Attributes:
        base: the older version.
        content: see ``wsync.transforms.delta``.
    """

    base: int
    content: bytes


class VersionStore:
    """One model's versions at a URL.

    Args:
        url: of a folder, as ``fsspec`` reads it: a path, ``s3://bucket/run/policy``, ``memory://policy``.
        keep: how many versions are kept.
        durable: whether a version is flushed to the disk before the manifest names it (local file systems).
    """

    def __init__(self, url: str, keep: int = 3, durable: bool = True) -> None:
        self.url = url
        self._keep = keep
        self._durable = durable
        self._fs: Any
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise NotConnected(f"the store {url} cannot be opened: {error}") from error
        self.writer = secrets.token_hex(4)
        self._wrote = False

    @property
    def folder(self) -> Path | None:
        """The folder, if it is on a local file system."""
        return Path(self._root) if isinstance(self._fs, LocalFileSystem) else None

    def newest(self) -> Manifest | None:
        """Return the manifest; None if nothing has been published.

        Raises:
            WeightSyncError: the store cannot be read, or its manifest is damaged.
        """
        try:
            self._fs.invalidate_cache(self._root)
            content = self._fs.cat_file(f"{self._root}/{MANIFEST}")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise WeightSyncError(f"the store {self.url} cannot be read: {error}") from error
        try:
            return Manifest(**json.loads(content))
        except (ValueError, TypeError) as error:
            raise WeightSyncError(f"the manifest of the store {self.url} is damaged: {error}") from error

    def read(self) -> tuple[Manifest, Mapping[str, Tensor]] | None:
        """Return the newest version; None if there is none.

        Raises:
            WeightSyncError: the store cannot be read, or the file is damaged.
        """
        for _ in range(_READ_ATTEMPTS):
            manifest = self.newest()
            if manifest is None:
                return None
            try:
                return manifest, self._load(manifest.file)
            except FileNotFoundError:  # newer versions have been published since the manifest was read
                continue
            except (SafetensorError, OSError) as error:
                raise WeightSyncError(
                    f"version {manifest.version} of the store {self.url} cannot be read: {manifest.file}: {error}"
                ) from error
        raise WeightSyncError(f"the store {self.url} deletes versions faster than they can be read: raise keep")

    def _load(self, file: str) -> Mapping[str, Tensor]:
        path = f"{self._root}/{file}"
        return load(self._fs.cat_file(path)) if self.folder is None else load_file(path)

    def open_for_writing(self) -> int:
        """Make the folder, delete what a killed trainer left unfinished; return the newest version, 0 for none.

        Raises:
            WeightSyncError: the store cannot be written, or its manifest is damaged.
        """
        try:
            self._fs.makedirs(self._root, exist_ok=True)
            for path in self._fs.glob(f"{self._root}/*.unfinished"):
                self._fs.rm_file(path)
        except OSError as error:
            raise WeightSyncError(f"the store {self.url} cannot be written: {error}") from error
        manifest = self.newest()
        return manifest.version if manifest else 0

    def read_difference(self, manifest: Manifest) -> bytes | None:
        """Return the difference that a manifest names; None if it cannot be read, or there is none."""
        if not manifest.delta:
            return None
        try:
            return self._fs.cat_file(f"{self._root}/{manifest.delta}")
        except OSError as error:  # newer versions have been published, or: the caller reads the full version
            _log.debug("the difference %s of the store %s cannot be read: %s", manifest.delta, self.url, error)
            return None

    def publish(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        layout: str,
        checksum: int,
        nbytes: int,
        difference: Difference | None = None,
    ) -> None:
        """Write a version, then name it in the manifest; the oldest versions are deleted.

        Args:
            version: newer than the newest.
            tensors: contiguous, by name; no two in the same memory.
            layout: see ``Manifest``.
            checksum: see ``Manifest``.
            nbytes: see ``Manifest``.
            difference: to an older version, for readers that have that one.

        Raises:
            WeightSyncError: it cannot be written (the disk is full), or another trainer writes to this store. Readers
                keep the version that they have.
        """
        newest = self.newest()
        if newest is not None and (newest.version >= version or (self._wrote and newest.writer != self.writer)):
            raise WeightSyncError(
                f"another trainer has published version {newest.version} in the store {self.url}: give each its own url"
            )
        name = f"v{version:08d}-{self.writer}"
        manifest = Manifest(version, f"{name}.safetensors", self.writer, layout, checksum, nbytes)
        if difference is not None:
            manifest = replace(manifest, base=difference.base, delta=f"{name}.delta")
        try:
            self._write_version(manifest.file, tensors)
            if difference is not None:
                self._write(manifest.delta, difference.content)
            self._write(MANIFEST, json.dumps(asdict(manifest)).encode())
            self._wrote = True
            self._delete_old()
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"version {version} was not stored in {self.url}: {error}") from error

    def _write_version(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        if self.folder is None:
            self._fs.pipe_file(f"{self._root}/{file}", save(dict(tensors)))
            return
        self._finish(file, lambda path: save_file(dict(tensors), path))

    def _write(self, file: str, content: bytes) -> None:
        if self.folder is None:
            self._fs.pipe_file(f"{self._root}/{file}", content)
            return
        self._finish(file, lambda path: path.write_bytes(content))

    def _finish(self, file: str, write: Any) -> None:
        """Write a local file under another name, flush it, and rename it."""
        folder = Path(self._root)
        unfinished = folder / f"{file}.{self.writer}.unfinished"
        try:
            write(unfinished)
            if self._durable:
                _flush(unfinished)
            unfinished.replace(folder / file)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise
        if self._durable:
            _flush(folder)

    def _delete_old(self) -> None:
        for kind in ("safetensors", "delta"):
            for path in sorted(self._fs.glob(f"{self._root}/v*.{kind}"))[: -self._keep]:
                with suppress(FileNotFoundError):
                    self._fs.rm_file(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
