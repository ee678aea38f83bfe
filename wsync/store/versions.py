"""A folder of versions: one safetensors file each, and a manifest that names the newest.

    <url>/manifest.json                    replaced as a whole: what a reader looks at first
    <url>/v00000012-<writer>.safetensors   one version; never changed, deleted when it is no longer among the newest
    <url>/v00000012-<writer>.delta         if there is a ``Delta``: its difference to the version before

A version's file is complete before the manifest names it, and each file is seen when all of it is there (``files.py``).
"""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from wsync.errors import WeightSyncError
from wsync.store.files import File, StoreFiles
from wsync.store.manifest import MANIFEST_BYTES, Manifest
from wsync.transforms.delta import base_of

_log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
_VERSION_FILE = re.compile(r"v(\d+)-\w+\.(safetensors|delta)")
_READ_ATTEMPTS = 5


def require_keep(keep: int) -> None:
    """Check how many versions are kept. Raises ValueError: none."""
    if keep < 1:
        raise ValueError(f"keep is at least 1, not {keep}")


class VersionStore:
    """One model's versions at a URL.

    Args:
        url: the URL of a folder, as ``fsspec`` reads it: a path, ``s3://bucket/run/policy``, ``memory://policy``.
        keep: how many versions are kept.
        durable: whether a version is flushed to the disk before the manifest names it (local file systems).

    Attributes:
        url: as given, for messages: without user, password and query.

    Raises:
        NotConnected: it cannot be opened. ValueError: ``keep`` is below 1.
    """

    def __init__(self, url: str, keep: int = 3, durable: bool = True) -> None:
        require_keep(keep)
        self._files = StoreFiles(url, durable)
        self._keep = keep
        self.url, self.writer = self._files.url, self._files.writer
        self._wrote = False
        self._undeletable: set[str] = set()  # files that a warning has named

    @property
    def folder(self) -> Path | None:
        """The folder, if it is on a local file system."""
        return self._files.folder

    def newest(self) -> Manifest | None:
        """Return the manifest; None if nothing has been published.

        Raises:
            WeightSyncError: the store cannot be read, or its manifest is damaged.
        """
        try:
            content = self._files.content(MANIFEST, MANIFEST_BYTES + 1)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise WeightSyncError(f"the store {self.url} cannot be read: {self._files.after_error(error)}") from error
        try:
            return Manifest.load(content)
        except ValueError as error:
            raise self.damaged_manifest(error) from error

    def damaged_manifest(self, error: ValueError) -> WeightSyncError:
        """Return the error for a manifest in which ``error`` was found."""
        return WeightSyncError(f"the manifest {MANIFEST} of the store {self.url} is damaged: {error}")

    def read(self, newest: Manifest | None, take: Callable[[Manifest, File], None]) -> None:
        """Have ``take`` read the newest version, if there is one.

        Args:
            newest: the manifest, as it was read last.
            take: called with the manifest and the version's file; again if the file was deleted meanwhile, because
                newer versions have been published. Raises ValueError or OSError if the file is damaged.

        Raises:
            WeightSyncError: the store cannot be read, or the file is damaged or missing; names it.
        """
        missing, manifest = "", newest
        for _ in range(_READ_ATTEMPTS):
            if manifest is None:
                return
            named = f"version {manifest.version} of the store {self.url} cannot be read: {manifest.file}"
            if manifest.file == missing:
                raise WeightSyncError(f"{named}: the file is missing, and the manifest {MANIFEST} names it")
            try:
                with self._files.open(manifest.file) as file:
                    take(manifest, file)
                return
            except WeightSyncError:
                raise
            except Exception as error:
                # NFS: ESTALE, if the file is deleted while it is being read
                if not isinstance(error, FileNotFoundError) and getattr(error, "errno", None) != errno.ESTALE:
                    raise WeightSyncError(f"{named}: {self._files.after_error(error)}") from error
                missing, manifest = manifest.file, self.newest()
        raise WeightSyncError(f"the store {self.url} deletes versions faster than they can be read: raise keep")

    def has(self, manifest: Manifest) -> bool:
        """Return whether a version has not been deleted.

        Raises:
            WeightSyncError: the store cannot be read.
        """
        try:
            return manifest.file in self._files.names()
        except Exception as error:
            raise WeightSyncError(f"the store {self.url} cannot be read: {self._files.after_error(error)}") from error

    def open_for_writing(self) -> int:
        """Make the folder, delete old versions and what was left unfinished; return the newest version, 0 for none.

        Raises:
            WeightSyncError: the store cannot be written, or its manifest is damaged.
        """
        try:
            self._files.make_folder()
        except Exception as error:
            raise WeightSyncError(
                f"the store {self.url} cannot be written: {self._files.after_error(error)}"
            ) from error
        manifest = self.newest()
        if manifest is None:
            return 0
        self._delete_old(manifest.version)  # ``keep`` may be smaller than before, because the disk is full
        return manifest.version

    def read_difference(self, manifest: Manifest, limit: int) -> bytes | None:
        """Return the difference of a version to its base, cut off after ``limit`` bytes; None if it cannot be read."""
        try:
            return self._files.content(manifest.delta, limit)
        except Exception as error:  # noqa: BLE001  as in ``newest``; the caller reads the full version instead
            text = self._files.after_error(error)
            _log.debug("the difference %s of the store %s cannot be read: %s", manifest.delta, self.url, text)
            return None

    def publish(
        self,
        version: int,
        pieces: Sequence[bytes | memoryview],
        layout: str,
        checksum: int,
        difference: bytes | None = None,
    ) -> None:
        """Write a version, then name it in the manifest; the oldest versions are deleted.

        Args:
            version: newer than the newest.
            pieces: its safetensors file.
            layout: see ``Manifest``.
            checksum: see ``Manifest``.
            difference: to an older version, for readers that have that one: see ``wsync.transforms.delta``.

        Raises:
            WeightSyncError: it cannot be written (the disk is full), or another trainer writes to this store. Readers
                keep the version that they have. An old version that cannot be deleted is only logged.
        """
        self._require_newest(version)
        manifest = Manifest(version, self.writer, layout, checksum, base_of(difference) if difference else 0)
        try:
            self._files.write(manifest.file, *pieces)
            if difference is not None:
                self._files.write(manifest.delta, difference)
            self._files.flush()
            self._require_newest(version)  # writing may have taken minutes
            self._write_manifest(manifest.dump())
        except BaseException as error:  # also Ctrl-C: files without a manifest would count among the newest
            refused = isinstance(error, WeightSyncError)
            if refused or self.folder is not None:  # elsewhere a manifest may yet appear, in spite of an error
                self._delete_unnamed(manifest)
            if refused or not isinstance(error, Exception):
                raise
            raise WeightSyncError(
                f"version {version} was not stored in {self.url}: {self._files.after_error(error)}"
            ) from error
        self._wrote = True
        self._delete_old(version)

    def _require_newest(self, version: int) -> None:
        """Check that a version of this trainer would be the newest.

        Raises:
            WeightSyncError: it would not, or another trainer writes to this store; or see ``newest``.
        """
        newest = self.newest()
        if newest is not None and newest.writer == self.writer and newest.version >= version:
            raise WeightSyncError(f"the store {self.url} has version {newest.version} of this trainer already")
        if newest is not None and newest.writer != self.writer and (self._wrote or newest.version >= version):
            raise WeightSyncError(
                f"another trainer has published version {newest.version} in the store {self.url}: give each its own url"
            )

    def _delete_unnamed(self, manifest: Manifest) -> None:
        """Delete the files of a version, unless the manifest names it in spite of an error."""
        try:
            newest = self.newest()
            if newest is None or newest.name != manifest.name:
                for file in {manifest.file, manifest.delta} & {*self._files.names()}:
                    self._files.delete(file)
        except Exception as error:  # noqa: BLE001  the caller raises why it was not stored; a later version deletes it
            text = self._files.after_error(error)
            _log.debug("version %d of the store %s cannot be deleted: %s", manifest.version, self.url, text)

    def _write_manifest(self, content: bytes) -> None:
        self._files.write(MANIFEST, content)
        try:
            self._files.flush()
        except OSError as error:  # readers see the version already, so it has to count as stored
            _log.warning("the newest version of the store %s may be lost if this machine fails: %s", self.url, error)

    def _delete_old(self, newest: int) -> None:
        """Delete the files of all but the newest versions up to ``newest``; log what cannot be deleted."""
        try:
            found = [(name, _VERSION_FILE.fullmatch(name)) for name in self._files.names()]
        except Exception as error:  # noqa: BLE001  readers see the new version already, so it has to count as stored
            _log.warning("old versions of the store %s cannot be deleted: %s", self.url, self._files.after_error(error))
            return
        kept = sorted({int(match[1]) for _, match in found if match and int(match[1]) <= newest})[-self._keep :]
        for file, match in found if kept else ():  # a listing may be older than the newest file
            if match is None or int(match[1]) >= kept[0]:
                continue
            try:
                self._files.delete(file)
            except FileNotFoundError:
                continue
            except Exception as error:  # noqa: BLE001  likewise
                if file not in self._undeletable:
                    text = self._files.after_error(error)
                    _log.warning("an old version of the store %s cannot be deleted: %s", self.url, text)
                self._undeletable.add(file)
