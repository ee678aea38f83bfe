"""A folder of versions: one safetensors file each, and a manifest that names the newest.

    <url>/manifest.json                    replaced as a whole: what a reader looks at first
    <url>/v00000012-<writer>.safetensors   one version; never changed, deleted when it is no longer among the newest
    <url>/v00000012-<writer>.delta         if there is a ``Delta``: its difference to the version before

A version's file is complete before the manifest names it, and each file is seen when all of it is there (``files.py``).
Any process that can write to the store may have made the manifest. So every field is checked before it is used: the
names of a version's files follow from its number and its writer, and are in the store's folder.
"""

from __future__ import annotations

import logging
import re
import secrets
from contextlib import suppress
from typing import Annotated

import msgspec
from msgspec import Meta

from wsync.errors import WeightSyncError
from wsync.store.files import Folder
from wsync.update import LAST_VERSION

_log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
MANIFEST_BYTES = 64 << 20
"""The largest manifest that is read: it has the layout."""
_VERSION_FILE = re.compile(r"v(\d+)-\w+\.(safetensors|delta)")
_Version = Annotated[int, Meta(ge=0, lt=LAST_VERSION)]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The newest version of a store, and how it is read.

    Attributes:
        version: the newest.
        writer: a token of the trainer that wrote it, which identifies it in ``requires``, too.
        layout: names, shapes, dtypes, ties: ``Layout.encode``.
        checksum: the checksum of the packed weights, hexadecimal.
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
    def name(self) -> str:
        """The name of the version's files, without ``.safetensors`` or ``.delta``; no other version has it."""
        return f"v{self.version:08d}-{self.writer}"

    @property
    def file(self) -> str:
        """The name of the file with all weights."""
        return f"{self.name}.safetensors"

    @property
    def delta(self) -> str:
        """The name of the file with the difference to ``base``."""
        return f"{self.name}.delta"


def require_keep(keep: int) -> None:
    """Check how many versions are kept. Raises ValueError: none."""
    if keep < 1:
        raise ValueError(f"keep is at least 1, not {keep}")


class Versions:
    """One model's versions at a URL, of which the newest ``keep`` are kept.

    Attributes:
        folder: their files.
        url: as given, for messages: without user, password and query.
        writer: a token of this object, in the names of what it writes.

    Raises:
        NotConnected: it cannot be opened. ValueError: ``keep`` is below 1.
    """

    def __init__(self, url: str, keep: int = 3, durable: bool = True) -> None:
        require_keep(keep)
        self.folder = Folder(url, durable)
        self.url = self.folder.url
        self.writer = secrets.token_hex(4)
        self._keep = keep
        self._wrote = False

    def newest(self) -> Manifest | None:
        """Return the manifest, None if nothing has been published; WeightSyncError: it is damaged or unreadable."""
        try:
            content = self.folder.content(MANIFEST, MANIFEST_BYTES + 1)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._error("cannot be read", error) from error
        try:
            if len(content) > MANIFEST_BYTES:
                raise ValueError(f"it has more than {MANIFEST_BYTES} bytes")
            manifest = msgspec.json.decode(content, type=Manifest)
            if manifest.base >= manifest.version:
                raise ValueError(f"base is {manifest.base}, and version {manifest.version} - at `$.base`")
        except (ValueError, RecursionError) as error:
            raise self.damaged(error) from error
        return manifest

    def damaged(self, error: Exception) -> WeightSyncError:
        """Return the error for a manifest in which ``error`` was found."""
        return WeightSyncError(f"the manifest {MANIFEST} of the store {self.url} is damaged: {error}")

    def _error(self, what: str, error: Exception) -> WeightSyncError:
        return WeightSyncError(f"the store {self.url} {what}: {self.folder.explain(error)}")

    def has(self, manifest: Manifest) -> bool:
        """Return whether a version has not been deleted; WeightSyncError: the store cannot be read."""
        try:
            return manifest.file in self.folder.names()
        except Exception as error:
            raise self._error("cannot be read", error) from error

    # --- writing ---

    def open_for_writing(self) -> int:
        """Make the folder, delete old versions and what was left unfinished; return the newest version, 0 for none."""
        try:
            self.folder.make()
        except Exception as error:
            raise self._error("cannot be written", error) from error
        manifest = self.newest()
        if manifest is None:
            return 0
        self._delete_old(manifest.version)  # ``keep`` may be smaller than before, because the disk is full
        return manifest.version

    def write(self, manifest: Manifest, weights: bytes, difference: bytes | None = None) -> None:
        """Write the files of a version, which the manifest does not name yet, and perhaps a difference to its base.

        Raises:
            WeightSyncError: they cannot be written (the disk is full), or another trainer writes to this store.
        """
        self._require_newest(manifest.version)
        try:
            self.folder.write(manifest.file, weights)
            if difference is not None:
                self.folder.write(manifest.delta, difference)
            self.folder.flush()
        except Exception as error:
            self.discard(manifest)
            raise self._not_stored(manifest, error) from error

    def commit(self, manifest: Manifest) -> None:
        """Name a version that was written as the newest one; the oldest versions are deleted, or that is logged.

        Raises:
            WeightSyncError: see ``write``. Readers keep the version that they have.
        """
        self._require_newest(manifest.version)  # writing may have taken minutes
        try:
            self.folder.write(MANIFEST, msgspec.json.encode(manifest))
            self._wrote = True
            self.folder.flush()
        except Exception as error:
            raise self._not_stored(manifest, error) from error
        self._delete_old(manifest.version)

    def _not_stored(self, manifest: Manifest, error: Exception) -> WeightSyncError:
        text = self.folder.explain(error)
        return WeightSyncError(f"version {manifest.version} was not stored in {self.url}: {text}")

    def _require_newest(self, version: int) -> None:
        newest = self.newest()
        if newest is not None and (newest.version >= version or (self._wrote and newest.writer != self.writer)):
            raise WeightSyncError(
                f"another trainer has published version {newest.version} in the store {self.url}: give each its own url"
            )

    def discard(self, manifest: Manifest) -> None:
        """Delete the files of a version that was not committed."""
        self._delete([manifest.file, manifest.delta])

    def _delete_old(self, newest: int) -> None:
        """Delete the files of all but the newest versions up to ``newest``."""
        try:
            found = [
                (match[0], int(match[1])) for name in self.folder.names() if (match := _VERSION_FILE.fullmatch(name))
            ]
        except Exception as error:  # noqa: BLE001  readers see the new version already, so it has to count as stored
            _log.warning("old versions of the store %s cannot be deleted: %s", self.url, self.folder.explain(error))
            return
        kept = sorted({int(match[1]) for match in found if int(match[1]) <= newest})[-self._keep :]
        self._delete([match[0] for match in found if kept and int(match[1]) < kept[0]])

    def _delete(self, files: list[str]) -> None:
        for file in files:
            try:
                with suppress(FileNotFoundError):
                    self.folder.delete(file)
            except Exception as error:  # noqa: BLE001  a later version deletes it
                text = self.folder.explain(error)
                _log.warning("old versions of the store %s cannot be deleted: %s: %s", self.url, file, text)
                return
