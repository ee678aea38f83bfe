"""The files in a store's folder, on any file system that ``fsspec`` has: each is seen when all of it is there.

On a local file system a file is written under another name, flushed to the disk and renamed. Object stores (S3, memory)
show an object when all of it is there. File systems that write in place and cannot be renamed on are refused.
"""

from __future__ import annotations

import io
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem

from wsync.errors import NotConnected

_UNFINISHED = ".unfinished"
_IN_PLACE = {"ftp", "hdfs", "sftp", "smb", "webhdfs"}
"""File systems on which a file is seen while it is being written, and which ``fsspec`` cannot rename as a whole."""


def absolute_url(url: str | os.PathLike[str]) -> str:
    """Return a URL as it is, and a path from the root: workers may have other working directories.

    Raises:
        ValueError: it is empty.
    """
    url = os.fspath(url)
    if not url:
        raise ValueError("url is the URL or the path of a folder ('s3://bucket/run', '/shared/run'), not ''")
    path = re.sub(r"^(file|local)://", "", url)
    return path if "://" in path or "::" in path else os.path.abspath(os.path.expanduser(path))


class Folder:
    """The folder at a URL, and the files in it. Methods raise whatever the library of the file system raises.

    Args:
        url: as ``fsspec`` reads it: a path, ``s3://bucket/run/policy``, ``memory://policy``.
        durable: whether a file is flushed to the disk before it has its name (local file systems).

    Attributes:
        url: as given, for messages: without user, password and query.
        local: its path, if it is on a local file system.

    Raises:
        NotConnected: the file system cannot be opened.
    """

    def __init__(self, url: str, durable: bool) -> None:
        self.url = re.sub(r"(?<=://)[^/]*@|\?.*", "", url) if "://" in url else url
        self._given_url = url
        self._durable = durable
        try:
            opened, self._root = fsspec.core.url_to_fs(url)
        except Exception as error:  # besides OSError: whatever the library of the file system raises
            raise NotConnected(f"the store {self.url} cannot be opened: {self.explain(error)}") from error
        self._protocols = {opened.protocol} if isinstance(opened.protocol, str) else {*opened.protocol}
        self.local = Path(self._root) if isinstance(opened, LocalFileSystem) else None

    @property
    def _fs(self) -> Any:
        """This thread's file system: ``fsspec`` keeps one for each."""
        return fsspec.core.url_to_fs(self._given_url)[0]

    def explain(self, error: Exception) -> str:
        """Return an error of a library as text, without user, password and query of the URLs in it."""
        text = f"{type(error).__name__}: {error}".replace(self._given_url, self.url)  # which may have a blank
        return re.sub(r"://(?:[^\s/?'\"]*@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?", r"://\1", text)

    def make(self) -> None:
        """Make the folder, and delete what a killed trainer left unfinished."""
        if refused := self._protocols & _IN_PLACE:
            raise OSError(f"{min(refused)}:// cannot replace a file as a whole: mount that file system")
        self._fs.makedirs(self._root, exist_ok=True)
        if self.local is not None and self._durable:
            _flush(self.local.parent)
        for name in self.names():
            if name.endswith(_UNFINISHED):
                with suppress(FileNotFoundError):  # another trainer has finished it
                    self.delete(name)

    def names(self) -> list[str]:
        """Return the names of everything in the folder."""
        self._fs.invalidate_cache(self._root)
        try:
            return [path.rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:  # where folders are prefixes of names (S3), an empty one does not exist
            return []

    def delete(self, file: str) -> None:
        """Delete a file."""
        self._fs.rm_file(f"{self._root}/{file}")

    def content(self, file: str, limit: int) -> bytes:
        """Return what is in a file, cut off after ``limit`` bytes."""
        self._fs.invalidate_cache(self._root)
        return self._fs.cat_file(f"{self._root}/{file}", start=0, end=limit)

    def open(self, file: str) -> BinaryIO:
        """Open a file for reading; one that is not local is read at once."""
        if self.local is None:
            return io.BytesIO(self._fs.cat_file(f"{self._root}/{file}"))
        return open(self.local / file, "rb")

    def write(self, file: str, content: bytes) -> None:
        """Write a file, or replace it."""
        if self.local is None:
            return self._fs.pipe_file(f"{self._root}/{file}", content)
        unfinished = self.local / f"{file}.{secrets.token_hex(8)}{_UNFINISHED}"
        try:
            with open(unfinished, "xb") as opened:
                opened.write(content)
                opened.flush()
                if self._durable:
                    os.fsync(opened.fileno())
            unfinished.replace(self.local / file)
        finally:
            unfinished.unlink(missing_ok=True)

    def flush(self) -> None:
        """Flush the names of the files to the disk, if it is a local one and the store is durable."""
        if self._durable and self.local is not None:
            _flush(self.local)


def _flush(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
